"""Sites of two ranks come and go as one: what they do then is still the paper's round."""

import signal
from pathlib import Path

import numpy as np
import pytest
from fleet import Fleet, Told, told_by
from selection import FLEETS
from states import assert_same
from test_elastic import Survivors, floats, joined

BOTH: tuple[str, ...] = ("s0", "s1")


def started(fleet: Fleet) -> Survivors:
    fleet.start(*BOTH)
    start = told_by(fleet, BOTH)
    assert_same(start["s0"].after, start["s1"].after)
    return Survivors(start["s0"])


def end(fleet: Fleet, site: str, dead: str) -> None:
    """As a launcher does: one rank has died, and the others are ended."""
    fleet.wait_for_death(dead)
    (other,) = {f"{site}/0", f"{site}/1"} - {dead}
    fleet.kill(other)


def assert_back(fleet: Fleet, run: Survivors, name: str, other: str) -> None:
    """The site is started again, is given θ and m, and takes part from then on."""
    fleet.start(name)
    back = joined(fleet, run, name, other)
    for what, expected in (("anchor", run.paper.anchor), ("momentum", run.paper.momentum)):
        np.testing.assert_array_equal(floats(back, what), expected)
    np.testing.assert_array_equal(floats(back, "weights"), run.paper.anchor)
    run.residuals[name] = np.zeros_like(run.residuals[name])  # it died with its processes
    for _ in range(2):
        round = fleet.round(*BOTH)
        assert round[other].sites == BOTH
        run.check(round)


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("victim", ["s0/0", "s0/1", "s1/1"])
@pytest.mark.parametrize("moment", ["sending", "voting"])
def test_a_rank_dies_in_a_round_which_is_repeated_without_its_site_that_comes_back(
    moment: str, victim: str
) -> None:
    dies_and_comes_back(moment, victim, shards=False)


@pytest.mark.check(FLEETS)
def test_a_rank_of_shards_dies_in_a_round_and_its_site_comes_back() -> None:
    dies_and_comes_back("voting", "s0/1", shards=True)


def dies_and_comes_back(moment: str, victim: str, *, shards: bool) -> None:
    site = victim[:2]
    (other,) = {*BOTH} - {site}
    with Fleet(2, ranks=2, shards=shards) as fleet:
        run = started(fleet)
        run.check(fleet.round(*BOTH))
        run.check(fleet.round(*BOTH))
        fleet.order(victim, "die_when", moment)
        fleet.order(site, "round", 2)
        fleet.order(other, "round", 2)
        end(fleet, site, victim)
        told = fleet.hear(other)
        assert told.sites == (other,)
        assert told.gave_up
        run.check({other: told})
        assert_back(fleet, run, site, other)


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("victim", ["s0/1", "s1/0"])
def test_a_rank_dies_once_the_round_counts_which_the_other_site_applies(victim: str) -> None:
    site = victim[:2]
    (other,) = {*BOTH} - {site}
    with Fleet(2, ranks=2) as fleet:
        run = started(fleet)
        run.check(fleet.round(*BOTH))
        fleet.order(victim, "die_when", "applying")
        for name in BOTH:
            fleet.order(name, "round", 2)
        fleet.wait_for_death(victim)
        told = fleet.hear(other)
        assert told.sites == BOTH
        end(fleet, site, victim)
        # What the site that died has brought is known from its twin: the same steps from the same weights.
        assert told.round == 2
        after = fleet.round(other)
        assert after[other].sites == (other,)
        assert_same(after[other].before | {"weights": told.after["weights"]}, told.after)
        fleet.start(site)
        fleet.rounds_until_joined(site, other)
        back = fleet.hear(site)
        both = fleet.round(*BOTH)
        assert both[other].sites == BOTH
        for what in ("anchor", "momentum", "weights"):
            np.testing.assert_array_equal(both[site].after[what], both[other].after[what])
        assert back.round == both[site].round - 1


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("victim", ["s0/0", "s1/1"])
def test_a_rank_dies_between_rounds(victim: str) -> None:
    site = victim[:2]
    (other,) = {*BOTH} - {site}
    with Fleet(2, ranks=2) as fleet:
        run = started(fleet)
        run.check(fleet.round(*BOTH))
        fleet.kill(victim)
        end(fleet, site, victim)
        for _ in range(2):  # alone, the ranks of a site agree by their own store
            run.check(fleet.round(other))
        assert_back(fleet, run, site, other)


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("unsure", ["s1", "s1/0", "s1/1"])
def test_ranks_that_missed_the_verdict_commit_the_round_that_the_others_committed(unsure: str) -> None:
    with Fleet(2, ranks=2) as fleet:
        run = started(fleet)
        run.check(fleet.round(*BOTH))
        fleet.order(unsure, "lose_the_verdict")
        if unsure != "s1":  # its other rank knows
            run.check(fleet.round(*BOTH))
            run.check(fleet.round(*BOTH))
            return
        fleet.order("s1", "round", 2)
        first, second = fleet.round("s0"), fleet.round("s0")
        late = fleet.hear("s1")
        run.paper.sites, run.paper.residuals = 2, [run.residuals[name] for name in BOTH]
        run.paper.round([floats(first["s0"], "weights", "before"), floats(late, "weights", "before")])
        run.residuals = dict(zip(BOTH, run.paper.residuals, strict=True))
        late.before = {"weights": first["s0"].after["weights"]}
        run.check(second | {"s1": late})
        run.check(fleet.round(*BOTH))


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("stopped", ["s1/0", "s1/1"])
def test_a_rank_that_is_stopped_is_named_by_its_site_and_the_other_site_goes_on(stopped: str) -> None:
    (awake,) = {"s1/0", "s1/1"} - {stopped}
    with Fleet(2, ranks=2) as fleet:
        run = started(fleet)
        run.check(fleet.round(*BOTH))
        fleet.send(stopped, signal.SIGSTOP)
        fleet.order("s0", "round", 2)
        fleet.order(awake, "round", 2)
        assert "no heartbeat from rank" in fleet.hear(awake).error
        fleet.kill("s1")
        told = fleet.hear("s0")
        assert told.sites == ("s0",)
        run.check({"s0": told})
        assert_back(fleet, run, "s1", "s0")


@pytest.mark.check(FLEETS)
def test_all_sites_resume_from_their_checkpoints(tmp_path: Path) -> None:
    with Fleet(2, ranks=2) as fleet:
        run = started(fleet)
        run.check(fleet.round(*BOTH))
        assert kept(fleet, "keep", tmp_path) == {1}
    with Fleet(2, ranks=2) as fleet:
        fleet.start(*BOTH)
        told_by(fleet, BOTH)
        assert kept(fleet, "resume", tmp_path) == {1}
        run.check(fleet.round(*BOTH))


@pytest.mark.check(FLEETS)
def test_a_site_that_comes_back_with_its_checkpoint_keeps_what_it_withheld(tmp_path: Path) -> None:
    with Fleet(2, ranks=2) as fleet:
        run = started(fleet)
        run.check(fleet.round(*BOTH))
        assert kept(fleet, "keep", tmp_path) == {1}
        fleet.kill("s1")
        run.check(fleet.round("s0"))
        fleet.start("s1")
        joined(fleet, run, "s1", "s0")
        fleet.order("s1", "resume", str(tmp_path / "s1"))
        back = joined(fleet, run, "s1", "s0")
        np.testing.assert_array_equal(floats(back, "residual"), run.residuals["s1"])
        assert floats(back, "residual").any()
        run.check(fleet.round(*BOTH))


def kept(fleet: Fleet, command: str, folder: Path) -> set[int]:
    for name in BOTH:
        fleet.order(name, command, str(folder / name))
    told: dict[str, Told] = told_by(fleet, BOTH)
    assert [one.error for one in told.values()] == ["", ""]
    return {one.round for one in told.values()}


@pytest.mark.check(FLEETS)
def test_a_site_of_another_number_of_ranks_is_turned_away_and_the_others_go_on() -> None:
    with Fleet(2, ranks=2) as fleet:
        run = started(fleet)
        run.check(fleet.round(*BOTH))
        fleet.start("s2", ranks=1)
        while not fleet.has_told("s2"):
            run.check(fleet.round(*BOTH))
        with pytest.raises(RuntimeError, match=r"AgreementError: site s. has 2 ranks, site s2 1: each rank"):
            fleet.hear("s2")
        run.check(fleet.round(*BOTH))


@pytest.mark.check(FLEETS)
def test_a_second_site_of_one_name_is_refused_on_all_its_ranks() -> None:
    with Fleet(2, ranks=2) as fleet:
        run = started(fleet)
        fleet.start("s1 again")
        while not fleet.has_told("s1 again"):
            run.check(fleet.round(*BOTH))
        for rank in (0, 1):
            with pytest.raises(RuntimeError, match="site s1 is here already, in process"):
                fleet.hear(f"s1 again/{rank}")
        run.check(fleet.round(*BOTH))
