"""Changes of PULSELoCo that were tried, as hooks into its rounds: none is a part of the library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import loco
from experiments.settings.config import RunConfig


def momentum_before_gate(optimizer: loco.PulseLoCo, config: RunConfig) -> None:
    """Have every site run the outer optimizer on its own Δ, before the gate looks at what comes of it.

        m_r = μ·m_r + Δ_r;   w_r = θ − α·(Δ_r + μ·m_r)

    The exchange then averages what is left to do: θ = θ − g. So `optimizer` has α = 1 and μ = 0.
    """
    momentum = torch.zeros_like(optimizer.outer_state.anchor)

    def change_weights() -> None:
        for w, theta, m in _pieces(optimizer, momentum):
            delta = theta - w
            m.mul_(config.outer_momentum).add_(delta)
            w.copy_(theta - config.outer_lr * (delta + config.outer_momentum * m))

    _at(optimizer, "begun", change_weights)


def whole_ulps(optimizer: loco.PulseLoCo) -> None:
    """Send v = bf16(θ) − bf16(θ − s), the difference that a BF16 receiver sees, instead of s.

    What is left, s − v, is added to the residual once the round is applied.
    """
    residual = optimizer.outer_state.residual
    assert residual is not None
    rest = torch.zeros_like(residual)

    def change_weights() -> None:
        for w, theta, e, left in _pieces(optimizer, residual, rest):
            s = (theta - w) + e
            v = theta.bfloat16().float() - (theta - s).bfloat16().float()
            w.copy_(torch.where(v != 0, theta - (v - e), w))
            left.copy_(torch.where(v != 0, s - v, 0.0))

    _at(optimizer, "begun", change_weights)
    _at(optimizer, "applied", lambda: residual.add_(rest))


def forgetting(optimizer: loco.PulseLoCo) -> None:
    """No error feedback: what a round withholds is gone."""
    residual = optimizer.outer_state.residual
    assert residual is not None
    _at(optimizer, "applied", residual.zero_)


def late_gain(optimizer: loco.PulseLoCo, config: RunConfig) -> None:
    """Another gain of the gate in the last quarter of the rounds, so that what was withheld comes out."""
    outer, rounds = optimizer.outer_state, config.steps // config.sync_every
    gate, gain = outer.gate, config.late_gate_gain
    assert gate is not None
    assert gain is not None

    def change_gate() -> None:
        if outer.rounds_done + 1 > rounds - max(1, rounds // 4):
            outer.gate = dataclasses.replace(gate, gain=gain)

    _at(optimizer, "begun", change_gate)


def _pieces(optimizer: loco.PulseLoCo, *states: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The weights of this rank piece by piece, each with θ and the states beside it."""
    outer = optimizer.outer_state
    with outer.parameters.pieces(outer.start, outer.stop, write=True) as weights:
        sizes = [w.numel() for w in weights]
        yield from zip(weights, *(state.split(sizes) for state in (outer.anchor, *states)), strict=True)


def _at(optimizer: loco.PulseLoCo, phase: str, act: Callable[[], object]) -> None:
    """Act once in every round, also in one that is repeated over new links."""
    last = 0

    @torch.no_grad()
    def hook(progress: loco.RoundProgress) -> None:
        nonlocal last
        if progress.phase == phase and progress.number != last:
            last = progress.number
            act()

    optimizer.register_round_hook(hook)
