"""Sites die, come back and join while the others train on; what they do then is still the paper's round."""

import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fleet import KEY, Fleet, Told, told_by
from paper import Paper
from selection import FLEETS
from sites import free_port
from states import assert_same, small_model

import loco

ALL: tuple[str, ...] = ("s0", "s1", "s2")
AUTO: dict[str, Any] = {"saving": 0.25, "gate_gain": 3.5}
FOUND = {"lr": None, "mu": 0.0, "margin": 0.25, "value_steps": 2, "sums_margin": 0.125}
WAYS = ("store", "lighthouse")  # to meet


class Survivors:
    """The paper's run, of whichever sites take part in a round.

    step: its outer step, if that is not the default.
    """

    def __init__(self, start: Told, **step: Any) -> None:
        theta = floats(start, "anchor")
        step = {"lr": 0.7, "mu": 0.9, **step}
        self.paper = Paper(theta, np.zeros(theta.shape, bool), 3, nesterov=True, gain=3.5, **step)
        self.residuals: dict[str, np.ndarray] = dict.fromkeys(ALL, np.zeros_like(theta))

    def check(self, round: dict[str, Told]) -> None:
        """θ, m and e of all who took part are the paper's, from the weights that they brought."""
        (names,) = {told.sites for told in round.values() if told.sites}
        assert set(names) == {name for name, told in round.items() if told.sites}
        paper = self.paper
        paper.sites, paper.residuals = len(names), [self.residuals[name] for name in names]
        paper.round([floats(round[name], "weights", "before") for name in names])
        for name, residual in zip(names, paper.residuals, strict=True):
            self.residuals[name] = residual
            np.testing.assert_array_equal(floats(round[name], "anchor"), paper.anchor)
            if paper.mu:
                np.testing.assert_array_equal(floats(round[name], "momentum"), paper.momentum)
            np.testing.assert_array_equal(floats(round[name], "residual"), residual)
            np.testing.assert_array_equal(floats(round[name], "weights"), paper.anchor)


def floats(told: Told, name: str, when: str = "after") -> np.ndarray:
    return getattr(told, when)[name].view(np.float32)


def started(fleet: Fleet, **options: Any) -> Survivors:
    """Three sites that have started from one θ."""
    fleet.start(*ALL, **options)
    start = told_by(fleet, ALL)
    for name in ALL:
        assert_same(start[name].after, start["s0"].after)
    return Survivors(start["s0"], **FOUND if options else {})


def joined(fleet: Fleet, run: Survivors, name: str, *others: str) -> Told:
    """The others' rounds, until a site that comes has what they have -> what it tells then."""
    for round in fleet.rounds_until_joined(name, *others):
        run.check(round)
    return fleet.hear(name)


# The first site hosts the store that the others meet by; the last one hosts nothing.
@pytest.mark.check(FLEETS, sample=r"store-sending-s0")
@pytest.mark.parametrize("victim", ["s0", "s2"])
@pytest.mark.parametrize("moment", ["sending", "voting"])
@pytest.mark.parametrize("by", WAYS)
def test_a_round_in_which_a_site_dies_changes_nothing_and_is_repeated_without_it(
    by: str, victim: str, moment: str
) -> None:
    left = [name for name in ALL if name != victim]
    with Fleet(3, by=by) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        run.check(fleet.round(*ALL))
        fleet.order(victim, "die_when", moment)
        fleet.order(victim, "round", 2)
        round = fleet.round(*left)
        fleet.wait_for_death(victim)
        for name in left:
            assert round[name].sites == tuple(left)
            assert round[name].gave_up
            for state in round[name].gave_up:
                assert_same(state, round[name].before)
        run.check(round)
        run.check(fleet.round(*left))


@pytest.mark.check(FLEETS)
def test_the_others_go_on_after_a_site_has_died_between_rounds() -> None:
    with Fleet(3) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        fleet.kill("s0")
        for _ in range(3):
            round = fleet.round("s1", "s2")
            assert round["s1"].sites == ("s1", "s2")
            run.check(round)


@pytest.mark.check(FLEETS)
def test_the_last_site_goes_on_alone() -> None:
    with Fleet(3) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        fleet.kill("s0")
        fleet.kill("s2")
        run.check(fleet.round("s1"))
        run.check(fleet.round("s1"))


@pytest.mark.check(FLEETS)
def test_a_site_that_comes_back_is_given_the_state_and_takes_part_from_then_on() -> None:
    with Fleet(3) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        fleet.kill("s1")
        run.check(fleet.round("s0", "s2"))
        fleet.start("s1")
        for round in (rounds := fleet.rounds_until_joined("s1", "s0", "s2")):
            assert round["s0"].sites == ("s0", "s2")  # who has done no steps is not one of the R
            run.check(round)
        back, theirs = fleet.hear("s1"), rounds[-1]["s0"]
        assert back.round == theirs.round
        for name in ("anchor", "momentum", "weights"):
            np.testing.assert_array_equal(back.after[name], theirs.after[name])
        assert not floats(back, "residual").any()

        run.residuals["s1"] = np.zeros_like(run.residuals["s1"])  # it died with its process
        for _ in range(2):
            round = fleet.round(*ALL)
            assert round["s1"].sites == ALL
            run.check(round)


@pytest.mark.check(FLEETS)
def test_a_site_that_comes_goes_on_with_the_outer_step_that_the_others_have_found() -> None:
    with Fleet(3) as fleet:
        run = started(fleet, **AUTO)
        for _ in range(4):
            run.check(fleet.round(*ALL))
        fleet.kill("s1")
        run.check(fleet.round("s0", "s2"))
        fleet.start("s1", **AUTO)
        joined(fleet, run, "s1", "s0", "s2")
        run.residuals["s1"] = np.zeros_like(run.residuals["s1"])
        for _ in range(3):
            round = fleet.round(*ALL)
            assert round["s1"].sites == ALL
            run.check(round)
        assert run.paper.length is not None
        assert run.paper.length.eighths not in (0, 4)


@pytest.mark.check(FLEETS)
def test_a_site_that_was_never_there_can_join() -> None:
    with Fleet(3) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        fleet.start("s3")
        joined(fleet, run, "s3", *ALL)
        run.residuals["s3"] = np.zeros_like(run.residuals["s0"])
        round = fleet.round(*ALL, "s3")
        assert round["s3"].sites == (*ALL, "s3")
        run.check(round)


@pytest.mark.check(FLEETS)
def test_a_site_that_was_stopped_keeps_what_it_withheld() -> None:
    with Fleet(3) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        fleet.send("s2", signal.SIGSTOP)
        run.check(fleet.round("s0", "s1"))
        fleet.send("s2", signal.SIGCONT)
        fleet.order("s2", "round", 2)  # it is behind, and finds out
        back = joined(fleet, run, "s2", "s0", "s1")
        assert back.exchange == "rejoin"
        np.testing.assert_array_equal(floats(back, "anchor"), run.paper.anchor)
        np.testing.assert_array_equal(floats(back, "residual"), run.residuals["s2"])
        assert floats(back, "residual").any()
        run.check(fleet.round(*ALL))


@pytest.mark.check(FLEETS)
def test_a_site_that_missed_the_verdict_commits_the_round_that_the_others_committed() -> None:
    with Fleet(3) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        fleet.order("s1", "lose_the_verdict")
        fleet.order("s1", "round", 2)
        first = fleet.round("s0", "s2")
        second = fleet.round("s0", "s2")
        late = fleet.hear("s1")
        assert late.gave_up
        assert late.extra == [(1, 2)]  # a state_dict() taken meanwhile says so, and leaves the round as it is
        # It brings no steps to the round after, but what it withheld in the one that it committed too: if it
        # had missed or repeated a round, its θ and e could not be the paper's after both.
        weights = {"weights": first["s0"].after["weights"]}
        run.paper.sites = 3
        run.paper.residuals = [run.residuals[name] for name in ALL]
        run.paper.round(
            [
                floats(first["s0"], "weights", "before"),
                floats(late, "weights", "before"),
                floats(first["s2"], "weights", "before"),
            ]
        )
        run.residuals = dict(zip(ALL, run.paper.residuals, strict=True))
        late.before = weights
        run.check(second | {"s1": late})
        run.check(fleet.round(*ALL))


@pytest.mark.check(FLEETS)
def test_a_site_with_its_own_last_checkpoint_keeps_what_it_withheld(tmp_path: Path) -> None:
    with Fleet(3) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        run.check(fleet.round(*ALL))
        fleet.order("s1", "save", str(tmp_path / "s1.pt"))
        assert fleet.hear("s1").round == 2
        fleet.kill("s1")
        run.check(fleet.round("s0", "s2"))
        fleet.start("s1")
        joined(fleet, run, "s1", "s0", "s2")
        fleet.order("s1", "load", str(tmp_path / "s1.pt"))
        back = joined(fleet, run, "s1", "s0", "s2")
        np.testing.assert_array_equal(floats(back, "anchor"), run.paper.anchor)
        np.testing.assert_array_equal(floats(back, "residual"), run.residuals["s1"])
        assert floats(back, "residual").any()
        run.check(fleet.round(*ALL))


@pytest.mark.check(FLEETS)
def test_what_an_older_checkpoint_withheld_is_not_sent_twice(tmp_path: Path) -> None:
    with Fleet(3) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        fleet.order("s1", "save", str(tmp_path / "s1.pt"))
        fleet.hear("s1")
        run.check(fleet.round(*ALL))  # in which it sends some of it
        fleet.order("s1", "load", str(tmp_path / "s1.pt"))
        back = joined(fleet, run, "s1", "s0", "s2")
        np.testing.assert_array_equal(floats(back, "anchor"), run.paper.anchor)
        assert not floats(back, "residual").any()


@pytest.mark.check(FLEETS)
def test_all_sites_resume_from_their_checkpoints(tmp_path: Path) -> None:
    with Fleet(3) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        for name in ALL:
            fleet.order(name, "save", str(tmp_path / name))
        told_by(fleet, ALL)
    with Fleet(3) as fleet:
        fleet.start(*ALL)
        told_by(fleet, ALL)
        for name in ALL:
            fleet.order(name, "load", str(tmp_path / name))
        assert {told.round for told in told_by(fleet, ALL).values()} == {1}
        run.check(fleet.round(*ALL))


@pytest.mark.check(FLEETS)
def test_a_site_that_ran_away_does_not_take_the_others_with_it() -> None:
    with Fleet(3) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        for name in ALL:
            if name == "s1":
                fleet.order(name, "spoil")
            fleet.order(name, "round", 0)
        assert "NonFiniteError: round 2, site s1" in fleet.hear("s1").error
        fleet.kill("s1")  # as its program would have ended
        round = told_by(fleet, ("s0", "s2"))
        assert round["s0"].sites == ("s0", "s2")
        run.check(round)


def test_a_site_that_is_alone_at_the_start_waits_no_longer_than_its_patience() -> None:
    # So does a process that a launcher has started again after the last round.
    topology = loco.Sites(
        2, site="a", at=f"127.0.0.1:{free_port()}", at_least=1, patience=1.0, dead_after=1.0
    )
    said = r"1 of 2 sites are here \(a\) after 1 s. Start the sites that are missing"
    with closing(topology), pytest.raises(loco.TransportError, match=said):
        loco.PulseLoCo(torch.optim.SGD(small_model(0).parameters(), lr=0.1), topology=topology)


@pytest.mark.check(FLEETS)
def test_a_site_that_was_set_up_differently_is_turned_away_and_the_others_go_on() -> None:
    with Fleet(3) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        fleet.start("s3", outer_lr=0.5)
        for round in fleet.rounds_until_joined("s3", *ALL):
            run.check(round)
        with pytest.raises(RuntimeError, match=r"AgreementError: s3 was .* outer_lr is 0\.5 here and 0\.7"):
            fleet.hear("s3")
        run.check(fleet.round(*ALL))


TAKEN = r"AgreementError: site s1 is here already, in process \d+ on .*, and is alive: give every site a name"


@pytest.mark.check(FLEETS)
def test_a_second_site_of_one_name_is_refused_and_the_others_go_on() -> None:
    with Fleet(3) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        fleet.start("s1 again")
        for _ in range(3):
            run.check(fleet.round(*ALL))
        while not fleet.has_told("s1 again"):
            run.check(fleet.round(*ALL))
        with pytest.raises(RuntimeError, match=TAKEN):
            fleet.hear("s1 again")
        run.check(fleet.round(*ALL))


def test_of_two_sites_of_one_name_at_the_start_one_is_refused() -> None:
    with Fleet(2) as fleet:
        fleet.start("s1", "s1 again")
        while not (fleet.has_told("s1") or fleet.has_told("s1 again")):
            pass
        refused = "s1" if fleet.has_told("s1") else "s1 again"
        with pytest.raises(RuntimeError, match=TAKEN):
            fleet.hear(refused)
        fleet.start("s0")
        left = "s1" if refused == "s1 again" else "s1 again"
        told_by(fleet, ("s0", left))
        assert fleet.round("s0", left)["s0"].sites == ("s0", "s1")


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("by", WAYS)
def test_a_site_that_was_killed_in_the_quorum_may_come_back_at_once(by: str) -> None:
    """A lighthouse takes the old process for alive at first, and names both; a store waits for silence."""
    with Fleet(3, by=by, liveness=15_000) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        fleet.order("s1", "round", 0)
        fleet.wait_for_requests(1)
        fleet.kill("s1")
        fleet.start("s1")
        if by == "lighthouse":
            fleet.wait_for_requests(2)
        for round in fleet.rounds_until_joined("s1", "s0", "s2"):
            run.check(round)
        assert fleet.hear("s1").error == ""
        run.residuals["s1"] = np.zeros_like(run.residuals["s1"])
        round = fleet.round(*ALL)
        assert round["s1"].sites == ALL
        run.check(round)


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("by", WAYS)
def test_a_site_with_another_key_or_none_is_refused_and_the_others_go_on(by: str) -> None:
    with Fleet(3, by=by) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        for name, key in (("s3", None), ("s4", KEY[::-1])):
            fleet.start(name, key=key)
            while not fleet.has_told(name):
                run.check(fleet.round(*ALL))
            with pytest.raises(RuntimeError, match=r"AgreementError|AuthenticationError|no site of this run"):
                fleet.hear(name)
        run.check(fleet.round(*ALL))
