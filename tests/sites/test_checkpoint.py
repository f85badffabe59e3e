"""Checkpoints: resuming equals never stopping, whatever is damaged, missing or not of this training."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_checkpoints import save_as_dcp
from selection import CHECKPOINTS
from sites import error_of, run_ranks
from states import Snapshot, assert_same, small_model, snapshot, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import loco
from loco.checkpoints.rank_manifest import manifest_of, read_manifest


def built(seed: int = 0, *, kind: str = "PulseLoCo", each: int = 1, **options: Any) -> tuple[nn.Module, Any]:
    """A model and its optimizer; with `each` ranks per site, the model averages their gradients."""
    net: nn.Module = small_model(seed)
    topology = loco.Topology(ranks_per_site=each, timeout=20, repeats=0)
    inner = torch.optim.AdamW(net.parameters(), lr=1e-4)
    optimizer = getattr(loco, kind)(inner, topology=topology, **{"sync_every": 4} | options)
    if each > 1:
        net = DistributedDataParallel(net, process_group=topology.site_group)
    return net, optimizer


def went_on(rank: int, folders: list[str], kind: str, each: int, format: str, at: int) -> Any:
    """Train 10 steps at a stretch; and again, saved after `at`, into fresh objects."""
    whole = built(kind=kind, each=each)
    train(*whole, rank, range(10))

    first = built(kind=kind, each=each)
    train(*first, rank, range(at))
    with loco.Checkpoints(folders[rank % len(folders)]) as checkpoints:
        checkpoints.save(first[1], {"step": at, "mine": torch.tensor([rank])})
    if format == "dcp":
        save_as_dcp(folders[rank % len(folders)], rank)

    second = built(50 + rank, kind=kind, each=each)
    with loco.Checkpoints(folders[rank % len(folders)]) as checkpoints:
        resumed = checkpoints.load(second[1])
    assert resumed is not None
    assert resumed.extra == {"step": at, "mine": torch.tensor([rank])}
    assert (resumed.round, resumed.local_step) == divmod(at, 4)
    train(*second, rank, range(at, 10))
    return snapshot(whole[1]), snapshot(second[1]), (second[1].round, second[1].local_step)


@pytest.mark.check(CHECKPOINTS, sample="4-PulseLoCo-2-dcp-4")
@pytest.mark.parametrize(
    ("world", "kind", "each", "format", "at"),
    [
        (2, "PulseLoCo", 1, "torch", 4),
        (3, "PulseLoCo", 1, "torch", 6),
        (3, "PulseLoCo", 1, "dcp", 8),
        (2, "PulseLoCo", 1, "dcp", 5),
        (2, "DiLoCo", 1, "torch", 6),
        (4, "PulseLoCo", 2, "torch", 6),
        (4, "PulseLoCo", 2, "dcp", 4),
    ],
)
def test_resuming_equals_never_stopping(
    tmp_path: Path, world: int, kind: str, each: int, format: str, at: int
) -> None:
    shared = at % 2 == 0  # one folder for all ranks, or one for each
    folders = [str(tmp_path / str(k)) for k in range(1 if shared else world)]
    for whole, pieced, reached in run_ranks(world, went_on, folders, kind, each, format, at):
        assert_same(whole, pieced)
        assert reached == (2, 2)


def kept(rank: int, folder: str) -> list[list[str]]:
    """What lies in the folder after each save, and when another run has gone on from an older one."""
    net, optimizer = built()
    checkpoints = loco.Checkpoints(folder)
    seen = []
    for step in range(14):
        train(net, optimizer, rank, range(step, step + 1))
        if step in (3, 7, 9, 13):
            checkpoints.save(optimizer, blocking=True)
            torch.distributed.barrier()
            seen.append(sorted(os.listdir(folder)))
            torch.distributed.barrier()
    return seen


def test_the_two_newest_are_kept(tmp_path: Path) -> None:
    for seen in run_ranks(2, kept, str(tmp_path)):
        assert seen == [
            ["round-00000001"],
            ["round-00000001", "round-00000002"],
            ["round-00000002", "round-00000002-step-00002"],
            ["round-00000002-step-00002", "round-00000003-step-00002"],
        ]


def damaged(rank: int, folder: str, how: str, whose: int) -> tuple[int, Snapshot, str]:
    """Two checkpoints, the newer damaged on one rank -> the round resumed from, the state, the warnings."""
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("loco").addHandler(handler)
    net, optimizer = built()
    with loco.Checkpoints(folder) as checkpoints:
        for step in range(8):
            train(net, optimizer, rank, range(step, step + 1))
            if step in (3, 7):
                checkpoints.save(optimizer)
    torch.distributed.barrier()
    if rank == 0:
        spoil(Path(folder) / "round-00000002" / f"rank-{whose:05d}", how)
    torch.distributed.barrier()
    other = built(60 + rank)[1]
    loco.Checkpoints(folder).load(other)
    return other.round, snapshot(other), "\n".join(warned)


def spoil(folder: Path, how: str) -> None:
    data, manifest = folder / "state.pt", folder / "manifest.json"
    raw = bytearray(data.read_bytes())
    if how == "a flipped bit":
        raw[len(raw) // 2] ^= 1
        data.write_bytes(raw)
    elif how == "cut short":
        data.write_bytes(raw[:-1])
    elif how == "no data":
        data.unlink()
    elif how == "no manifest":
        manifest.unlink()
    elif how == "no JSON":
        manifest.write_text("{")
    elif how == "another's":
        fields = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(fields | {"site": 5}))
    elif how == "another anchor":
        fields = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(fields | {"digest": "0" * 16}))


@pytest.mark.check(CHECKPOINTS, sample="a flipped bit.*")
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("a flipped bit", "SHA-256 differs"),
        ("cut short", "bytes, but"),
        ("no data", "state.pt is missing"),
        ("no manifest", "has no manifest.json"),
        ("no JSON", "manifest.json is damaged"),
        ("another's", "rank 0 of site 5, of 2 sites"),
        ("another anchor", "its anchor is not the one that was saved"),
    ],
)
def test_a_damaged_one_is_passed_over_by_all_with_a_warning(tmp_path: Path, how: str, sentence: str) -> None:
    found = run_ranks(2, damaged, str(tmp_path), how, 1)
    assert [round for round, _, _ in found] == [1, 1]
    assert sentence in found[1][2]
    assert "round-00000002/rank-00001" in found[1][2]


def skipped_on_one_machine(rank: int, folder: str) -> str:
    os.environ["LOCAL_RANK"] = str(rank)  # as torchrun numbers the ranks of one machine
    return damaged(rank, folder, "a flipped bit", 1)[2]


def test_a_checkpoint_that_is_skipped_is_told_once_on_each_machine(tmp_path: Path) -> None:
    first, second = run_ranks(2, skipped_on_one_machine, str(tmp_path))
    assert first.count("skipping the checkpoint of round 2: ") == 1
    assert "skipping the checkpoint" not in second


def with_changes(rank: int, folder: str, changes: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str]]:
    """Load what was saved by default into optimizers built otherwise -> the errors."""
    net, optimizer = built()
    train(net, optimizer, rank, range(4))
    with loco.Checkpoints(folder) as checkpoints:
        checkpoints.save(optimizer)
    errors = []
    for what, options in changes:
        if what == "settings":
            other = built(**options)[1]
        elif what == "model":
            inner = torch.optim.AdamW(nn.Linear(20, 31).parameters())
            other = loco.PulseLoCo(inner, sync_every=4)
        else:  # the manifest of one rank
            other = built()[1]
            path = Path(folder) / "round-00000001" / "rank-00001" / "manifest.json"
            if rank == 0:
                path.write_text(json.dumps(json.loads(path.read_text()) | options))
            torch.distributed.barrier()
        before = snapshot(other)
        errors.append(error_of(loco.Checkpoints(folder).load, other))
        assert_same(before, snapshot(other))
    return errors


def test_what_does_not_belong_is_refused_on_all_ranks_and_says_what_differs(tmp_path: Path) -> None:
    changes: list[tuple[str, dict[str, Any]]] = [
        ("settings", {"sync_every": 8}),
        ("settings", {"outer_lr": 0.5}),
        ("settings", {"kind": "DiLoCo"}),
        ("settings", {"each": 2}),
        ("model", {}),
        ("manifest", {"name": "tokyo"}),
    ]
    sentences = [
        "sync_every = 4, this optimizer has 8",
        "outer_lr = 0.7, this optimizer has 0.5",
        "kind = PulseLoCo, this optimizer has DiLoCo",
        "ranks_per_site = 1, this optimizer has 2",
        "parameters = ['group0.param0', [30, 20], 'torch.float32'], this optimizer has ['group0.param0', [31",
        "name = tokyo, this optimizer has ",
    ]
    for errors in run_ranks(2, with_changes, str(tmp_path), changes):
        for (kind, text), sentence in zip(errors, sentences, strict=True):
            assert kind == "ValueError"
            assert sentence in text


def test_what_another_version_says_beside_it_makes_no_manifest_unreadable(tmp_path: Path) -> None:
    """Those of wire version 4 named it; no checkpoint depends on the wire."""
    state = {"num_sites": 1, "ranks_per_site": 1, "site": 0, "rank_in_site": 0, "round": 3, "local_step": 0}
    state |= {"settings": {}, "parameters": [], "anchor": torch.zeros(3)}
    manifest = manifest_of({"loco": state}, save="a", folder=tmp_path)
    manifest.write(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"wire_version": 4} | json.loads(path.read_text())))
    assert read_manifest(tmp_path) == manifest


def misplaced(rank: int, folders: list[str], then: list[str]) -> list[Any]:
    net, optimizer = built()
    with loco.Checkpoints(folders[rank]) as checkpoints:
        nothing = checkpoints.load(optimizer)
        for step in range(8):
            train(net, optimizer, rank, range(step, step + 1))
            if step in (3, 7):
                checkpoints.save(optimizer)
    torch.distributed.barrier()
    return [nothing, error_of(loco.Checkpoints(then[rank]).load, built()[1])]


@pytest.mark.check(CHECKPOINTS)
def test_exchanged_folders_are_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in "ab"]
    for nothing, (kind, text) in run_ranks(2, misplaced, folders, folders[::-1]):
        assert nothing is None
        assert kind == "CheckpointError"
        assert "none that is whole on all ranks" in text
        assert "round 2 of rank 0, rank 1" in text


def interrupted_first(rank: int, folder: str) -> Any:
    net, optimizer = built()
    train(net, optimizer, rank, range(4))
    with loco.Checkpoints(folder) as checkpoints:
        checkpoints.save(optimizer)
    torch.distributed.barrier()
    if rank == 0:
        (Path(folder) / "round-00000001" / "rank-00001").rename(
            Path(folder) / f".partial-rank-00001-{'0' * 32}"
        )
    torch.distributed.barrier()
    other = built()[1]
    checkpoints = loco.Checkpoints(folder)
    found = checkpoints.load(other)
    checkpoints.save(other, blocking=True)  # at round 0, and what lay ahead is gone
    torch.distributed.barrier()
    return found, sorted(os.listdir(folder))


@pytest.mark.check(CHECKPOINTS)
def test_a_first_checkpoint_that_was_not_finished_is_none(tmp_path: Path) -> None:
    for found, files in run_ranks(2, interrupted_first, str(tmp_path)):
        assert found is None
        # What rank 0 had finished goes when all hold something newer: its files may be all that somebody has.
        assert files == ["round-00000000", "round-00000001"]


def saved_without_extra(rank: int, folder: str) -> Any:
    optimizer = built()[1]
    with loco.Checkpoints(folder) as checkpoints:
        found = [checkpoints.load(optimizer)]
        checkpoints.save(optimizer, blocking=True)
        found.append(checkpoints.load(optimizer))
    return found


def test_no_checkpoint_is_told_apart_from_one_without_extra(tmp_path: Path) -> None:
    for nothing, something in run_ranks(2, saved_without_extra, str(tmp_path)):
        assert nothing is None
        assert something == loco.Resumed(round=0, local_step=0, extra=None)


def two_optimizers(rank: int, folder: str, shared: bool) -> Any:
    """Muon beside AdamW, say: of one shape and one setting, and at one position."""
    pair = [built(seed)[1] for seed in (0, 1)]
    first = loco.Checkpoints(folder)
    both = [first, first if shared else loco.Checkpoints(folder)]
    if not shared:
        for checkpoints, optimizer in zip(both, pair, strict=True):
            assert checkpoints.load(optimizer) is None
    errors = []
    for _ in range(2):
        for checkpoints, optimizer in zip(both, pair, strict=True):
            errors.append(error_of(lambda c=checkpoints, o=optimizer: c.save(o, blocking=True)))
            optimizer.sync()
    again = built(2)[1]
    loco.Checkpoints(folder).load(again)
    pair[0].load_state_dict(pair[0].state_dict())
    return errors, again.round


@pytest.mark.check(CHECKPOINTS, sample="True")
@pytest.mark.parametrize("shared", [True, False])
def test_a_second_optimizer_that_saves_into_one_folder_is_told_so(tmp_path: Path, shared: bool) -> None:
    """Whether the two share a Checkpoints object or only the folder."""
    for errors, round in run_ranks(2, two_optimizers, str(tmp_path), shared):
        assert [kind for kind, _ in errors] == ["", "CheckpointError"] * 2
        sentence = "saves another optimizer to" if shared else "has neither saved nor loaded (round 0 is the"
        for _, text in errors[1::2]:
            assert sentence in text or "(round 1 is the newest)" in text
            assert "a folder of its own" in text
        assert round == 1


def two_trainings(rank: int, folder: str) -> Any:
    optimizer = built()[1]
    with loco.Checkpoints(folder) as checkpoints:
        checkpoints.save(optimizer)
    again = loco.Checkpoints(folder)
    return error_of(again.save, optimizer), error_of(again.save, optimizer, {"step": Position})


class Position:
    """Something that is not plain data."""


def test_a_second_training_does_not_write_over_the_first_ones(tmp_path: Path) -> None:
    for (kind, text), (other, why) in run_ranks(2, two_trainings, str(tmp_path)):
        assert kind == "CheckpointError"
        assert "neither saved nor loaded (round 0 is the newest): call load() before the first save()" in text
        assert other == "ValueError"
        assert "extra.step is a builtins.type: a checkpoint holds numbers" in why


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="keep must be >= 2, got 1"):
        loco.Checkpoints("x", keep=1)
