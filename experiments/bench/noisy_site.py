"""Sites that train on noise: how dense and how large payloads are when nothing is learned.

Weights are drawn from N(0, 0.02) and start as BF16 values, as published weights are; each site takes H steps
of torch's Adam on random gradients of its own between rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIGMA, LR, SYNC_EVERY = 0.02, 1e-6, 8
WARM_UP = 16  # rounds until the density is steady
_SPARE = 1 << 18


def weights(numel: int) -> Tensor:
    """What all sites start from."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(numel, generator=generator).mul_(SIGMA).bfloat16().float()


class NoisySite:
    """One site's parameter, its Adam, and the gradients that it draws.

    Args:
        numel: parameters.
        site: gradients differ from site to site.
    """

    def __init__(self, numel: int, site: int, *, lr: float = LR) -> None:
        self.parameter = torch.nn.Parameter(weights(numel))
        self.inner = torch.optim.Adam([self.parameter], lr=lr, fused=True)
        self._generator = torch.Generator().manual_seed(1 + site)
        # Drawing is most of the work: each step takes another stretch of one pool.
        self._pool = torch.randn(numel + _SPARE, generator=self._generator)

    @torch.no_grad()
    def train(self, steps: int = SYNC_EVERY) -> None:
        """`steps` inner steps, without a round after them."""
        numel = self.parameter.numel()
        for _ in range(steps):
            first = int(torch.randint(_SPARE, (1,), generator=self._generator))
            self.parameter.grad = self._pool[first : first + numel]
            self.inner.step()
