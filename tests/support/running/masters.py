"""An inner optimizer that keeps FP32 masters, and sites in one process to try what rounds make of it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from loco.inner.own_masters import OwnMasters
from loco.parameters.flat_parameters import FlatParameters


class WithMasters(Optimizer):
    """Steps FP32 copies of its parameters by an optimizer of torch's, and copies them into the parameters."""

    def __init__(self, params: Iterable[Tensor], kind: Callable[..., Optimizer], **options: Any) -> None:
        super().__init__(params, options)
        self.masters = [p.detach().float().clone() for group in self.param_groups for p in group["params"]]
        self.stepped = kind(self.masters, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        for p, master in zip(params, self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        self.stepped.step()
        for p, master in zip(params, self.masters, strict=True):
            p.copy_(master)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 16)).bfloat16()


class Sites:
    """DiLoCo among sites in this process, each with data of its own; BF16 parameters.

    Attributes:
        watched: each site's `OwnMasters`.
    """

    def __init__(
        self, build: Callable[[nn.Module], Optimizer], *, sites: int, outer_lr: float, outer_momentum: float
    ) -> None:
        self._nets = [network() for _ in range(sites)]
        self._inner = [build(net) for net in self._nets]
        self._parameters = [FlatParameters(inner) for inner in self._inner]
        self.watched = [OwnMasters(*one) for one in zip(self._inner, self._parameters, strict=True)]
        self._target = torch.randn(64, 16)
        self._theta = self._weights(0)
        self._momentum = torch.zeros_like(self._theta)
        self._outer_lr, self._outer_momentum, self._rounds = outer_lr, outer_momentum, 0

    def run_round(self, steps: int) -> None:
        for site, (net, inner, watched) in enumerate(zip(self._nets, self._inner, self.watched, strict=True)):
            watched.before_first_step()
            for step in range(steps):
                seed = (self._rounds * 1000 + step) * 10 + site
                x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
                inner.zero_grad()
                (net(x.bfloat16()).float() - 0.1 * x @ self._target - 0.3 * site).square().mean().backward()
                inner.step()
                if not step:
                    watched.after_first_step(self._rounds)
            watched.before_round()
        updates = [self._theta.bfloat16().float() - self._weights(site) for site in range(len(self._nets))]
        mean = torch.stack(updates).mean(0)
        self._momentum = self._outer_momentum * self._momentum + mean
        self._theta = self._theta - self._outer_lr * (mean + self._outer_momentum * self._momentum)
        self._rounds += 1
        for parameters in self._parameters:
            with torch.no_grad(), parameters.pieces(0, parameters.numel, write=True) as pieces:
                for piece, part in zip(pieces, self._theta.split([p.numel() for p in pieces]), strict=True):
                    piece.copy_(part)

    def undone(self) -> list[str]:
        """What each site says of its optimizer."""
        return [watched.problem for watched in self.watched]

    def _weights(self, site: int) -> Tensor:
        parameters = self._parameters[site]
        with torch.no_grad(), parameters.pieces(0, parameters.numel) as pieces:
            return torch.cat([piece.float() for piece in pieces])
