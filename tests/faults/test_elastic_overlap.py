"""Sites die, come back and join while rounds travel beside their inner steps: each site's bits are those of
the specification, led through what it did."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet import Fleet, Told, told_by
from paper import OverlappedPaper
from scripted import bits
from selection import FLEETS
from states import assert_same
from test_elastic_ranks import BOTH, kept

ALL: tuple[str, ...] = ("s0", "s1", "s2")
OVERLAPPED: dict[str, Any] = {"overlap": True, "sync_every": 2}
# Seconds in which a site that is given θ has told so. The others then wait for its next boundary.
SERVED = 3.0
Vector = np.ndarray


class InFlight:
    """The specification's run, of whichever sites take part in a round.

    A site that has come crosses its first boundary when the others cross their second since, so what is
    applied at the same time need not be of the same number.

    Args:
        start: what a site told at the start.

    Attributes:
        shared: θ and m, by the number of rounds done.
        flying: what was sent, by site and round.
    """

    def __init__(self, start: Told) -> None:
        theta = floats(start.after, "anchor")
        self.paper = OverlappedPaper(
            theta, np.zeros(theta.shape, bool), 1, lr=0.7, mu=0.9, nesterov=True, gain=3.5
        )
        self.shared = {0: (theta, np.zeros_like(theta))}
        self.residuals: dict[str, Vector] = {}
        self.began: dict[str, Vector] = {}
        self.flying: dict[tuple[str, int], tuple[Vector, Vector]] = {}

    def come(self, name: str, told: Told) -> None:
        """A site has been given what the others hold."""
        theta = self.shared[told.round][0]
        self.residuals[name], self.began[name] = np.zeros_like(theta), theta
        self._check(name, told)

    def check(self, round: Mapping[str, Told]) -> None:
        """A boundary of these sites. One that was left behind is given θ as it is after it."""
        for name, told in sorted(round.items(), key=lambda one: (one[1].round, one[1].exchange == "rejoin")):
            assert not told.error
            weights = floats(told.before, "weights")
            if told.exchange == "rejoin":
                self.keep(name, weights)
                self.began[name] = self.shared[told.round][0]
                self._check(name, told)
                continue
            if told.sites and told.round not in self.shared:
                self._land(told.sites, told.round)
            paper, (paper.anchor, _) = self.paper, self.shared[told.round]
            paper.residuals, paper.began = [self.residuals[name]], [self.began[name]]
            self.flying[name, told.round + 1] = paper.sends(0, weights)
            (self.residuals[name],), (self.began[name],) = paper.residuals, paper.began
            self._check(name, told)

    def keep(self, name: str, weights: Vector) -> None:
        """All that a site has not given the others stays in e."""
        for where, sent in [self.flying.pop(key) for key in list(self.flying) if key[0] == name]:
            self.residuals[name][where] += sent[where]
        self.residuals[name] = (self.began[name] - weights) + self.residuals[name]

    def _land(self, names: tuple[str, ...], number: int) -> None:
        paper = self.paper
        paper.sites, paper.residuals = len(names), [self.residuals[name] for name in names]
        paper.anchor, paper.momentum = self.shared[number - 1]
        paper.flying = [self.flying.pop((name, number)) for name in names]
        paper.land()
        self.shared[number] = paper.anchor, paper.momentum

    def _check(self, name: str, told: Told) -> None:
        theta, momentum = self.shared[told.round]
        expected = {"anchor": theta, "momentum": momentum}
        expected |= {"residual": self.residuals[name], "weights": self.began[name]}
        assert_same(told.after, {what: bits(vector) for what, vector in expected.items()})


def floats(state: Mapping[str, Vector], name: str) -> Vector:
    return state[name].view(np.float32)


def started(fleet: Fleet, *names: str) -> InFlight:
    """Sites that have started from one θ, and have crossed two boundaries; by default three."""
    names = names or ALL
    fleet.start(*names, **OVERLAPPED)
    told = told_by(fleet, names)
    run = InFlight(told["s0"])
    for name in names:
        run.come(name, told[name])
    for _ in range(2):
        run.check(fleet.boundary(*names))
    return run


def flown(fleet: Fleet) -> InFlight:
    """As `started`; and the round in flight has come to s1."""
    run = started(fleet)
    fleet.order("s1", "await_flight")
    fleet.hear("s1")
    return run


def stopped(fleet: Fleet) -> InFlight:
    """As `started`; then s1 stands still for three boundaries of the others."""
    run = started(fleet)
    fleet.send("s1", signal.SIGSTOP)
    for _ in range(3):
        run.check(fleet.boundary("s0", "s2"))
    fleet.send("s1", signal.SIGCONT)
    return run


def until_told(fleet: Fleet, run: InFlight, name: str, *others: str) -> Told:
    """Boundaries of the others, until this site tells something."""
    while not fleet.has_told(name, within=SERVED):
        run.check(fleet.boundary(*others))
    return fleet.hear(name)


def check_all_take_part(fleet: Fleet, run: InFlight, *names: str) -> None:
    for _ in range(2):
        run.check(fleet.boundary(*names))
    run.check(round := fleet.boundary(*names))
    assert all(told.sites == names for told in round.values())


def goes_on_until_s1_is_back(fleet: Fleet, run: InFlight) -> None:
    run.check(round := fleet.boundary("s0", "s2"))
    assert round["s0"].sites == ("s0", "s2")
    fleet.start("s1", **OVERLAPPED)
    run.come("s1", until_told(fleet, run, "s1", "s0", "s2"))
    check_all_take_part(fleet, run, *ALL)


@pytest.mark.parametrize(("ranks", "shards"), [(1, False), (2, False), (2, True)])
def test_who_dies_takes_its_part_of_the_round_in_flight_with_it_and_may_come_back(
    ranks: int, shards: bool
) -> None:
    with Fleet(3, ranks=ranks, shards=shards) as fleet:
        run = started(fleet)
        fleet.kill("s1")
        run.check(round := fleet.boundary("s0", "s2"))
        assert round["s0"].sites in (ALL, ("s0", "s2"))  # it may have been over when s1 died
        goes_on_until_s1_is_back(fleet, run)


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("by", ["store", "lighthouse"])
def test_a_site_that_was_never_there_can_join(by: str) -> None:
    with Fleet(3, by=by) as fleet:
        run = started(fleet)
        fleet.start("s3", **OVERLAPPED)
        run.come("s3", until_told(fleet, run, "s3", *ALL))
        check_all_take_part(fleet, run, *ALL, "s3")


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_site_that_was_stopped_loses_nothing_of_what_it_has_done(ranks: int) -> None:
    with Fleet(3, ranks=ranks) as fleet:
        run = stopped(fleet)
        assert left_behind(fleet, run).exchange == "rejoin"
        check_all_take_part(fleet, run, *ALL)


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_site_that_is_given_the_others_weights_says_so_if_its_own_were_nan(ranks: int) -> None:
    with Fleet(3, ranks=ranks) as fleet:
        run = stopped(fleet)
        fleet.order("s1", "spoil_steps")
        fleet.order("s1", "boundary", 2)
        told = until_told(fleet, run, "s1", "s0", "s2")
        assert (told.exchange, told.round) == ("rejoin", max(run.shared))
        assert told.error.startswith(
            "NonFiniteError: round 2: the update of group0.param0 is infinite or NaN"
        )
        assert all(np.isfinite(floats(told.after, name)).all() for name in ("weights", "residual"))


def left_behind(fleet: Fleet, run: InFlight) -> Told:
    """Boundaries of the others, until s1 has crossed one -> what it tells."""
    fleet.order("s1", "boundary", 2)
    told = until_told(fleet, run, "s1", "s0", "s2")
    run.check({"s1": told})
    return told


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_site_that_missed_the_verdict_applies_the_round_that_the_others_committed(ranks: int) -> None:
    with Fleet(3, ranks=ranks) as fleet:
        run = flown(fleet)
        fleet.order("s1", "lose_the_verdict")
        run.check(round := fleet.boundary(*ALL))
        told = left_behind(fleet, run)
        assert (told.sites, told.exchange) == (ALL, "rejoin")  # the one after it was run by the others alone
        assert told.round == round["s1"].round + 2
        check_all_take_part(fleet, run, *ALL)


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_sites_resume_from_states_that_were_saved_with_a_round_in_flight(
    ranks: int, tmp_path: Path
) -> None:
    with Fleet(3, ranks=ranks) as fleet:
        run = started(fleet)
        for name in ALL:
            fleet.order(name, "save", str(tmp_path / name))
        assert {told.round for told in told_by(fleet, ALL).values()} == {1}
    with Fleet(3, ranks=ranks) as fleet:
        fleet.start(*ALL, **OVERLAPPED)
        told_by(fleet, ALL)
        for name in ALL:
            fleet.order(name, "load", str(tmp_path / name))
        told_by(fleet, ALL)
        check_all_take_part(fleet, run, *ALL)


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_site_had_on_its_way_when_it_saved_and_died_goes_with_a_later_round(
    ranks: int, tmp_path: Path
) -> None:
    with Fleet(3, ranks=ranks) as fleet:
        run = started(fleet)
        run.check(fleet.boundary("s1"))  # its part waits for the others'
        fleet.order("s1", "save", str(tmp_path / "s1"))
        fleet.hear("s1")
        fleet.kill("s1")
        run.check(fleet.boundary("s0", "s2"))
        run.check(round := fleet.boundary("s0", "s2"))
        assert round["s0"].sites == ("s0", "s2")
        fleet.start("s1", **OVERLAPPED)
        until_told(fleet, run, "s1", "s0", "s2")
        fleet.order("s1", "load", str(tmp_path / "s1"))
        told = until_told(fleet, run, "s1", "s0", "s2")
        run.keep("s1", run.began["s1"])
        assert_same({"residual": told.after["residual"]}, {"residual": bits(run.residuals["s1"])})
        run.began["s1"] = run.shared[told.round][0]
        check_all_take_part(fleet, run, *ALL)


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("unsure", ["s1/0", "s1/1"])
def test_a_rank_that_missed_the_verdict_is_told_it_by_its_site(unsure: str) -> None:
    with Fleet(3, ranks=2) as fleet:
        run = flown(fleet)
        fleet.order(unsure, "lose_the_verdict")
        for _ in range(4):
            run.check(round := fleet.boundary(*ALL))
            assert {told.sites for told in round.values()} == {ALL}


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("dead", ["s1/0", "s1/1"])
def test_a_rank_that_dies_is_named_by_its_site_and_the_others_go_on(dead: str) -> None:
    (left,) = {"s1/0", "s1/1"} - {dead}
    with Fleet(3, ranks=2) as fleet:
        run = flown(fleet)
        fleet.kill(dead)
        fleet.order(left, "boundary", 2)
        assert f"rank {dead[-1]}" in fleet.hear(left).error
        fleet.kill(left)
        run.check(fleet.boundary("s0", "s2"))
        goes_on_until_s1_is_back(fleet, run)


@pytest.mark.check(FLEETS)
def test_ranks_that_save_together_resume_with_the_round_that_was_in_flight(tmp_path: Path) -> None:
    with Fleet(2, ranks=2) as fleet:
        run = started(fleet, *BOTH)
        kept(fleet, "keep", tmp_path)
        run.check(fleet.boundary(*BOTH))  # saving has disturbed nobody
        kept(fleet, "keep", tmp_path)
    with Fleet(2, ranks=2) as fleet:
        fleet.start(*BOTH, **OVERLAPPED)
        told_by(fleet, BOTH)
        kept(fleet, "resume", tmp_path)
        check_all_take_part(fleet, run, *BOTH)


@pytest.mark.check(FLEETS)
def test_a_rank_that_stood_still_shares_what_its_site_lacks() -> None:
    with Fleet(3, ranks=2) as fleet:
        flown(fleet)
        fleet.send("s1/1", signal.SIGSTOP)
        for name in ("s0", "s2", "s1/0"):
            fleet.order(name, "boundary", 2)
        assert "no heartbeat from rank 1 of site s1" in fleet.hear("s1/0").error
        fleet.send("s1/1", signal.SIGCONT)
        fleet.order("s1/1", "boundary", 2)
        assert not fleet.hear("s1/1").error
        fleet.order("s1", "settle")
        assert not fleet.hear("s1").error
        assert_go_on(fleet)


def assert_go_on(fleet: Fleet) -> None:
    """The boundary of s0 and s2 was not without s1, and nor are the next ones."""
    assert fleet.hear("s0").sites == fleet.hear("s2").sites == ALL
    for _ in range(2):
        assert all(told.sites == ALL for told in fleet.boundary(*ALL).values())


@pytest.mark.check(FLEETS)
def test_a_rank_that_gave_up_in_doubt_crosses_the_boundary_that_its_site_waits_at() -> None:
    with Fleet(3, ranks=2) as fleet:
        flown(fleet)
        fleet.order("s1/0", "repeat_none")
        fleet.order("s1/0", "lose_the_verdict")
        fleet.boundary(*ALL)
        for name in ALL:
            fleet.order(name, "boundary", 2)
        assert "the store does not answer" in fleet.hear("s1/0").error
        fleet.order("s1/0", "settle")
        assert not fleet.hear("s1/0").error
        assert not fleet.hear("s1/1").error
        assert_go_on(fleet)


@pytest.mark.check(FLEETS)
def test_a_rank_whose_boundary_was_torn_is_named_by_its_site_at_once() -> None:
    with Fleet(3, ranks=2) as fleet:
        started(fleet)
        fleet.order("s1/1", "tear")
        for name in ALL:
            fleet.order(name, "boundary", 2)
        assert fleet.hear("s1/1").error.startswith("TornError")
        told = fleet.hear("s1/0").error
        assert "rank 1 of site s1 has left: round 2 was stopped while it was applied" in told


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("what", ["evaluate", "keep"])
def test_ranks_of_which_one_missed_the_verdict_do_what_all_do_together(what: str, tmp_path: Path) -> None:
    with Fleet(3, ranks=2) as fleet:
        run = flown(fleet)
        fleet.order("s1/0", "lose_the_verdict")
        run.check(fleet.boundary(*ALL))
        fleet.order("s1/1", "await_flight")
        fleet.hear("s1/1")
        fleet.order("s1", what, *([str(tmp_path)] if what == "keep" else []))
        told = fleet.hear("s1")
        assert not told.error
        if what == "evaluate":
            assert_same({"weights": told.before["weights"]}, {"weights": bits(run.shared[told.round][0])})
        check_all_take_part(fleet, run, *ALL)


@pytest.mark.check(FLEETS)
def test_all_ranks_of_a_site_raise_at_one_boundary_if_one_has_an_update_that_is_nan() -> None:
    with Fleet(3, ranks=2) as fleet:
        started(fleet)
        fleet.order("s1", "spoil_once", 2)
        fleet.boundary(*ALL)
        for name in ALL:
            fleet.order(name, "boundary", 2)
        errors = fleet.hear("s1").error.split("\n")
        assert len(errors) == 2
        assert all("NonFiniteError: round 3, " in error for error in errors)
        fleet.order("s1", "boundary", 2)  # the others wait for it
        for name in ALL:
            assert not fleet.hear(name).error
        assert all(told.sites == ALL for told in fleet.boundary(*ALL).values())
