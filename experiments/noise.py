"""Rounds of sites that train on noise: what a wire has to carry, of any density, at no cost of training.

Weights N(0, 0.02) that start as BF16 values, as published ones do; in every inner step each site's own Adam
gets gradients N(0, 1). Masters are FP32, four sites, α 0.7. Density and the values' structure come close to
those of real post-training; that sites and steps agree on no direction is the part that is not real.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from loco import kernels
from loco.kernels import Entries, Gate, Known, OuterStep

SIGMA, LR, SYNC_EVERY = 0.02, 1e-6, 8  # SIGMA: of the weights
WARM_UP = 16  # rounds until the density is steady
SITES = 4
SIDE = 1024  # a model's parameter is so many elements squared
EXACT = Gate()
# Sites that agree on no direction give a step that finds its length nothing to find.
SAVING = {"saving": 0.25, "outer_lr": 224.0}
_CHUNK = 1 << 17  # elements that pass through all rounds together, in cache: no element knows of another


class Sent(NamedTuple):
    known: Known  # θ and m before the round
    sites: list[Entries]  # what each site sends


def simulate(
    numel: int,
    lr: float,
    *,
    rounds: int = WARM_UP,
    gate: Gate = EXACT,
    sync_every: int = SYNC_EVERY,
    outer_momentum: float = 0.9,
) -> Sent:
    """The last of so many rounds."""
    outer = OuterStep(divisor=SITES, lr=0.7, momentum=outer_momentum, nesterov=True)
    parts = [
        _simulate(min(_CHUNK, numel - start), lr, rounds, gate, sync_every, outer, seed=1_000_003 * chunk)
        for chunk, start in enumerate(range(0, numel, _CHUNK))
    ]
    momenta = [known.momentum for known, _ in parts if known.momentum is not None]
    momentum = torch.cat(momenta) if momenta else None
    known = Known(torch.cat([known.anchor for known, _ in parts]), momentum, gate)
    return Sent(
        known, [Entries.join(of_site) for of_site in zip(*(sent.sites for sent in parts), strict=True)]
    )


def _simulate(
    numel: int, lr: float, rounds: int, gate: Gate, sync_every: int, outer: OuterStep, *, seed: int
) -> Sent:
    generator = torch.Generator().manual_seed(seed)
    start = kernels.reference.cast(torch.randn(numel, generator=generator) * SIGMA, torch.bfloat16).float()
    # Each site has a copy of θ and m, as if they were apart: `apply` writes them in place.
    anchors = [start.clone() for _ in range(SITES)]
    momenta = [torch.zeros(numel) if outer.momentum else None for _ in range(SITES)]
    residuals = [torch.zeros(numel) for _ in range(SITES)]
    weights = [torch.nn.Parameter(start.clone()) for _ in range(SITES)]
    inner = [torch.optim.Adam([w], lr=lr, betas=(0.9, 0.95), fused=True) for w in weights]
    entries: list[Entries] = []
    gradient = torch.empty(numel)
    for round in range(rounds):
        entries = []
        for w, adam, anchor, residual in zip(weights, inner, anchors, residuals, strict=True):
            w.grad = gradient
            for _ in range(sync_every):
                gradient.normal_(generator=generator)
                adam.step()
            entries.append(kernels.encode(anchor, [w.detach()], residual, gate).entries)
        if round < rounds - 1:
            for own, state in zip(
                entries, zip(anchors, momenta, weights, residuals, strict=True), strict=True
            ):
                anchor, momentum, w, residual = state
                kernels.apply(anchor, momentum, [w.detach()], residual, own, entries, outer)
    # Entries are views of memory reserved for all elements: keep only what is used.
    kept = [Entries(*(part.clone() for part in sent if part is not None)) for sent in entries]
    return Sent(Known(anchors[0], momenta[0], gate), kept)


def model_of(numel: int) -> list[torch.nn.Parameter]:
    """Where such a training begins, the same on all sites."""
    chance = torch.Generator().manual_seed(0)
    shapes = [(SIDE, SIDE)] * (numel // SIDE**2) + [(numel % SIDE**2,)] * bool(numel % SIDE**2)
    start = (torch.randn(shape, generator=chance).mul_(SIGMA).bfloat16().float() for shape in shapes)
    return [torch.nn.Parameter(weight) for weight in start]
