"""The variants of PULSELoCo that were tried do what they say."""

from dataclasses import replace

import pytest
import torch
from scripted import parameters
from sites import run_ranks
from torch import nn

import loco
from experiments.errors import ExperimentError
from experiments.methods.methods import build
from experiments.settings.config import TrainConfig

NUMEL, ROUNDS = 1003, 5
CONFIG = TrainConfig(nproc=2, sync_every=2, warmup=0, lr=1e-4, gate_gain=1.0)


def rounds(rank: int, config: TrainConfig) -> list[tuple[float, torch.Tensor, torch.Tensor]]:
    """Per round: the residual's size when it ended, the residual it leaves, and the weights."""
    torch.manual_seed(3)
    net = nn.Linear(30, 20)
    trainee = build(net, config)
    optimizer = trainee.optimizer
    assert isinstance(optimizer, loco.PulseLoCo)
    found = []
    for step in range(2 * ROUNDS):
        inputs = torch.randn(8, 30, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()
        if step % 2:
            report, residual = optimizer.last_report, optimizer.outer_state.residual
            assert report is not None
            assert residual is not None
            found.append((report.residual_norm, residual.clone(), optimizer.outer_state.anchor.clone()))
    return found


def test_without_error_feedback_what_a_round_withholds_is_forgotten() -> None:
    kept = run_ranks(2, rounds, CONFIG)
    forgotten = run_ranks(2, rounds, replace(CONFIG, error_feedback=False))
    for mine, others in zip(kept, forgotten, strict=True):
        for norm, residual, _ in others:
            assert norm > 0  # something was withheld
            assert not residual.any()
        assert all(residual.any() for _, residual, _ in mine)
        # The first round has nothing to remember yet; the later ones have.
        assert torch.equal(mine[0][2], others[0][2])
        assert not torch.equal(mine[-1][2], others[-1][2])
        assert mine[-1][0] > others[-1][0]


def whole_rounds(_: int, config: TrainConfig) -> list[tuple[torch.Tensor, ...]]:
    """(θ before, e before, θ after, e after) of each round; gradients are constant, so AdamW moves by lr."""
    params = parameters(0, 300)
    with torch.no_grad():
        for p in params:
            p.copy_(p.bfloat16())
    trainee = build(nn.ParameterList(params), config)
    optimizer = trainee.optimizer
    assert isinstance(optimizer, loco.PulseLoCo)
    outer, found = optimizer.outer_state, []
    assert outer.residual is not None
    for _ in range(4):
        before = outer.anchor.clone(), outer.residual.clone()
        for p in params:
            p.grad = torch.ones_like(p)
        for _ in range(config.sync_every):
            optimizer.step()
        found.append((*before, outer.anchor.clone(), outer.residual.clone()))
    return found


def test_whole_ulps_keep_shared_weights_on_the_bf16_grid_but_for_rounding() -> None:
    """α = 1, μ = 0, sites that move alike: θ takes their v. The residual takes the rest of s."""
    config = replace(CONFIG, outer_lr=1.0, outer_momentum=0.0, whole_ulps=True)
    for site in run_ranks(2, whole_rounds, config):
        off_grid_otherwise = 0
        for before, held, after, withheld in site:
            s = held + 2 * config.lr
            assert (before != after).any()
            # A weight of up to 2^-3 is moved by v - e in FP32, which rounds it once a round.
            assert (after - after.bfloat16().float()).abs().max() < 4 * 2.0**-27
            torch.testing.assert_close((before - after) + withheld, s, rtol=0, atol=2 * 2.0**-27)
            wanted = before - s
            off_grid_otherwise += int(((wanted - wanted.bfloat16().float()).abs() > 2.0**-22).sum())
        assert off_grid_otherwise > 100


@pytest.mark.parametrize("change", [{"error_feedback": False}, {"whole_ulps": True}])
def test_an_open_gate_has_nothing_to_withhold(change: dict[str, bool]) -> None:
    with pytest.raises(ExperimentError, match="an open gate withholds nothing"):
        replace(CONFIG, gate="open", **change)


def build_open(rank: int) -> bool:
    trainee = build(nn.Linear(3, 2), replace(CONFIG, gate="open"))
    return trainee.observer is None


def test_an_open_gate_is_not_watched() -> None:
    assert all(run_ranks(2, build_open))
