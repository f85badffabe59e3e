"""DDP over all sites: gradients are averaged in every step, and a round is only so many steps."""

from __future__ import annotations

from typing import Any

import torch

from experiments.errors import ExperimentError
from experiments.training.ledger import ring_all_reduce_bytes


class EveryStep:
    """An inner optimizer behind DDP, as a loop sees it that expects rounds.

    bytes_per_round: that each rank sends, as worked out.
    """

    def __init__(self, inner: torch.optim.Optimizer, *, sync_every: int, ranks: int) -> None:
        self._inner, self._every = inner, sync_every
        self._steps = 0
        numel = sum(p.numel() for group in inner.param_groups for p in group["params"])
        self.bytes_per_round = sync_every * ring_all_reduce_bytes(numel, ranks)

    @property
    def round(self) -> int:
        return self._steps // self._every

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    def zero_grad(self) -> None:
        self._inner.zero_grad()

    def step(self) -> None:
        self._inner.step()
        self._steps += 1

    def eval(self) -> None:
        raise ExperimentError("a version can't be published, and method=ddp does not keep it to try again")

    def train(self) -> None: ...

    def sync(self) -> None: ...
