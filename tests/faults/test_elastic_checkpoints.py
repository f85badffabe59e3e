"""Checkpoints of sites that come and go: each its own, and what it brings back is sent once or not at all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet import Fleet, Told, told_by
from selection import FLEETS
from states import assert_same
from test_elastic import ALL, Survivors, floats, joined, started

import loco
from loco.checkpoints.directory import CheckpointDirectory
from loco.checkpoints.rank_manifest import Position, RankManifest

# Milliseconds of silence, as HEARTBEAT: where no site dies none is taken for dead, however busy the machine;
# where one does, the others wait so long.
CALM, DEADLY = 20_000, 5_000


def all_do(fleet: Fleet, command: str, folder: Path, names: tuple[str, ...] = ALL) -> dict[str, Told]:
    """`keep` or `resume` on each of these sites, in a folder of its own; none of them may fail."""
    for name in names:
        fleet.order(name, command, str(folder / name))
    told = told_by(fleet, names)
    assert not any(one.error for one in told.values()), told
    return told


def all_train(fleet: Fleet, begin: int, end: int) -> dict[str, Told]:
    for name in ALL:
        fleet.order(name, "train", begin, end)
    return told_by(fleet, ALL)


def begun(fleet: Fleet, names: tuple[str, ...] = ALL, **options: Any) -> None:
    fleet.start(*names, **options)
    told_by(fleet, names)


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("at", [8, 10])  # at a round's end, and inside a round
def test_a_fleet_that_was_killed_goes_on_bit_for_bit_as_if_never_stopped(tmp_path: Path, at: int) -> None:
    with Fleet(3, liveness=CALM) as fleet:
        begun(fleet, sync_every=4)
        all_train(fleet, 0, at)
        all_do(fleet, "keep", tmp_path)
        whole = all_train(fleet, at, 18)
    with Fleet(3, liveness=CALM) as fleet:
        begun(fleet, sync_every=4)
        for told in all_do(fleet, "resume", tmp_path).values():
            assert told.extra == {"round": 2, "local_step": at - 8}
        pieced = all_train(fleet, at, 18)
    for name in ALL:
        assert pieced[name].round == whole[name].round == 4
        assert_same(pieced[name].after, whole[name].after)
        assert floats(whole[name], "residual").any()


@pytest.mark.check(FLEETS)
def test_of_a_fleet_the_furthest_site_gives_its_state_to_those_a_save_behind(tmp_path: Path) -> None:
    with Fleet(3, liveness=CALM) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        all_do(fleet, "keep", tmp_path)
        run.check(fleet.round(*ALL))
        all_do(fleet, "keep", tmp_path, ("s1",))  # the others are killed before they come to it
    with Fleet(3, liveness=CALM) as fleet:
        begun(fleet)
        back = all_do(fleet, "resume", tmp_path)
        for name in ALL:
            assert back[name].round == 2
            np.testing.assert_array_equal(floats(back[name], "anchor"), run.paper.anchor)
            np.testing.assert_array_equal(floats(back[name], "momentum"), run.paper.momentum)
        np.testing.assert_array_equal(floats(back["s1"], "residual"), run.residuals["s1"])
        for name in ("s0", "s2"):
            assert_dropped(back[name], run, name, round=1, last=2)
        run.check(fleet.round(*ALL))


@pytest.mark.check(FLEETS)
def test_a_fleet_can_come_back_with_fewer_sites(tmp_path: Path) -> None:
    with Fleet(3, liveness=CALM) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        all_do(fleet, "keep", tmp_path)
    with Fleet(2, liveness=CALM) as fleet:
        left = ("s0", "s2")
        begun(fleet, left)
        all_do(fleet, "resume", tmp_path, left)
        round = fleet.round(*left)
        assert round["s0"].sites == left
        run.check(round)


@pytest.mark.check(FLEETS)
def test_a_site_that_lost_its_checkpoints_does_not_set_the_others_back(tmp_path: Path) -> None:
    """It has no rounds to bring, whether it comes to load or, with nothing to load, to its first round."""
    with Fleet(3, liveness=CALM) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        run.check(fleet.round(*ALL))
        all_do(fleet, "keep", tmp_path, ("s1", "s2"))
    with Fleet(3, liveness=CALM) as fleet:
        begun(fleet)
        fleet.order("s0", "resume", str(tmp_path / "s0"))
        nothing = fleet.hear("s0")
        assert (nothing.extra, nothing.error, nothing.round) == (None, "", 0)
        fleet.order("s0", "round", 2)
        back = all_do(fleet, "resume", tmp_path, ("s1", "s2"))
        back["s0"] = fleet.hear("s0")
        assert back["s0"].exchange == "rejoin"
        for name in ALL:
            assert back[name].round == 2
            np.testing.assert_array_equal(floats(back[name], "anchor"), run.paper.anchor)
        run.residuals["s0"] = np.zeros_like(run.residuals["s0"])
        run.check(fleet.round(*ALL))


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize("rounds_since", [0, 1])
def test_a_site_that_was_killed_sends_what_its_checkpoint_withheld_once_at_most(
    tmp_path: Path, rounds_since: int
) -> None:
    """It is kept if the checkpoint is of the last round that the site took part in."""
    with Fleet(3, liveness=DEADLY) as fleet:
        run = started(fleet)
        run.check(fleet.round(*ALL))
        all_do(fleet, "keep", tmp_path, ("s1",))
        for _ in range(rounds_since):
            run.check(fleet.round(*ALL))  # in which it sends some of it
        fleet.kill("s1")
        run.check(fleet.round("s0", "s2"))
        fleet.start("s1")
        joined(fleet, run, "s1", "s0", "s2")
        fleet.order("s1", "resume", str(tmp_path / "s1"))
        back = joined(fleet, run, "s1", "s0", "s2")
        assert back.extra == {"round": 1, "local_step": 0}
        np.testing.assert_array_equal(floats(back, "anchor"), run.paper.anchor)
        np.testing.assert_array_equal(floats(back, "momentum"), run.paper.momentum)
        np.testing.assert_array_equal(floats(back, "weights"), run.paper.anchor)
        if rounds_since:
            assert_dropped(back, run, "s1", round=1, last=2)
        else:
            np.testing.assert_array_equal(floats(back, "residual"), run.residuals["s1"])
            assert floats(back, "residual").any()
            assert "residual" not in back.warned
        run.check(fleet.round(*ALL))
        all_do(fleet, "keep", tmp_path)  # what it came back with lies in the folder that it loaded from


def assert_dropped(told: Told, run: Survivors, name: str, *, round: int, last: int) -> None:
    """A residual of which a part may have been sent is empty, and a warning says so."""
    assert not floats(told, "residual").any()
    assert f"residual of round {round} " in told.warned
    assert f"the last round it took part in is {last}" in told.warned
    run.residuals[name] = np.zeros_like(run.residuals[name])


@pytest.mark.check(FLEETS)
def test_a_site_that_holds_half_of_anothers_state_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    with Fleet(2, liveness=DEADLY) as fleet:
        begun(fleet, ("s0", "s1"))
        fleet.round("s0", "s1")
        all_do(fleet, "keep", tmp_path, ("s0", "s1"))
        fleet.round("s0", "s1")
        fleet.order("s0", "die_when", "giving")
        fleet.order("s0", "round", 2)
        fleet.order("s1", "resume", str(tmp_path / "s1"))
        alone = fleet.hear("s1")
        fleet.wait_for_death("s0")
        assert "no site that is left holds the whole anchor: load the last checkpoints" in alone.error
        (back,) = all_do(fleet, "resume", tmp_path, ("s1",)).values()
        assert back.extra == {"round": 1, "local_step": 0}
        assert fleet.round("s1")["s1"].round == 2


@pytest.mark.check(FLEETS)
def test_two_sites_that_share_a_folder_are_told_so_and_overwrite_nothing(tmp_path: Path) -> None:
    shared = str(tmp_path / "checkpoints")
    with Fleet(2, liveness=CALM) as fleet:
        begun(fleet, ("s0", "s1"))
        for _ in range(3):
            fleet.round("s0", "s1")
            fleet.order("s0", "keep", shared)
            assert fleet.hear("s0").error == ""
            for command in ("keep", "resume"):
                before = contents(tmp_path)
                fleet.order("s1", command, shared)
                error = fleet.hear("s1").error
                assert error.startswith("CheckpointError: ")
                assert "is of site s0, but this is site s1: give each site a folder of its own" in error
                assert contents(tmp_path) == before
        assert sorted(path.name for path in Path(shared).iterdir()) == ["round-00000002", "round-00000003"]


def put(folder: Path, name: str, round: int) -> dict[Path, bytes]:
    """What lies there once this site, who has seen an empty folder, has saved."""

    def write(partial: Path) -> None:
        (partial / "state.pt").write_text(name)
        RankManifest(
            name=name,
            round=round,
            local_step=0,
            save=name,
            world=1,
            num_sites=1,
            ranks_per_site=1,
            site=0,
            rank_in_site=0,
            settings={},
            parameters=[],
            digest="",
            format="torch",
            files={},
            loco="",
        ).write(partial)

    CheckpointDirectory(folder, 0, 1, name).put(Position(round, 0), write)
    return contents(folder)


def test_of_two_sites_that_save_first_in_one_folder_at_once_one_is_refused(tmp_path: Path) -> None:
    kept = put(tmp_path, "berlin", 1)
    with pytest.raises(loco.CheckpointError, match="is of site berlin, but this is site paris"):
        put(tmp_path, "paris", 1)
    assert contents(tmp_path) == kept
    assert put(tmp_path, "berlin", 1) == kept  # which a site may do to its own


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
