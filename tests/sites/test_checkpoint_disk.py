"""A disk whose calls fail, or that becomes read-only, costs at most the checkpoint that is being saved.

python tests/sites/test_checkpoint_disk.py … is a process whose C library fails, see `disks.failing_library`.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from disks import failing_library, small_disk
from processes import python_path
from selection import CHECKPOINTS
from sites import error_of, run_ranks
from states import assert_same, snapshot, train
from test_checkpoint import built

import loco


class Disk:
    """Rank 1's. Of the calls that touch the folder one fails, or all do from one on."""

    def __init__(self, rank: int, folder: str, lasting: bool, every: int) -> None:
        self._fail_at = ctypes.CDLL(None).fail_at if rank == 1 else lambda *_: 0
        self._folder, self._lasting, self._every = folder.encode(), lasting, every
        self._at, self._calls = 1 - every, 1

    def fails_once_more(self) -> bool:
        """Whether the last failure was reached; if so the next one comes `every` calls later."""
        if self._calls < self._at:
            return False
        self._at += self._every
        self._fail_at(self._folder, self._at, self._lasting)
        return True

    def is_mended(self) -> None:
        calls = [self._fail_at(self._folder, 0, False)]
        dist.broadcast_object_list(calls, 1)
        (self._calls,) = calls


def failing_saves(rank: int, folder: str, lasting: bool, every: int) -> list[str]:
    """The errors of saves in which one call after the other fails; "" is none."""
    net, optimizer = built(sync_every=1)
    checkpoints, disk = loco.Checkpoints(folder), Disk(rank, folder, lasting, every)
    kept, errors = {}, []
    while disk.fails_once_more():
        train(net, optimizer, rank, range(optimizer.round, optimizer.round + 1))
        kept[optimizer.round] = snapshot(optimizer)
        kind, text = error_of(lambda: checkpoints.save(optimizer, optimizer.round, blocking=True))
        disk.is_mended()
        errors.append(f"{kind}: {text}" if kind else "")
        assert_same(kept[optimizer.round], snapshot(optimizer))
        assert_loads(rank, folder, kept, at_least=optimizer.round - 1 if kind else optimizer.round)
        checkpoints.save(optimizer, optimizer.round, blocking=True)
        assert_loads(rank, folder, kept, at_least=optimizer.round)
    return errors


def failing_loads(rank: int, folder: str, lasting: bool, every: int) -> list[str]:
    """As `failing_saves`, of loads; there are checkpoints of rounds 1 and 2."""
    net, optimizer = built(sync_every=1)
    kept, errors = {}, []
    with loco.Checkpoints(folder) as checkpoints:
        for step in range(2):
            train(net, optimizer, rank, range(step, step + 1))
            kept[step + 1] = snapshot(optimizer)
            checkpoints.save(optimizer, step + 1, blocking=True)
    disk = Disk(rank, folder, lasting, every)
    while disk.fails_once_more():
        other = built(90 + rank, sync_every=1)[1]
        before = snapshot(other)
        kind, text = error_of(loco.Checkpoints(folder).load, other)
        disk.is_mended()
        errors.append(f"{kind}: {text}" if kind else "")
        assert_same(before if kind else kept[other.round], snapshot(other))
        assert_loads(rank, folder, kept, at_least=2)
    return errors


def assert_loads(rank: int, folder: str, kept: dict[int, Any], *, at_least: int) -> None:
    """All ranks load one and the same checkpoint, whole, of this round or a later one, if there is any."""
    other = built(90 + rank, sync_every=1)[1]
    resumed = loco.Checkpoints(folder).load(other)
    rounds: list[Any] = [None, None]
    dist.all_gather_object(rounds, resumed and (resumed.round, resumed.extra))
    assert rounds[0] == rounds[1]
    if resumed is None:
        assert at_least == 0
        return
    assert resumed.round == resumed.extra >= at_least
    assert_same(kept[resumed.round], snapshot(other))


@pytest.mark.check(CHECKPOINTS)
@pytest.mark.parametrize(
    ("what", "lasting", "every"),
    [
        ("failing_saves", False, 5),
        ("failing_saves", True, 5),
        ("failing_loads", False, 5),
        ("failing_loads", True, 5),
    ],
)
def test_an_input_output_error_costs_a_checkpoint_at_most_whenever_it_comes(
    tmp_path: Path, what: str, lasting: bool, every: int
) -> None:
    done = subprocess.run(
        [sys.executable, __file__, what, str(tmp_path / "kept"), str(int(lasting)), str(every)],
        env={
            **os.environ,
            "LD_PRELOAD": str(failing_library(tmp_path)),
            "PYTHONPATH": python_path(),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    others, own = json.loads(done.stdout)
    assert len(own) > 40 // every
    assert any(own)
    for hears, raises in zip(others, own, strict=True):
        assert bool(hears) == bool(raises)
        if raises and "none that is whole on all ranks" not in raises:
            assert hears.startswith("CheckpointError: ")
            assert "site 1 failed: " in hears
            assert "Input/output error" in hears
            assert "Input/output error" in raises


def read_only(rank: int, folder: str) -> tuple[str, str]:
    """The disk of rank 1 is read-only after its first checkpoint, and later it is not."""

    def remount(how: str) -> None:
        dist.barrier()
        if rank == 1:
            subprocess.run(["mount", "-o", f"remount,{how}", str(Path(folder) / "1")], check=True)
        dist.barrier()

    def loaded() -> int:
        other = built(90 + rank, sync_every=1)[1]
        loco.Checkpoints(own).load(other)
        assert_same(kept[other.round], snapshot(other))
        return other.round

    own = Path(folder) / str(rank) / "checkpoints"
    net, optimizer = built(sync_every=1)
    checkpoints, kept = loco.Checkpoints(own), {}
    for step in range(2):
        train(net, optimizer, rank, range(step, step + 1))
        kept[step + 1] = snapshot(optimizer)
        if step == 0:
            checkpoints.save(optimizer, blocking=True)
    remount("ro")
    error = error_of(lambda: checkpoints.save(optimizer, blocking=True))
    assert_same(kept[2], snapshot(optimizer))
    assert loaded() == 1
    remount("rw")
    checkpoints.save(optimizer, blocking=True)
    assert loaded() == 2
    return error


@pytest.mark.root
def test_a_disk_that_becomes_read_only_costs_a_checkpoint_and_can_be_loaded_from(tmp_path: Path) -> None:
    with small_disk(tmp_path / "1", "10m"):
        for kind, text in run_ranks(2, read_only, str(tmp_path)):
            assert kind == "CheckpointError"
            assert "could not be written (OSError: [Errno 30] Read-only file system" in text
            assert str(tmp_path / "1") in text


def main() -> None:
    what, folder, lasting, every = sys.argv[1:]
    print(json.dumps(run_ranks(2, globals()[what], folder, lasting == "1", int(every))))


if __name__ == "__main__":
    main()
