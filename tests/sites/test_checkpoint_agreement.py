"""All ranks save and load together, or none does, and each learns why; also after a round that went wrong."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sites import error_of, run_ranks
from states import Snapshot, assert_same, snapshot, train
from test_checkpoint import built

import loco
from loco.coordination import commit as decision
from loco.coordination.store_client import StoreClient
from loco.net.transport import Transport


def out_of_step(rank: int, folder: str) -> Any:
    net, optimizer = built()
    train(net, optimizer, rank, range(1 + rank))
    checkpoints = loco.Checkpoints(folder)
    one = error_of(checkpoints.save, optimizer)
    if rank == 0:
        train(net, optimizer, rank, range(1, 2))
    failing: Callable[[], Any] = optimizer.state_dict
    if rank == 1:
        optimizer.state_dict = lambda: 1 / 0
    other = error_of(checkpoints.save, optimizer)
    optimizer.state_dict = failing
    return one, other, os.path.exists(folder)


def test_ranks_that_save_at_different_places_or_fail_all_learn_of_it(tmp_path: Path) -> None:
    for rank, (one, other, exists) in enumerate(run_ranks(2, out_of_step, str(tmp_path / "x"))):
        assert one[0] == "CheckpointError"
        assert "rank 0 for 'saving round 0, step 1', rank 1 for 'saving round 0, step 2'" in one[1]
        assert other == (
            ("ZeroDivisionError", "division by zero")
            if rank
            else ("CheckpointError", "saving round 0, step 2: rank 1 failed: division by zero")
        )
        assert not exists


def saved_when_the_verdict_was_cut_off(rank: int, folder: Path, cut_off: list[int]) -> Any:
    """The store does not answer whether a round counts, and a careful program saves before all else."""
    optimizer = built(sync_every=2)[1]
    optimizer.step()
    decide, cut = decision.decide, rank in cut_off

    def unheard(*args: Any) -> str:
        nonlocal cut
        verdict = decide(*args)
        if cut:
            cut = False
            raise loco.TransportError("the store does not answer (injected)", lasting=True)
        return verdict

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decision, "decide", unheard)
        kind = error_of(optimizer.step)[0]
        with loco.Checkpoints(folder / str(rank)) as checkpoints:
            checkpoints.save(optimizer, blocking=True)
    again = built(sync_every=2)[1]
    loco.Checkpoints(folder / str(rank)).load(again)
    return kind, (again.round, again.local_step)


@pytest.mark.parametrize("cut_off", [[0, 1], [1]])
def test_what_is_saved_after_a_round_whose_end_was_cut_off_is_of_after_it(
    tmp_path: Path, cut_off: list[int]
) -> None:
    for rank, (kind, position) in enumerate(
        run_ranks(2, saved_when_the_verdict_was_cut_off, tmp_path, cut_off)
    ):
        assert kind == ("TransportError" if rank in cut_off else "")
        assert position == (1, 0)


def saved_twice(rank: int, folder: Path) -> tuple[list[str], Any]:
    optimizer = built(sync_every=1)[1]
    optimizer.sync()
    with loco.Checkpoints(folder) as checkpoints:
        names = []
        for extra in ("first", "second"):
            checkpoints.save(optimizer, extra, blocking=True)
            path = folder / f"round-00000001/rank-{rank:05d}"
            names.append(json.loads((path / "manifest.json").read_text())["save"])
    return names, loco.Checkpoints(folder).load(built(sync_every=1)[1])


def test_what_all_ranks_hold_is_not_put_at_risk_to_save_the_same_again(tmp_path: Path) -> None:
    for (first, second), extra in run_ranks(2, saved_twice, tmp_path):
        assert first == second
        assert extra == "first"


def two_folders(rank: int, folder: Path) -> Any:
    """Once, rank 1 does not hear what came of the one folder's save."""
    optimizer = built(sync_every=1)[1]
    pair = [loco.Checkpoints(folder / name / str(rank)) for name in ("fast", "safe")]
    mute, multi_get = rank == 1, StoreClient.multi_get

    def unheard(self: StoreClient, keys: list[str]) -> Any:
        nonlocal mute
        if mute and "/notes/" in keys[0]:
            mute = False
            raise RuntimeError("no answer (injected)")
        return multi_get(self, keys)

    errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreClient, "multi_get", unheard)
        for _ in range(3):
            optimizer.sync()
            errors.append([error_of(checkpoints.save, optimizer)[0] for checkpoints in pair])
    for checkpoints in pair:
        checkpoints.close()
    rounds = []
    for checkpoints in pair:
        again = built(sync_every=1)[1]
        loco.Checkpoints(checkpoints.folder).load(again)
        rounds.append(again.round)
    return errors, rounds


def test_one_folders_save_is_not_taken_for_anothers(tmp_path: Path) -> None:
    results = run_ranks(2, two_folders, tmp_path)
    assert results[1][0] == [["TransportError", ""], ["", ""], ["", ""]]
    for _, rounds in results:
        assert rounds == [3, 3]


def saved_while_a_site_reconnects(rank: int, folder: Path) -> tuple[list[str], Snapshot, Any]:
    """The link inside site 0 breaks when a round counts already, so that site 1 goes on, and saves."""
    optimizer = built(each=2, sync_every=1)[1]
    gather, broken = Transport.gather, rank != 1

    def lose(self: Transport, *args: Any, **options: Any) -> Any:
        nonlocal broken
        if optimizer.round == 1 and not broken:
            broken = True
            raise loco.TransportError("anchor inside the site: a link broke (injected)")
        return gather(self, *args, **options)

    errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "gather", lose)
        while optimizer.round < 1 or (errors and not errors[-1].startswith("nothing")):
            errors.append(error_of(optimizer.sync)[1])
        with loco.Checkpoints(folder / str(rank)) as checkpoints:
            checkpoints.save(optimizer, blocking=True)
    state = snapshot(optimizer)
    again = built(each=2, sync_every=1)[1]
    loco.Checkpoints(folder / str(rank)).load(again)
    return errors, state, snapshot(again)


def test_who_saves_comes_to_those_who_must_connect_anew_first(tmp_path: Path) -> None:
    """They can't come to save before, and nobody else would ever come to connect."""
    for _, saved, loaded in run_ranks(4, saved_while_a_site_reconnects, tmp_path):
        assert_same(saved, loaded)


def loaded_from(rank: int, folder: Path) -> tuple[str, str]:
    return error_of(loco.Checkpoints(folder / str(rank)).load, built()[1])


def test_a_folder_that_is_none_is_found_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("a file")
    one, other = run_ranks(2, loaded_from, tmp_path)
    assert other[0] == "NotADirectoryError"
    assert one[0] == "CheckpointError"
    assert one[1].startswith("looking for checkpoints: rank 1 failed: [Errno 20] Not a directory: ")


def saved_after_a_failed_round(rank: int, folder: Path) -> tuple[str, int]:
    """What a careful user's loop does: a link is lost, so save before anything else is tried."""
    optimizer = built(sync_every=2)[1]
    for _ in range(3):
        optimizer.step()
    with pytest.MonkeyPatch.context() as patch:

        def lose(*_: Any) -> Any:
            raise loco.TransportError("lost a link (injected)")

        patch.setattr("loco.exchange.stream.Stream.arrived", lose)
        kind = error_of(optimizer.step)[0]
    if rank == 1:
        time.sleep(2.0)  # the others wait for one who has left, and is expected back
    with loco.Checkpoints(folder) as checkpoints:
        checkpoints.save(optimizer, blocking=True)
    optimizer.sync()
    return kind, optimizer.round


def test_a_checkpoint_can_be_saved_by_ranks_that_have_left_a_round(tmp_path: Path) -> None:
    assert run_ranks(3, saved_after_a_failed_round, tmp_path) == [("TransportError", 2)] * 3
