"""An inner optimizer that keeps FP32 masters would undo every round: all sites learn of it in one round."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from masters import WithMasters, network
from sites import error_of, run_ranks
from states import Snapshot, assert_same, snapshot
from torch import nn

import loco


def train(net: nn.Module, step: Callable[[], object], rank: int, k: int) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * rank + k))
    net.zero_grad()
    net(x.bfloat16()).float().square().mean().backward()
    step()


def trained(rank: int, sync_every: int, attached: bool, with_masters: tuple[int, ...]) -> Any:
    """-> rounds done, the error that ended the training, and that of a repeat."""
    net = network()
    inner: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    if rank in with_masters:
        inner = WithMasters(net.parameters(), torch.optim.AdamW, lr=1e-5)
    if attached:
        optimizer, step = loco.attach(inner, sync_every=sync_every), inner.step
    else:
        optimizer = loco.PulseLoCo(inner, sync_every=sync_every)
        step = optimizer.step
    shared, error = {}, ("", "")
    for k in range(20 * sync_every):
        if not optimizer.local_step:
            shared = of_outer(snapshot(optimizer))
        error = error_of(lambda k=k: train(net, step, rank, k))
        if error[0]:
            break
    assert_same(of_outer(snapshot(optimizer)), shared)
    return optimizer.round, error, error_of(optimizer.sync)


def of_outer(state: Snapshot) -> Snapshot:
    return {name: values for name, values in state.items() if name != "weights"}


@pytest.mark.parametrize("attached", [False, True])
def test_all_sites_refuse_the_round_after_the_one_that_was_undone(attached: bool) -> None:
    for round, (kind, text), again in run_ranks(2, trained, 8, attached, (0, 1)):
        assert round == 1
        assert kind == "ValueError"
        assert text.startswith("the inner optimizer undoes the rounds: ")
        assert again == (kind, text)  # it is not mended by a repeat


def test_with_a_round_after_each_step_too() -> None:
    for round, (kind, text), _ in run_ranks(2, trained, 1, False, (0, 1)):
        assert 1 <= round < 15
        assert kind == "ValueError"
        assert "its next step put back" in text


def test_a_site_without_masters_hears_of_the_one_that_has_them() -> None:
    (_, (kind, text), _), (round, (other_kind, other_text), _) = run_ranks(2, trained, 8, False, (0,))
    assert kind == "ValueError"
    assert "WithMasters, it seems, keeps FP32 masters of its own" in text
    assert round < 15
    assert other_kind == "PeerError"
    assert "site 0 failed, and its own error says why" in other_text
