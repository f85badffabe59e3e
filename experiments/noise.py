"""Rounds of sites that train on noise: what a wire has to carry, of any density, at no cost of training.

Weights N(0, 0.02) that start as BF16 values, as published ones do; in every inner step each site's own Adam
gets gradients N(0, 1). Masters are FP32, four sites, H = 8. Density and the values' structure come close to
those of real post-training; that sites and steps agree on no direction is the part that is not real.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loco import kernels
from loco.kernels import Entries, Gate, Known, OuterStep

SIGMA, LR, SYNC_EVERY = 0.02, 1e-6, 8  # SIGMA: of the weights
WARM_UP = 16  # rounds until the density is steady
EXACT = Gate()
_CHUNK = 1 << 17  # elements that pass through all rounds together, in cache: no element knows of another


@dataclass(frozen=True, kw_only=True)
class Noise:
    lr: float
    numel: int
    rounds: int = 16  # the last one's entries are returned
    gate: Gate = EXACT
    sites: int = 4
    sync_every: int = SYNC_EVERY
    betas: tuple[float, float] = (0.9, 0.95)
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    seed: int = 0


class Sent(NamedTuple):
    known: Known  # θ and m before the round
    sites: list[Entries]  # what each site sends


def simulate(noise: Noise) -> Sent:
    """The last round of such a training."""
    known, sites = [], []
    for chunk, start in enumerate(range(0, noise.numel, _CHUNK)):
        generator = torch.Generator().manual_seed(noise.seed + 1_000_003 * chunk)
        sent = _simulate_chunk(noise, min(_CHUNK, noise.numel - start), generator)
        known.append(sent.known)
        sites.append(sent.sites)
    momenta = [k.momentum for k in known if k.momentum is not None]
    anchor = torch.cat([k.anchor for k in known])
    together = Known(anchor, torch.cat(momenta) if momenta else None, noise.gate)
    return Sent(together, [Entries.join(parts) for parts in zip(*sites, strict=True)])


def _simulate_chunk(noise: Noise, numel: int, generator: torch.Generator) -> Sent:
    outer = OuterStep(num_sites=noise.sites, lr=noise.outer_lr, momentum=noise.outer_momentum, nesterov=True)
    start = kernels.reference.cast(torch.randn(numel, generator=generator) * SIGMA, torch.bfloat16).float()
    momentum = torch.zeros(numel) if noise.outer_momentum else None
    # Each site has a copy of θ and m, as if they were apart: `apply` writes them in place.
    anchors = [start.clone() for _ in range(noise.sites)]
    momenta = [None if momentum is None else momentum.clone() for _ in range(noise.sites)]
    residuals = [torch.zeros(numel) for _ in range(noise.sites)]
    weights = [torch.nn.Parameter(start.clone()) for _ in range(noise.sites)]
    inner = [torch.optim.Adam([w], lr=noise.lr, betas=noise.betas, fused=True) for w in weights]
    for w in weights:
        w.grad = torch.empty(numel)

    entries: list[Entries] = []
    for round in range(noise.rounds):
        entries = []
        for w, adam, anchor, residual in zip(weights, inner, anchors, residuals, strict=True):
            for _ in range(noise.sync_every):
                _gradient(w).normal_(generator=generator)
                adam.step()
            entries.append(kernels.encode(anchor, [w.detach()], residual, noise.gate).entries)
        if round < noise.rounds - 1:
            for site, w in enumerate(weights):
                kernels.apply(
                    *(anchors[site], momenta[site], [w.detach()], residuals[site]),
                    *(entries[site], entries, outer),
                )
    return Sent(Known(anchors[0], momenta[0], noise.gate), [Entries(*map(_clone, e)) for e in entries])


def _gradient(w: Tensor) -> Tensor:
    assert w.grad is not None
    return w.grad


def _clone(x: Tensor | None) -> Tensor:
    """Entries are views of memory reserved for all elements: keep only what is used."""
    assert x is not None
    return x.clone()
