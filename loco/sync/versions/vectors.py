"""Weights in host memory as vectors of bits: what a publisher has published last."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from loco import kernels
from loco.kernels import Changes, reference

from .layout import Layout

MASK = (1 << 64) - 1
ChangesOf = dict[torch.dtype, Changes]  # by format


class Vectors:
    """One contiguous vector for each format of a layout.

    Args:
        tensors: by format, the pieces of its vector. FP32 ones are cast where the layout says so.
    """

    def __init__(self, layout: Layout, tensors: Mapping[torch.dtype, Sequence[Tensor]]) -> None:
        self.layout = layout
        self.whole: dict[torch.dtype, Tensor] = {}
        self.pieces: dict[torch.dtype, list[Tensor]] = {}
        self._digests: dict[torch.dtype, list[int]] = {}
        for format, new in tensors.items():
            sizes = [piece.numel() for piece in new]
            whole = torch.empty(sum(sizes), dtype=format)
            self.whole[format], self.pieces[format] = whole, list(whole.split(sizes)) if sizes else []
            for held, fresh in zip(self.pieces[format], new, strict=True):
                _copy_cast(held, fresh)
            self._digests[format] = [kernels.digest_bits(piece) for piece in self.pieces[format]]

    @property
    def digest(self) -> str:
        """Of all weights."""
        return combined([digest for format in self.layout.formats for digest in self._digests[format]])

    def changes(self, tensors: Mapping[torch.dtype, Sequence[Tensor]]) -> ChangesOf:
        """What new weights change."""
        return {format: kernels.find_changes(self.pieces[format], new) for format, new in tensors.items()}

    def swap_bits(self, changes: ChangesOf) -> None:
        """Take over changes, which then are what takes them back."""
        for format, some in changes.items():
            moved = kernels.swap_bits(self.pieces[format], some)
            self._digests[format] = [d + m & MASK for d, m in zip(self._digests[format], moved, strict=True)]


def _copy_cast(held: Tensor, fresh: Tensor) -> None:
    for to, new in zip(held.split(reference.CHUNK), fresh.split(reference.CHUNK), strict=True):
        to.copy_(new if new.dtype == to.dtype else reference.cast(new, to.dtype))


def combined(digests: Sequence[int]) -> str:
    """One digest of those of all regions, format by format."""
    each = b"".join(digest.to_bytes(8, "little") for digest in digests)
    return hashlib.blake2b(each, digest_size=8).hexdigest()
