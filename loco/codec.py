"""How entries become bytes: the body of a payload. The README gives the same to the byte.

A codec turns the entries of one payload into a uint8 tensor and back, on the tensors' device. Decoding
trusts nothing: what is not exactly what encoding would have written is a WireError.
"""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from loco.kernels import BLOCK, Entries

from .errors import WireError


class Codec(Protocol):
    id: int  # names the codec in a payload's header

    def encode(self, entries: Entries) -> Tensor: ...

    def decode(self, body: Tensor, count: int, numel: int) -> Entries:
        """The `count` entries of a vector of `numel` elements."""
        ...

    def body_sizes(self, count: int, numel: int) -> Collection[int]:
        """The sizes a body of `count` entries can have, known before it is received."""
        ...


class WholeFloat32:
    """Every value, 4 bytes each; no positions."""

    id = 0

    def encode(self, entries: Entries) -> Tensor:
        assert entries.starts is None
        return entries.values.view(torch.uint8)

    def decode(self, body: Tensor, count: int, numel: int) -> Entries:
        return Entries.whole(_finite(body.view(torch.float32)))

    def body_sizes(self, count: int, numel: int) -> Collection[int]:
        return (4 * numel,) if count == numel else ()


class BlockFloat32:
    """The values, 4 bytes each; their offsets inside blocks of 256 elements, 1 byte each; then how many
    entries each block has, 1 byte each, or 2 bytes each if a block sends all its 256.

    Every block's part can be found and read on its own, by many threads or a GPU.
    """

    id = 1

    def encode(self, entries: Entries) -> Tensor:
        assert entries.starts is not None
        assert entries.offsets is not None
        counts = entries.starts.diff()
        width = torch.int16 if counts.numel() and int(counts.max()) > 255 else torch.uint8
        parts = (entries.values, entries.offsets, counts.to(width))
        return torch.cat([part.view(torch.uint8) for part in parts])

    def decode(self, body: Tensor, count: int, numel: int) -> Entries:
        blocks = -(-numel // BLOCK)
        values, offsets, raw = body.split([4 * count, count, body.numel() - 5 * count])
        wide = raw.numel() != blocks
        # Bytes start anywhere in a message; a copy aligns them.
        counts = (raw.clone().view(torch.int16) if wide else raw).long()
        if wide and blocks and not bool((counts > 255).any()):
            raise WireError("block counts are written wider than needed")
        if blocks and not 0 <= int(counts.min()) <= int(counts.max()) <= BLOCK:
            raise WireError(f"a block of {BLOCK} elements with more entries than that")
        starts = torch.zeros(blocks + 1, dtype=torch.int64, device=body.device)
        torch.cumsum(counts, 0, out=starts[1:])
        if int(starts[-1]) != count:
            raise WireError(f"{int(starts[-1])} positions where the header says {count}")

        # Offsets rise inside a block; only the first of a block may be at or below the one before it.
        falls = offsets[1:] <= offsets[:-1]
        first_of_block = starts[1:-1]
        inside = (first_of_block > 0) & (first_of_block < count)
        falls[first_of_block[inside] - 1] = False
        if bool(falls.any()):
            raise WireError("the positions of a block are not in order")
        if count and numel % BLOCK and int(starts[-2]) < count and int(offsets[-1]) >= numel % BLOCK:
            raise WireError(f"a position lies outside a vector of {numel} elements")
        return Entries(starts, offsets, _finite(values.clone().view(torch.float32)))

    def body_sizes(self, count: int, numel: int) -> Collection[int]:
        blocks = -(-numel // BLOCK)
        if count > numel:
            return ()
        # A count is two bytes wide only where a block is full.
        return (5 * count + blocks, 5 * count + 2 * blocks) if count >= BLOCK else (5 * count + blocks,)


CODECS: dict[int, Codec] = {codec.id: codec for codec in (WholeFloat32(), BlockFloat32())}


def codec_for(entries: Entries) -> Codec:
    return CODECS[WholeFloat32.id if entries.starts is None else BlockFloat32.id]


def _finite(values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise WireError("a value is infinite or NaN")
    return values
