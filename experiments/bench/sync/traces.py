"""Successive versions of weights for these benchmarks, from `experiments.weight_changes`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from experiments.weight_changes import Bits, noise

Version = dict[str, Bits]  # by tensor
STEADY = 160  # steps of noise after which a step changes about as many weights as the one before
ONE_PERCENT = 1.15e-6  # the learning rate at which a step of noise then changes 1%
ROW = 1024  # a tile is a matrix of such rows
_MATRIX = 4 << 20
_VECTOR = 1024


def noise_versions(numel: int, lr: float, *, count: int, apart: int = 1) -> Iterator[Version]:
    steps = STEADY + apart * (count - 1)
    versions = noise(numel, lr=lr, steps=steps, after=STEADY)
    for version in islice(versions, None, None, apart):
        yield {"weights": version.reshape(-1, ROW)}


def flat(version: Version) -> Bits:
    return np.concatenate([bits.ravel() for bits in version.values()])


def as_bfloat16(bits: Bits) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def same_bits(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(a, b, strict=True))


class Model:
    """Weights in host memory, matrices and vectors, that repeat one tile of some versions of noise.

    Args:
        versions: of the tile.
    """

    def __init__(self, numel: int, versions: Sequence[Bits], dtype: torch.dtype = torch.bfloat16) -> None:
        self._versions = [as_bfloat16(version) for version in versions]
        self.whole = torch.empty(numel, dtype=dtype)
        sizes: list[int] = []
        while sum(sizes) < numel:
            sizes.append(min(numel - sum(sizes), (_MATRIX, _VECTOR)[len(sizes) % 2]))
        self.pieces = list(self.whole.split(sizes))
        self.tensors = {f"layer{k}": piece for k, piece in enumerate(self.pieces)}
        self.show(0)

    def show(self, version: int) -> None:
        """Change all weights to those of a version, in place."""
        tile = self._versions[version]
        for part in self.whole.split(tile.numel()):
            part.copy_(tile[: part.numel()])
