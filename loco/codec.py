"""How entries become bytes: the body of a payload. The README gives the same to the byte.

A codec turns the entries of one payload into a uint8 tensor and back, on the tensors' device. Decoding
trusts nothing: what is not exactly what encoding would have written is a WireError.
"""

from typing import Protocol

import torch
from torch import Tensor

from loco.kernels import Entries

from .errors import WireError


class Codec(Protocol):
    id: int  # names the codec in a payload's header

    def encode(self, entries: Entries) -> Tensor: ...

    def decode(self, body: Tensor, count: int, numel: int) -> Entries:
        """The `count` entries of a vector of `numel` elements."""
        ...

    def body_sizes(self, count: int, numel: int) -> range:
        """The sizes a body of `count` entries can have, known before it is received."""
        ...


class WholeFloat32:
    """Every value, 4 bytes each; no positions."""

    id = 0

    def encode(self, entries: Entries) -> Tensor:
        assert entries.indices is None
        return entries.values.view(torch.uint8)

    def decode(self, body: Tensor, count: int, numel: int) -> Entries:
        return Entries(None, _finite(body.view(torch.float32)))

    def body_sizes(self, count: int, numel: int) -> range:
        return range(4 * numel, 4 * numel + 1) if count == numel else range(0)


class GapFloat32:
    """Gaps between positions as LEB128, then the values, 4 bytes each.

    The gap of an entry is the number of unsent positions before it. LEB128: 7 bits a byte, low bits first,
    the high bit set on all but the last byte; no longer than needed.
    """

    id = 1

    def encode(self, entries: Entries) -> Tensor:
        indices = entries.indices
        assert indices is not None
        before = torch.full((1,), -1, device=indices.device)
        gap = torch.diff(indices, prepend=before) - 1
        length = torch.ones_like(gap)
        widest = _leb128_bytes(int(gap.max())) if gap.numel() else 0
        for k in range(1, widest):
            length += gap >= 1 << 7 * k
        end = torch.cumsum(length, 0)
        size = int(end[-1]) if gap.numel() else 0
        body = torch.empty(size + 4 * gap.numel(), dtype=torch.uint8, device=indices.device)
        start = end - length
        for k in range(widest):
            here = length > k
            digit = (gap[here] >> 7 * k) & 0x7F | (length[here] > k + 1).long() << 7
            body[start[here] + k] = digit.to(torch.uint8)
        body[size:] = entries.values.view(torch.uint8)
        return body

    def decode(self, body: Tensor, count: int, numel: int) -> Entries:
        gaps, values = body[: body.numel() - 4 * count], body[body.numel() - 4 * count :]
        last = gaps < 0x80
        ends = last.nonzero().view(-1)
        if ends.numel() != count or (count and int(ends[-1]) != gaps.numel() - 1):
            raise WireError(f"{ends.numel()} positions where the header says {count}")
        before = torch.full((1,), -1, device=body.device)
        length = torch.diff(ends, prepend=before)
        start = ends - length + 1
        widest = int(length.max()) if count else 0
        if widest > _leb128_bytes(numel):
            raise WireError(f"a gap of {widest} bytes in a vector of {numel} elements")
        if bool(((length > 1) & (gaps[ends] == 0)).any()):
            raise WireError("a gap is written longer than needed")
        gap = torch.zeros(count, dtype=torch.int64, device=body.device)
        for k in range(widest):
            here = length > k
            gap[here] |= (gaps[start[here] + k].long() & 0x7F) << 7 * k
        # A gap is at most a few times numel, so a sum that leaves int64 turns negative on its way.
        indices = torch.cumsum(gap + 1, 0) - 1
        if count and (int(indices.min()) < 0 or int(indices.max()) >= numel):
            raise WireError(f"a position lies outside a vector of {numel} elements")
        # The values start at any byte; a copy aligns them.
        return Entries(indices, _finite(values.clone().view(torch.float32)))

    def body_sizes(self, count: int, numel: int) -> range:
        if count > numel:
            return range(0)
        return range(5 * count, (4 + _leb128_bytes(numel)) * count + 1)


CODECS: dict[int, Codec] = {codec.id: codec for codec in (WholeFloat32(), GapFloat32())}


def codec_for(entries: Entries) -> Codec:
    return CODECS[WholeFloat32.id if entries.indices is None else GapFloat32.id]


def _leb128_bytes(value: int) -> int:
    return max(-(-value.bit_length() // 7), 1)


def _finite(values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise WireError("a value is infinite or NaN")
    return values
