"""What failures and interruptions leave behind in a process: nothing that grows, and nobody who waits."""

import gc
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from scripted import Scripted, parameters
from selection import INTERRUPTIONS
from sites import hear, run_ranks, tell
from states import assert_same, snapshot
from torch._C._distributed_c10d import FileStore

import loco
from loco.coordination import heartbeats, liveness
from loco.errors import TransportError
from loco.exchange.stream import FrameStream
from loco.net.pending import PendingMessages


def built(rank: int) -> loco.PulseLoCo:
    return loco.PulseLoCo(Scripted(parameters(3, 1003), 3, rank), sync_every=1, exchange="gather")


def through(optimizer: loco.PulseLoCo, rounds: int) -> None:
    while optimizer.round < rounds:
        with suppress(loco.LocoError):
            optimizer.sync()


Left = tuple[int, list[str]]


def left_behind() -> Left:
    """Open files, and the names of threads."""
    gc.collect()  # an error and its traceback are a cycle
    return len(os.listdir("/proc/self/fd")), [thread.name for thread in threading.enumerate()]


def has_grown(first: Left, last: Left) -> bool:
    """But for the last broken group, which may still be going."""
    return last[0] > first[0] + 8 or len(last[1]) > len(first[1]) + 2


def failing_often(rank: int, rounds: int) -> tuple[Left, Left]:
    """What there was after ten rounds that failed and were repeated, and after more, once threads that close
    links have come to run."""
    optimizer, arrived, first = built(rank), FrameStream.arrived, None
    for number in range(rounds):

        def fail(self: FrameStream, number: int = number) -> Any:
            if arrived(self) and rank == number % 3:
                raise TransportError("injected")
            return {}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FrameStream, "arrived", fail)
            with pytest.raises(loco.LocoError):
                optimizer.sync()
        through(optimizer, number + 1)
        if number == 9:
            first = left_behind()
    assert first is not None
    until = time.monotonic() + 60.0
    while has_grown(first, last := left_behind()) and time.monotonic() < until:
        time.sleep(0.1)
    return first, last


@pytest.mark.check(INTERRUPTIONS)
@pytest.mark.parametrize("rounds", [20, 50])
def test_rounds_that_fail_and_are_repeated_leave_no_file_and_no_thread_behind(rounds: int) -> None:
    for first, last in run_ranks(3, failing_often, rounds):
        assert not has_grown(first, last), (first, last)


def interrupted(rank: int, vote: str) -> dict[str, Any]:
    """Ctrl-C while site 1 is in a vote, or in any other message; then it goes on."""
    clean = built(rank)
    for _ in range(3):
        clean.step()
    optimizer, plain = built(rank), PendingMessages.wait
    optimizer.step()
    told = ""

    def wait(self: PendingMessages, limit: float | None = None) -> None:
        plain(self, limit)
        if vote in self._phase:
            patch.undo()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(PendingMessages, "wait", wait)
        try:
            optimizer.step()
        except (KeyboardInterrupt, loco.LocoError) as error:
            told = type(error).__name__
    through(optimizer, 2)
    optimizer.inner.step()
    through(optimizer, 3)
    return {"told": told, "clean": snapshot(clean), "interrupted": snapshot(optimizer)}


@pytest.mark.check(INTERRUPTIONS, sample=r"vote")
@pytest.mark.parametrize("vote", ["announcement", "vote"])
def test_ctrl_c_in_the_middle_of_a_round_loses_nothing(vote: str) -> None:
    results = run_ranks(3, interrupted, vote)
    assert results[1]["told"] == "KeyboardInterrupt"
    for result in results:
        assert_same(result["interrupted"], result["clean"])


def interrupted_wait(rank: int) -> str:
    """Ctrl-C while site 0 waits for site 1, which computes until then."""
    optimizer = built(rank)
    dist.barrier()
    if rank == 1:
        hear("interrupted")
        return ""
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        optimizer.sync()
    except (KeyboardInterrupt, loco.LocoError) as error:
        tell("interrupted")
        return type(error).__name__
    return "went through"


def test_ctrl_c_ends_a_wait_for_another_site_at_once() -> None:
    """gloo's own wait would end with its message, or after `patience`: site 1 would wait in vain."""
    assert run_ranks(2, interrupted_wait)[0] == "KeyboardInterrupt"


@pytest.mark.check(INTERRUPTIONS)
def test_a_machine_that_was_halted_accuses_nobody_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All processes stood still: on the first look the others' signs of life are as old as the pause."""
    store, plain, losses = FileStore(str(tmp_path / "store"), 1), time.monotonic, []
    store.set("loco/run/alive/1", "1 +computing")
    ear = liveness.Liveness(store, "run", 0, dead_after=4.0)
    with ear.watching([1], losses.append):
        time.sleep(1.2)
        monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: plain() + 100.0))
        time.sleep(0.8)
        store.set("loco/run/alive/1", "2 +computing")
        time.sleep(1.0)
        assert losses == []
        time.sleep(3.5)  # but a silence that it hears itself counts
        assert losses == [heartbeats.Loss(silent=(1,))]
    ear.close()
