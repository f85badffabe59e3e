"""All ranks save and load together, or none does, and each learns why; also after a round that went wrong."""

import json
import logging
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import CHECKPOINTS
from sites import error_of, run_ranks
from states import Snapshot, assert_same, snapshot, train
from test_checkpoint import built
from test_membership import rewrite

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
        assert "site 0 for 'saving round 0, step 1', site 1 for 'saving round 0, step 2'" in one[1]
        assert other == (
            ("ZeroDivisionError", "division by zero")
            if rank
            else ("CheckpointError", "saving round 0, step 2: site 1 failed: division by zero")
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


@pytest.mark.check(CHECKPOINTS, sample="cut_off1")
@pytest.mark.parametrize("cut_off", [[0, 1], [1]])
def test_what_is_saved_after_a_round_whose_end_was_cut_off_is_of_after_it(
    tmp_path: Path, cut_off: list[int]
) -> None:
    for rank, (kind, position) in enumerate(
        run_ranks(2, saved_when_the_verdict_was_cut_off, tmp_path, cut_off)
    ):
        assert kind == ("TransportError" if rank in cut_off else "")
        assert position == (1, 0)


def asked_when_the_verdict_was_cut_off(rank: int) -> Any:
    """The state of a rank that does not know whether a round counts, and what becomes of that round."""
    optimizer = built(sync_every=2)[1]
    optimizer.step()
    before = snapshot(optimizer)
    decide, calls = decision.decide, 0

    def unheard(*args: Any) -> str:
        nonlocal calls
        calls += 1
        verdict = decide(*args)
        if rank == 1 and calls == 1:
            raise loco.TransportError("the store does not answer (injected)", lasting=True)
        return verdict

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decision, "decide", unheard)
        kind = error_of(optimizer.step)[0]
        calls_before = calls
        state = pickle.loads(pickle.dumps(optimizer.state_dict()))
        asked = calls - calls_before
        report = optimizer.settle()
    settled = optimizer.round, optimizer.local_step, optimizer.state_dict()["loco"]["undecided_round"]
    own = state["loco"]
    anchor = before["anchor"].tobytes() == own["anchor"].numpy().tobytes()
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("loco").addHandler(handler)
    again = built(sync_every=2)[1]
    again.load_state_dict(state)
    return {
        "kind": kind,
        "asked": asked,
        "state": (own["round"], own["local_step"], own["undecided_round"]),
        "is before": anchor,
        "report": report and report.round,
        "settled": settled,
        "loaded": (again.round, again.local_step),
        "warned": [line for line in warned if "the outcome of round 1 was known" in line],
    }


def test_state_dict_asks_nobody_about_an_undecided_round_and_says_that_it_is_undecided() -> None:
    certain, doubtful = run_ranks(2, asked_when_the_verdict_was_cut_off)
    assert doubtful["kind"] == "TransportError"
    assert (doubtful["asked"], certain["asked"]) == (0, 0)
    assert doubtful["state"] == (0, 2, 1)
    assert doubtful["is before"]
    assert doubtful["report"] == 1  # the round was still there to be settled
    assert certain["state"] == (1, 0, None)
    assert certain["report"] is None
    assert doubtful["settled"] == certain["settled"] == (1, 0, None)
    assert doubtful["loaded"] == (0, 2)
    assert len(doubtful["warned"]) == 1
    assert not certain["warned"]


def saved_twice(rank: int, folder: Path) -> tuple[list[str], Any]:
    optimizer = built(sync_every=1)[1]
    optimizer.sync()
    with loco.Checkpoints(folder) as checkpoints:
        names = []
        for extra in ("first", "second"):
            checkpoints.save(optimizer, extra, blocking=True)
            path = folder / f"round-00000001/rank-{rank:05d}"
            names.append(json.loads((path / "manifest.json").read_text())["save"])
    resumed = loco.Checkpoints(folder).load(built(sync_every=1)[1])
    assert resumed is not None
    return names, resumed.extra


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


@pytest.mark.check(CHECKPOINTS)
def test_one_folders_save_is_not_taken_for_anothers(tmp_path: Path) -> None:
    results = run_ranks(2, two_folders, tmp_path)
    assert results[1][0] == [["TransportError", ""], ["", ""], ["", ""]]
    for _, rounds in results:
        assert rounds == [3, 3]


def saved_while_a_site_reconnects(rank: int, folder: Path) -> tuple[tuple[str, str], Snapshot, Any]:
    """The link inside site 0 breaks when a round counts already, so that site 1 goes on, and saves."""
    optimizer = built(each=2, sync_every=1)[1]
    gather, broken = Transport.gather, rank != 1

    def lose(self: Transport, *args: Any, **options: Any) -> Any:
        nonlocal broken
        if optimizer.round == 1 and not broken:
            broken = True
            raise loco.TransportError("anchor inside the site: a link broke (injected)")
        return gather(self, *args, **options)

    errors, asked = [], ("", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "gather", lose)
        while optimizer.round < 1 or (errors and not errors[-1].startswith("nothing")):
            errors.append(error_of(optimizer.sync)[1])
            if "(injected)" in errors[-1]:
                asked = error_of(optimizer.state_dict)  # which must not wait for the other ranks
        with loco.Checkpoints(folder / str(rank)) as checkpoints:
            checkpoints.save(optimizer, blocking=True)
    state = snapshot(optimizer)
    again = built(each=2, sync_every=1)[1]
    loco.Checkpoints(folder / str(rank)).load(again)
    return asked, state, snapshot(again)


@pytest.mark.check(CHECKPOINTS)
def test_who_saves_comes_to_those_who_must_connect_anew_first(tmp_path: Path) -> None:
    """They can't come to save before, and nobody else would ever come to connect."""
    for rank, (asked, saved, loaded) in enumerate(run_ranks(4, saved_while_a_site_reconnects, tmp_path)):
        assert_same(saved, loaded)
        if rank == 1:
            assert asked[0] == "LocoError"
            assert "round 1 was interrupted before the ranks of this site had shared its result" in asked[1]
            assert "call settle(), sync() or step() on every rank" in asked[1]


def loaded_from(rank: int, folder: Path) -> tuple[str, str]:
    return error_of(loco.Checkpoints(folder / str(rank)).load, built()[1])


def test_a_folder_that_is_none_is_found_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("a file")
    one, other = run_ranks(2, loaded_from, tmp_path)
    assert other[0] == "CheckpointError"
    assert other[1].startswith("looking for checkpoints: [Errno 20] Not a directory: ")
    assert one[0] == "CheckpointError"
    assert one[1].startswith("looking for checkpoints: site 1 failed: [Errno 20] Not a directory: ")


def saved_after_a_failed_round(rank: int, folder: Path) -> tuple[str, int]:
    """What a careful user's loop does: a link is lost, so save before anything else is tried."""
    optimizer = built(sync_every=2, exchange="gather")[1]
    for _ in range(3):
        optimizer.step()
    with pytest.MonkeyPatch.context() as patch:

        def lose(*_: Any) -> Any:
            raise loco.TransportError("lost a link (injected)")

        patch.setattr("loco.exchange.stream.FrameStream.arrived", lose)
        kind = error_of(optimizer.step)[0]
    if rank == 1:
        time.sleep(2.0)  # the others wait for one who has left, and is expected back
    with loco.Checkpoints(folder) as checkpoints:
        checkpoints.save(optimizer, blocking=True)
    optimizer.sync()
    return kind, optimizer.round


@pytest.mark.check(CHECKPOINTS)
def test_a_checkpoint_can_be_saved_by_ranks_that_have_left_a_round(tmp_path: Path) -> None:
    assert run_ranks(3, saved_after_a_failed_round, tmp_path) == [("TransportError", 2)] * 3


def loaded_when_one_rank_can_not(rank: int, folder: Path, how: str) -> Any:
    """Train past a checkpoint, load it with rank 1 failing, and once more without."""
    net, optimizer = built()
    with loco.Checkpoints(folder) as checkpoints:
        train(net, optimizer, rank, range(4))
        checkpoints.save(optimizer, blocking=True)
        saved = snapshot(optimizer)
        train(net, optimizer, rank, range(4, 10))
        before, moments = snapshot(optimizer), pickle.dumps(optimizer.inner.state_dict())

        def fail(*_: Any, **__: Any) -> None:
            raise MemoryError("no memory for the moments (injected)")

        with pytest.MonkeyPatch.context() as patch:
            if how == "inner optimizer" and rank == 1:
                patch.setattr(optimizer.inner, "load_state_dict", fail)
            elif how == "whole optimizer" and rank == 1:
                patch.setattr(optimizer, "load_state_dict", fail)
            elif how == "another anchor" and rank == 1:
                another_anchor(folder / "round-00000001" / "rank-00001")
            error = error_of(checkpoints.load, optimizer)
        assert_same(before, snapshot(optimizer))
        assert (optimizer.round, optimizer.local_step) == (2, 2)
        assert pickle.dumps(optimizer.inner.state_dict()) == moments
        optimizer.sync()  # as if nothing had been loaded
        if how != "another anchor":
            checkpoints.load(optimizer)
            assert_same(saved, snapshot(optimizer))
    return error


def another_anchor(folder: Path) -> None:
    """One bit of θ is another one, and the manifest says so too."""
    tree = torch.load(folder / "state.pt", weights_only=True)
    tree["optimizer"]["loco"]["anchor"].view(torch.int32)[0] ^= 1
    rewrite(folder, tree)


@pytest.mark.check(CHECKPOINTS, sample="whole optimizer")
@pytest.mark.parametrize("how", ["inner optimizer", "whole optimizer", "another anchor"])
def test_if_one_rank_can_not_load_none_does(tmp_path: Path, how: str) -> None:
    errors = run_ranks(3, loaded_when_one_rank_can_not, tmp_path, how)
    for rank, (kind, text) in enumerate(errors):
        if how == "another anchor":
            assert kind == "ReplicaError"
            assert text.startswith("the files of site 1 hold {'position': [1, 0], 'digest': ")
        elif rank == 1:
            assert (kind, text) == ("MemoryError", "no memory for the moments (injected)")
        else:
            assert kind == "CheckpointError"
            assert text == "loading round 1: site 1 failed: no memory for the moments (injected)"


def loaded_with_a_failing_hook(rank: int, folder: Path) -> tuple[str, str]:
    optimizer = built(sync_every=1)[1]
    with loco.Checkpoints(folder) as checkpoints:
        checkpoints.save(optimizer, blocking=True)

        def fail(_: Any) -> None:
            raise RuntimeError("the user's hook (injected)")

        if rank == 1:
            optimizer.register_load_state_dict_post_hook(fail)
        return error_of(checkpoints.load, optimizer)


def test_a_failure_after_all_ranks_have_loaded_is_told_to_all_of_them(tmp_path: Path) -> None:
    other, failing = run_ranks(2, loaded_with_a_failing_hook, tmp_path)
    assert failing == ("RuntimeError", "the user's hook (injected)")
    assert other[0] == "CheckpointError"
    assert other[1] == "completing the load of round 0: site 1 failed: the user's hook (injected)"
