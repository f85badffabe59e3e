"""Several inner optimizers under one outer loop: the union of their parameters, one count of steps."""

from typing import Any

import pytest
import torch
from selection import PRODUCTS
from sites import run_ranks
from states import Snapshot, assert_same, inner_state, small_model, snapshot, train

import loco


class Each:
    """Steps several optimizers one after the other, as a training loop does that knows nothing of loco."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def split(rank: int, how: str, kind: str) -> tuple[Snapshot, tuple[int, int]]:
    net = small_model()
    params = list(net.parameters())
    method = getattr(loco, kind)
    rounds: Any
    driver: Any
    if how == "one":
        rounds = driver = method(torch.optim.SGD(params, lr=1e-3, momentum=0.9), sync_every=3)
    else:
        parts = [torch.optim.SGD(part, lr=1e-3, momentum=0.9) for part in (params[:1], params[1:])]
        if how == "wrapped":
            rounds = driver = method(parts, sync_every=3)
        else:
            rounds, driver = loco.attach(parts, method=method, sync_every=3), Each([*parts])
    train(net, driver, rank, range(8))
    return snapshot(rounds), (rounds.round, rounds.local_step)


@pytest.mark.check(PRODUCTS, sample="PulseLoCo")
@pytest.mark.parametrize("kind", ["PulseLoCo", "DiLoCo"])
def test_one_sgd_and_two_over_a_split_give_the_same_bits(kind: str) -> None:
    one = run_ranks(2, split, "one", kind)
    for how in ("wrapped", "attached"):
        for (snapshot_1, at_1), (snapshot_2, at_2) in zip(one, run_ranks(2, split, how, kind), strict=True):
            assert at_1 == at_2 == (2, 2)
            assert_same(snapshot_1, snapshot_2)


def muon_and_adamw(rank: int, stop_at: int, folder: str) -> Any:
    """A run at a stretch, and one that is saved by `Checkpoints` in the middle of a round and resumed."""

    def fresh(seed: int) -> tuple[Any, Any, list[torch.optim.Optimizer]]:
        net = small_model(seed)
        matrices = [p for p in net.parameters() if p.ndim == 2]
        others = [p for p in net.parameters() if p.ndim != 2]
        inner = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-4)]
        return net, loco.PulseLoCo(inner, sync_every=4), inner

    net, whole, whole_inner = fresh(0)
    train(net, whole, rank, range(10))
    net, first, _ = fresh(0)
    train(net, first, rank, range(stop_at))
    with loco.Checkpoints(folder) as checkpoints:
        checkpoints.save(first)
    net, second, inner = fresh(5)
    with loco.Checkpoints(folder) as checkpoints:
        checkpoints.load(second)
    train(net, second, rank, range(stop_at, 10))
    return (
        (snapshot(whole), snapshot(second)),
        *((inner_state(a), inner_state(b)) for a, b in zip(whole_inner, inner, strict=True)),
    )


def test_muon_beside_adamw_resumes_bit_for_bit(tmp_path: Any) -> None:
    for outer, muon, adamw in run_ranks(2, muon_and_adamw, 6, str(tmp_path)):
        for a, b in (outer, muon, adamw):
            assert_same(a, b)
            assert a
