"""Changes of PULSELoCo that were tried, as hooks into its rounds: none is a part of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import loco


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
