"""`loco.attach` gives the rounds of the wrapper, bit for bit, through hooks of the user's own optimizer."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import CHECKPOINTS, PRODUCTS
from sites import error_of, run_ranks
from states import Snapshot, assert_same, inner_state, small_model, snapshot, train
from torch import nn

import loco


def driven(rank: int, way: str, kind: str, each: int) -> tuple[Snapshot, Snapshot, tuple[int, int]]:
    net = small_model()
    inner = torch.optim.AdamW(net.parameters(), lr=1e-4)
    options: dict[str, Any] = {"sync_every": 3, "topology": loco.Topology(ranks_per_site=each)}
    site = rank // each
    rounds: Any
    if way == "wrap":
        rounds = getattr(loco, kind)(inner, **options)
        train(net, rounds, site, range(10))
    else:
        rounds = loco.attach(inner, method=getattr(loco, kind), **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 1.0)  # it patches inner.step
        for step in range(10):
            train(net, inner, site, range(step, step + 1))
            scheduler.step()
    rounds.sync()
    return snapshot(rounds), inner_state(inner), (rounds.round, rounds.local_step)


@pytest.mark.check(PRODUCTS, sample="PulseLoCo-4-2")
@pytest.mark.parametrize(("world", "each"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("kind", ["PulseLoCo", "DiLoCo"])
def test_attached_and_wrapped_give_the_same_bits(kind: str, world: int, each: int) -> None:
    wrapped = run_ranks(world, driven, "wrap", kind, each)
    attached = run_ranks(world, driven, "attach", kind, each)
    for (outer, inner, at), (outer_2, inner_2, at_2) in zip(wrapped, attached, strict=True):
        assert at == at_2 == (4, 0)
        assert_same(outer, outer_2)
        assert_same(inner, inner_2)
        assert inner  # AdamW holds something


def resumed(rank: int, stop_at: int, by: str) -> tuple[Snapshot, Snapshot, Snapshot, Snapshot]:
    """Train 10 steps at a stretch, and again stopped, saved and loaded as a framework does that knows the
    inner optimizer only, or by the handle, or as one that saves the optimizer apart from the rounds."""

    def fresh(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, loco.Attached]:
        net = small_model(seed)
        inner = torch.optim.AdamW(net.parameters(), lr=1e-4)
        return net, inner, loco.attach(inner, sync_every=4, in_state_dict=by != "both")

    def saved(state: Any) -> Any:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    net, whole_inner, whole = fresh(0)
    train(net, whole_inner, rank, range(10))

    net, inner, handle = fresh(0)
    train(net, inner, rank, range(stop_at))
    state = saved((inner if by == "optimizer" else handle).state_dict())
    assert set(state) == {"state", "param_groups", "loco"}
    inners = saved(inner.state_dict())
    net, inner, handle = fresh(50 + rank)
    if by == "both":
        inner.load_state_dict(inners)
        state = {**inner.state_dict(), "loco": state["loco"]}
    (inner if by == "optimizer" else handle).load_state_dict(state)
    assert (handle.round, handle.local_step) == divmod(stop_at, 4)
    train(net, inner, rank, range(stop_at, 10))
    return snapshot(whole), inner_state(whole_inner), snapshot(handle), inner_state(inner)


@pytest.mark.check(CHECKPOINTS, sample="both")
@pytest.mark.parametrize("by", ["optimizer", "handle", "both"])
def test_an_attached_optimizer_resumes_bit_for_bit_in_the_middle_of_a_round(by: str) -> None:
    for outer, inner, outer_2, inner_2 in run_ranks(2, resumed, 6, by):
        assert_same(outer, outer_2)
        assert_same(inner, inner_2)


def through_checkpoints(rank: int, folder: str) -> tuple[Snapshot, Snapshot]:
    """Saved by a handle, loaded by a wrapper; then saved by the wrapper, and loaded by a handle."""

    def inner_of(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = small_model(seed)
        return net, torch.optim.AdamW(net.parameters(), lr=1e-4)

    net, inner = inner_of(0)
    whole = loco.PulseLoCo(inner, sync_every=4)
    train(net, whole, rank, range(11))

    net, inner = inner_of(0)
    with loco.Checkpoints(Path(folder) / "first") as checkpoints:
        handle = loco.attach(inner, sync_every=4)
        train(net, inner, rank, range(5))
        checkpoints.save(handle, {"step": 5})
    net, inner = inner_of(9)
    wrapper = loco.PulseLoCo(inner, sync_every=4)
    with loco.Checkpoints(Path(folder) / "first") as checkpoints:
        found = checkpoints.load(wrapper)
    assert found is not None
    assert (found.round, found.local_step, found.extra) == (1, 1, {"step": 5})
    train(net, wrapper, rank, range(5, 7))
    with loco.Checkpoints(Path(folder) / "second") as checkpoints:
        checkpoints.save(wrapper)
    net, inner = inner_of(7)
    handle = loco.attach(inner, sync_every=4)
    with loco.Checkpoints(Path(folder) / "second") as checkpoints:
        assert checkpoints.load(handle) is not None
    train(net, inner, rank, range(7, 11))
    return snapshot(whole), snapshot(handle)


def test_checkpoints_take_the_handle_and_the_wrapper_alike(tmp_path: Path) -> None:
    for whole, pieced in run_ranks(2, through_checkpoints, str(tmp_path)):
        assert_same(whole, pieced)


def failing(rank: int) -> Any:
    """A round that fails leaves the step counted, and the next call repeats the round."""
    net = small_model()
    inner = torch.optim.SGD(net.named_parameters(), lr=0.1)
    handle = loco.attach(inner, sync_every=2)
    train(net, inner, rank, range(1))
    bias = net.get_parameter("2.bias")
    before = bias.detach().clone()
    if rank == 1:
        bias.data.fill_(float("inf"))
    inner.zero_grad()
    failed = error_of(inner.step)
    at = handle.round, handle.local_step
    bias.data.copy_(before)
    handle.sync()
    return failed, at, (handle.round, handle.local_step)


def test_a_failed_round_raises_from_the_frameworks_step_and_can_be_repeated() -> None:
    for (kind, text), failed_at, done_at in run_ranks(2, failing):
        assert kind == "NonFiniteError"
        assert "round 1, site 1: the update of" in text
        assert failed_at == (0, 2)
        assert done_at == (1, 0)
