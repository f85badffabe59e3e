"""Many sites in one process, for counting: what each would send, and how many elements all of them together.

A prediction for hundreds of sites can't take elements for independent: those near a border are sent by nearly
all sites, and others by none. Given how far θ is from its border, and whether the outer momentum pulls there,
sites do send independently of each other. `by_class` is the share that does, in each class of such elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.noise import LR, WARM_UP, Noise, simulate
from loco import kernels
from loco.kernels import Entries

_DISTANCES, _PULLS = 200, 16  # classes


class Crowd:
    """`sites` sites on noise, after some rounds, about to exchange."""

    def __init__(self, sites: int, numel: int, *, rounds: int = WARM_UP) -> None:
        self.numel = numel
        noise = Noise(lr=LR, numel=numel, rounds=rounds + 1, sites=sites, betas=(0.9, 0.999))
        self.known, self.entries = simulate(noise)

    def sums(self, sites: int | None = None) -> Entries:
        """Of the first few, or of all."""
        return kernels.add_up(self.entries[:sites], self.numel)

    def senders(self) -> Tensor:
        """How many sites send each element. [n] int64"""
        return torch.bincount(torch.cat([e.indices() for e in self.entries]), minlength=self.numel)


@dataclass(frozen=True)
class Classes:
    """Elements that look alike to one who knows θ and m. Both [classes]."""

    share: np.ndarray  # of all elements
    chance: np.ndarray  # that a site sends one

    def density(self) -> float:
        return float((self.share * self.chance).sum())

    def union(self, sites: int) -> float:
        """The share of elements that at least one of so many sites sends."""
        return float((self.share * (1 - (1 - self.chance) ** sites)).sum())


def by_class(crowd: Crowd) -> Classes:
    """Classes of equally many elements by distance from the border, and then by the pull of m towards it."""
    anchor, momentum = crowd.known.anchor, crowd.known.momentum
    assert momentum is not None
    bits = anchor.view(torch.int32).to(torch.int64)
    past = 2**15 - (bits & 0xFFFF)  # FP32 ulps to the border of BF16 rounding, away from zero if positive
    ulp = 2.0 ** ((bits >> 23 & 255) - 150)
    distance = (past.abs() * ulp).numpy()
    # s is subtracted, as m is: a negative one of a positive θ pulls away from zero.
    towards = -(momentum * torch.sign(anchor) * torch.sign(past)).numpy()
    row = np.minimum(np.argsort(np.argsort(distance)) * _DISTANCES // crowd.numel, _DISTANCES - 1)
    order = np.lexsort((towards, row))
    label = np.empty(crowd.numel, dtype=np.int64)
    rank_in_row = np.arange(crowd.numel) % (crowd.numel // _DISTANCES)
    label[order] = row[order] * _PULLS + rank_in_row * _PULLS // (crowd.numel // _DISTANCES)
    count = np.bincount(label, minlength=_DISTANCES * _PULLS)
    sent = np.bincount(label, crowd.senders().numpy(), minlength=_DISTANCES * _PULLS)
    kept = count > 0
    return Classes(count[kept] / crowd.numel, sent[kept] / count[kept] / len(crowd.entries))
