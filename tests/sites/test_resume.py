"""Resuming equals never stopping, bit for bit; each rank has a state of its own."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scripted import Scripted, parameters
from selection import CHECKPOINTS
from sites import error_of, run_ranks
from states import Snapshot, assert_same, small_model, snapshot, train
from torch import nn

import loco


def resumed(rank: int, kind: str, stop_at: int) -> tuple[Snapshot, Snapshot, int]:
    """Train 10 steps at a stretch, and again stopping after `stop_at`, into fresh objects."""

    def fresh(seed: int) -> tuple[nn.Module, Any, Any]:
        net = small_model(seed)
        inner = torch.optim.AdamW(net.parameters(), lr=1e-4)
        optimizer = getattr(loco, kind)(inner, sync_every=4)
        return net, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)

    def go(net: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
        for step in steps:
            train(net, optimizer, rank, range(step, step + 1))
            scheduler.step()

    whole = fresh(seed=0)
    go(*whole, range(10))

    first = fresh(seed=0)
    go(*first, range(stop_at))
    file = io.BytesIO()
    torch.save({"optimizer": first[1].state_dict(), "scheduler": first[2].state_dict()}, file)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = fresh(seed=50 + rank)  # other weights, and no model file: the state carries what a site needs
    second[1].load_state_dict(saved["optimizer"])
    second[2].load_state_dict(saved["scheduler"])
    go(*second, range(stop_at, 10))
    return snapshot(whole[1]), snapshot(second[1]), second[1].round


@pytest.mark.check(CHECKPOINTS, sample="4-PulseLoCo|6-DiLoCo")
@pytest.mark.parametrize("kind", ["PulseLoCo", "DiLoCo"])
@pytest.mark.parametrize("stop_at", [4, 6])
def test_resuming_equals_never_stopping_also_inside_a_round(kind: str, stop_at: int) -> None:
    for whole, pieced, rounds in run_ranks(2, resumed, kind, stop_at):
        assert_same(whole, pieced)
        assert rounds == 2


def another_ranks_state(rank: int) -> tuple[str, str]:
    """Rank 0's file on every rank: how error feedback is lost."""
    optimizer = loco.PulseLoCo(Scripted(parameters(3, 1003), 3, rank))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    files: list[Any] = [file.getvalue()]
    dist.broadcast_object_list(files, src=0)
    saved = torch.load(io.BytesIO(files[0]), weights_only=True)
    return error_of(optimizer.load_state_dict, saved)


def test_rank_0s_state_is_not_taken_for_everyones() -> None:
    mine, other = run_ranks(2, another_ranks_state)
    assert mine == ("", "nothing was raised")
    assert other[0] == "ValueError"
    assert other[1].startswith("this state was saved with site = 0, this optimizer has 1")
