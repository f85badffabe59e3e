"""What PULSELoCo's gate does in a round, beyond what a SyncReport says. Looking changes nothing."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import loco


class Observer:
    """Of one rank's optimizer. All ranks call `after_round` together.

    seconds: that the last round was held up by looking at it.
    """

    def __init__(self, optimizer: loco.PulseLoCo) -> None:
        self._state = optimizer.outer_state
        self._age = torch.zeros_like(self._state.anchor)
        self._sent = torch.zeros(self._state.anchor.numel(), dtype=torch.uint8, device=self._age.device)
        self._visible = self.seconds = 0.0
        optimizer.register_round_hook(self._look)

    def state(self) -> torch.Tensor:
        """What it knows at a round's end, for a run that is resumed."""
        return self._age

    def resume(self, state: torch.Tensor) -> None:
        self._age.copy_(state)

    @torch.no_grad()
    def _look(self, progress: loco.RoundProgress) -> None:
        if progress.phase != "encoded":
            return
        began = time.perf_counter()
        assert progress.entries is not None
        outer = self._state
        with outer.parameters.pieces(outer.start, outer.stop) as weights:
            moved = torch.cat([w.reshape(-1).bfloat16() for w in weights])
        self._visible = float((moved != outer.anchor.bfloat16()).sum()) / max(1, outer.anchor.numel())
        self._sent.zero_()
        self._sent[progress.entries.indices()] = 1
        self.seconds = time.perf_counter() - began

    @torch.no_grad()
    def after_round(self) -> dict[str, float]:
        """Of the round that has just ended; its messages are not the round's.

        union_density: the share of entries that at least one site sent. visible: the share of weights whose
        BF16 cast this round's H steps changed, residual or not. age: rounds since the withheld was last sent,
        its mean weighted by its size.
        """
        residual = self._state.residual
        assert residual is not None
        self._age.add_(1)
        self._age[(self._sent == 1) | (residual == 0)] = 0
        size = residual.abs()
        weight = float(size.sum())
        age = float((self._age * size).sum()) / weight if weight else 0.0
        # Of the whole model: the ranks of a site watch a slice each.
        union = torch.zeros(self._state.parameters.numel, dtype=torch.uint8, device=self._sent.device)
        union[self._state.start : self._state.stop] = self._sent
        dist.all_reduce(union, dist.ReduceOp.MAX)
        density = float(union.sum(dtype=torch.int64)) / max(1, union.numel())
        return {"union_density": density, "visible": self._visible, "age": age}
