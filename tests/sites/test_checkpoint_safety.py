"""What a crash, a full disk or a malicious file does to checkpoints: nothing but cost the newest."""

import errno
import io
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_checkpoints
import pytest
import torch
from disks import DeadlyCall, small_disk
from selection import CHECKPOINTS, INTERRUPTIONS
from sites import error_of, run_ranks
from states import assert_same, snapshot, train
from test_checkpoint import built
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import loco
from loco.checkpoints import dcp_format, formats
from loco.checkpoints.directory import CheckpointDirectory
from loco.checkpoints.formats import host_copy, opened
from loco.checkpoints.rank_manifest import Position

# How a state is written and read, by the format of its files.
WAYS = {"torch": (formats.write, formats.read), "dcp": (dcp_checkpoints.write, dcp_format.read)}


def saving(rank: int, folder: str, cut: int, before: int) -> int:
    """Save `before` rounds, and one more, in which SIGKILL comes at the `cut`-th thing done to the disk.

    Returns:
        How many there are.
    """
    net, optimizer = built(sync_every=1)
    checkpoints = loco.Checkpoints(folder)
    checkpoints.load(optimizer)
    for step in range(before):
        train(net, optimizer, 0, range(step, step + 1))
        checkpoints.save(optimizer, optimizer.round, blocking=True)
    train(net, optimizer, 0, range(before, before + 1))
    call = DeadlyCall(folder, cut)
    fsync, write = os.fsync, torch.save

    def flushed(descriptor: int) -> None:
        call.count("os.fsync")
        fsync(descriptor)

    def half(state: Any, file: Any) -> None:
        write(state, file)
        if call.done == cut - 1:
            file.flush()
            os.truncate(folder_of(folder) / "state.pt", 100)  # what a crash of the machine may leave
        call.count("os.fsync")

    os.fsync, torch.save = flushed, half
    checkpoints.save(optimizer, optimizer.round, blocking=True)
    call.counting = False
    os.fsync, torch.save = fsync, write
    return call.done


def folder_of(folder: str) -> Path:
    (partial,) = Path(folder).glob(".partial*")
    return partial


def loaded(rank: int, folder: str) -> tuple[Any, int]:
    optimizer = built(sync_every=1)[1]
    resumed = loco.Checkpoints(folder).load(optimizer)
    return resumed and resumed.extra, optimizer.round


@pytest.mark.check(INTERRUPTIONS)
@pytest.mark.parametrize("before", [1, 3])
def test_a_writer_killed_at_any_point_leaves_the_checkpoint_before(tmp_path: Path, before: int) -> None:
    """After three an old one has to go in the same save."""
    (points,) = run_ranks(1, saving, str(tmp_path / "whole"), 0, before)
    assert points >= 12
    rounds = []
    for cut in range(1, points + 1):
        folder = str(tmp_path / f"{cut}")
        with pytest.raises(RuntimeError, match="died without a word"):
            run_ranks(1, saving, folder, cut, before)
        ((extra, round),) = run_ranks(1, loaded, folder)
        assert extra == round
        rounds.append(round)
    assert rounds == sorted(rounds)
    assert set(rounds) == {before, before + 1}
    assert rounds.count(before + 1) <= 6  # when it has its name only flushes and clearing up are left


def test_what_a_killed_writer_left_is_gone_after_the_next_save(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="died without a word"):
        run_ranks(1, saving, str(tmp_path), 6, 1)
    assert any(path.name.startswith(".partial") for path in tmp_path.iterdir())
    run_ranks(1, saving, str(tmp_path), 0, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-00000002", "round-00000003"]


def test_an_empty_round_that_a_killed_writer_left_is_gone_after_the_next_save(
    tmp_path: Path, single_site: None
) -> None:
    (tmp_path / "round-00000007").mkdir()
    (tmp_path / "round-00000008").write_text("a file of the user's")
    with loco.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(built()[1], blocking=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-00000000", "round-00000008"]


def test_the_folders_that_the_first_save_creates_are_flushed_to_disk(
    tmp_path: Path, single_site: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, flushed = os.fsync, list[Path]()

    def noted(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with loco.Checkpoints(tmp_path / "a" / "b" / "c") as checkpoints:
        checkpoints.save(built()[1], blocking=True)
    for parent in (tmp_path, tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/c"):
        assert parent in flushed


def test_of_two_optimizers_that_save_into_one_folder_at_once_one_is_told_so(
    tmp_path: Path, single_site: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is empty when both begin, and the one has saved when the other is to write."""
    pair = [built(seed)[1] for seed in (0, 1)]
    both = [loco.Checkpoints(tmp_path) for _ in pair]
    arrived, may_write = ([threading.Event() for _ in pair] for _ in range(2))
    turns, sweep = iter(zip(arrived, may_write, strict=True)), CheckpointDirectory.sweep

    def wait_for_turn(self: CheckpointDirectory) -> None:
        here, go = next(turns)
        here.set()
        assert go.wait(60)
        sweep(self)

    monkeypatch.setattr(CheckpointDirectory, "sweep", wait_for_turn)
    for k, (checkpoints, optimizer) in enumerate(zip(both, pair, strict=True)):
        checkpoints.save(optimizer, k)
        assert arrived[k].wait(60)
    may_write[0].set()
    both[0].close()
    may_write[1].set()
    with pytest.raises(
        loco.CheckpointError, match="give each training and each optimizer a folder of its own"
    ):
        both[1].close()
    resumed = loco.Checkpoints(tmp_path).load(built(2)[1])
    assert resumed is not None
    assert resumed.extra == 0


def test_a_checkpoint_that_was_to_be_replaced_is_there_if_it_can_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, rename, renames = CheckpointDirectory(tmp_path, 0, 1), Path.rename, 0

    def write(what: bytes) -> Callable[[Path], None]:
        def fill(folder: Path) -> None:
            (folder / "data").write_bytes(what)

        return fill

    directory.put(Position(5, 0), write(b"old"))

    def fail_once(self: Path, target: Path) -> Path:
        nonlocal renames
        renames += 1
        if renames == 2:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(OSError, match="Input/output error"):
        directory.put(Position(5, 0), write(b"new"))
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == [
        "round-00000005/rank-00000/data"
    ]
    assert (directory.path(Position(5, 0), 0) / "data").read_bytes() == b"old"


@pytest.mark.root
def test_a_full_disk_is_an_error_at_the_next_call_and_costs_only_that_save(
    tmp_path: Path, single_site: None
) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "1500k"):
        fill(disk / "saved", disk)


def fill(folder: Path, disk: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(100, 100)
    optimizer = loco.PulseLoCo(torch.optim.AdamW(net.parameters()), sync_every=1)
    checkpoints = loco.Checkpoints(folder)

    def go() -> None:
        net(torch.ones(100)).sum().backward()
        optimizer.step()

    go()
    checkpoints.save(optimizer, "first", blocking=True)
    kept = snapshot(optimizer)
    ballast = disk / "ballast"
    with pytest.raises(OSError, match="No space left"), ballast.open("wb") as file:  # noqa: PT012
        while True:
            file.write(bytes(4096))
            file.flush()
    os.truncate(ballast, ballast.stat().st_size - 100_000)  # room for a part of it
    threads = threading.active_count()
    for call in (lambda: checkpoints.save(optimizer), checkpoints.wait, checkpoints.close):
        go()
        checkpoints.save(optimizer)  # returns at once: the disk is not asked yet
        with pytest.raises(
            loco.CheckpointError, match=r"rank-00000 could not be written .*Free some space"
        ) as caught:
            call()
        assert "MB are free" in str(caught.value)
        assert "No space left" in str(caught.value)
        assert not list(folder.glob(".partial*"))
    assert threading.active_count() <= threads
    other = loco.PulseLoCo(torch.optim.AdamW(torch.nn.Linear(100, 100).parameters()), sync_every=1)
    resumed = loco.Checkpoints(folder).load(other)
    assert resumed is not None
    assert resumed.extra == "first"
    assert_same(kept, snapshot(other))
    ballast.unlink()
    checkpoints.save(optimizer, "later", blocking=True)
    resumed = loco.Checkpoints(folder).load(other)
    assert resumed is not None
    assert resumed.extra == "later"
    checkpoints.close()
    for path in folder.rglob("*.*"):
        path.unlink()


class Malicious:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("where", ["torch", "dcp metadata", "dcp bytes", "dcp path"])
def test_reading_a_checkpoint_never_runs_what_it_says(tmp_path: Path, where: str) -> None:
    ran, folder = tmp_path / "ran", tmp_path / "data"
    folder.mkdir()
    write, read = WAYS[where.split()[0]]
    write({"a": torch.ones(3), "b": 1}, folder)
    if where == "torch":
        torch.save({"a": Malicious(ran)}, folder / "state.pt")
    elif where == "dcp metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Malicious(ran)))
    elif where == "dcp bytes":
        planner = DefaultSavePlanner(False, False)
        writing = FileSystemWriter(folder)
        planner.set_up_planner({"loco.tree": Malicious(ran)}, writing.storage_meta(), True)
        writing.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        plan = writing.prepare_global_plan(plans)[0]
        written = writing.write_data(plan, planner)
        written.wait()
        writing.finish(metadata, [written.value()])
    else:
        metadata = FileSystemReader(folder).read_metadata()
        for place in metadata.storage_data.values():
            place.relative_path = "../elsewhere"
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError):
        read(lambda name: opened(folder / name))
    assert not ran.exists()
    if where in ("torch", "dcp metadata"):  # the trap works
        raw = (folder / ("state.pt" if where == "torch" else ".metadata")).read_bytes()
        if where == "torch":
            torch.load(io.BytesIO(raw), weights_only=False)["a"].close()
        else:
            pickle.loads(raw).close()
        assert ran.exists()


def test_every_kind_of_plain_data_comes_back_as_it_was(tmp_path: Path) -> None:
    tree = {
        "dtypes": [torch.ones(3, dtype=d) for d in (torch.float32, torch.bfloat16, torch.int64, torch.bool)],
        "shapes": (torch.tensor(2.5), torch.empty(0, 5), torch.arange(6.0).view(2, 3).t()),
        "a": {"b": torch.zeros(1)},
        "a.b": torch.ones(1),  # which a path alone would not tell from the one above
        0: {1: [None, True, 2, 0.1, "é", b"\0"]},
        "loco.tree": torch.full((2,), 7.0),
        "nan": torch.tensor([float("nan"), -0.0]),
    }
    copied = host_copy(tree)
    for format, (write, read) in WAYS.items():
        folder = tmp_path / format
        folder.mkdir()
        write(copied, folder)
        assert_equal(read(lambda name, folder=folder: opened(folder / name)), tree)


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)) if a.dim() else a == b
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    else:
        assert a == b


def test_a_saved_state_is_a_copy_that_training_does_not_change(
    tmp_path: Path, single_site: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = built()
    train(net, optimizer, 0, range(5))
    checkpoints = loco.Checkpoints(tmp_path)
    started = threading.Event()
    write = formats.write

    def slowly(tree: Any, folder: Path) -> None:
        started.wait(30)
        write(tree, folder)

    monkeypatch.setattr(formats, "write", slowly)
    kept = snapshot(optimizer)
    checkpoints.save(optimizer)
    train(net, optimizer, 0, range(5, 11))
    started.set()
    checkpoints.close()
    other = built(9)[1]
    loco.Checkpoints(tmp_path).load(other)
    assert_same(kept, snapshot(other))


def by_hand(rank: int, folder: str) -> Any:
    """torch.distributed.checkpoint without loco.Checkpoints."""
    net, optimizer = built()
    train(net, optimizer, rank, range(6))
    key = f"optimizer{rank}"
    dcp_save({key: optimizer}, checkpoint_id=folder)

    other = built(40 + rank)[1]
    error = error_of(lambda: dcp_load({key: other}, checkpoint_id=folder))
    third_net, third = built(70 + rank)
    train(third_net, third, rank, range(1))  # so that Adam's state is there to be filled
    dcp_load({key: third}, checkpoint_id=folder)
    for one in (net, optimizer), (third_net, third):
        train(*one, rank, range(6, 10))
    return error, snapshot(optimizer), snapshot(third), third.round


@pytest.mark.check(CHECKPOINTS)
def test_dcp_alone_loads_into_an_optimizer_that_has_stepped_and_refuses_a_fresh_one(tmp_path: Path) -> None:
    for (kind, text), went_on, loaded, round in run_ranks(2, by_hand, str(tmp_path)):
        assert "ValueError" in kind + text or "CheckpointException" in kind
        assert "loco.Checkpoints" in text
        assert_same(went_on, loaded)
        assert round == 2


def killed_at_random(rank: int, folder: str) -> None:
    net, optimizer = built()
    checkpoints = loco.Checkpoints(folder)
    checkpoints.load(optimizer)
    done = 4 * optimizer.round + optimizer.local_step
    if done:  # what was loaded is what an uninterrupted training holds there
        other_net, other = built()
        train(other_net, other, rank, range(done))
        assert_same(snapshot(other), snapshot(optimizer))
    for step in range(done, done + 400):
        train(net, optimizer, rank, range(step, step + 1))
        checkpoints.save(optimizer)
        if step == done + 7 + 3 * rank and os.fork() == 0:
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)


def test_sites_killed_while_they_write_go_on_from_where_all_of_them_were(tmp_path: Path) -> None:
    """Three lives in a row, of two sites that die within some steps of each other."""
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"died without a word|TransportError|Connection") as caught:
            run_ranks(2, killed_at_random, str(tmp_path))
        assert "AssertionError" not in str(caught.value)
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith("round")]
    # One at least: an older one may just have made room for one that was not finished.
    assert max(left, default="") > "round-00000004"
