"""The ops for outer state in host memory beside parameters on a GPU.

The work is done where the state is, by the host's home: the parameters come over in chunks, each one on its
way while the one before is worked on, and go back the same way.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .types import BLOCK, Encoded, Entries, Gate, OuterStep

if TYPE_CHECKING:
    from . import Home

CHUNK = 1 << 24  # elements at most
CHUNKS = 32  # at least, so that the three chunks under way take less than 0.5 byte per parameter


class Streamed:
    """The ops of `reference`, on state in host memory and parameters elsewhere.

    Args:
        home: does the work on the host.
    """

    def __init__(self, home: "Home") -> None:
        self._home = home

    def encode(
        self, anchor: Tensor, weights: Sequence[Tensor], residual: Tensor | None, gate: Gate | None
    ) -> Encoded:
        parts: list[Entries] = []
        first_nonfinite = -1
        for chunk in _chunks(weights, read=True):
            at = chunk.at
            part = self._home.encode(anchor[at], chunk.arrived(), _part(residual, at), gate)
            parts.append(part.entries)
            if first_nonfinite < 0 <= part.first_nonfinite:
                first_nonfinite = at.start + part.first_nonfinite
        # A digest depends on where its words lie, so it is taken of the whole.
        return Encoded(_join(parts, gate is not None), self._home.digest(anchor), first_nonfinite)

    def apply(
        self,
        anchor: Tensor,
        momentum: Tensor | None,
        weights: Sequence[Tensor],
        residual: Tensor | None,
        own: Entries,
        contributions: Sequence[Entries],
        outer: OuterStep,
    ) -> float:
        squares = 0.0
        for chunk in _chunks(weights, read=residual is not None):
            at = chunk.at
            norm = self._home.apply(
                anchor[at],
                _part(momentum, at),
                chunk.arrived(),
                _part(residual, at),
                own.part(at),
                [c.part(at) for c in contributions],
                outer,
            )
            chunk.send_back()
            squares += norm * norm
        return math.sqrt(squares)

    def write_weights(self, anchor: Tensor, weights: Sequence[Tensor]) -> None:
        for chunk in _chunks(weights, read=False):
            self._home.write_weights(anchor[chunk.at], chunk.arrived())
            chunk.send_back()

    def digest(self, data: Tensor) -> int:
        return self._home.digest(data)


class _Chunk:
    """Some elements of the parameters, and their copy in host memory: one copy each way, however many
    parameters they belong to."""

    def __init__(self, at: slice, views: list[Tensor], read: bool) -> None:
        self.at = at
        self._views = views
        # Wide elements first, so that all are aligned.
        self._order = sorted(range(len(views)), key=lambda k: -views[k].element_size())
        self._sizes = [views[k].numel() * views[k].element_size() for k in self._order]
        on_gpu = views[0].is_cuda
        self._bytes = torch.empty(sum(self._sizes), dtype=torch.uint8, pin_memory=on_gpu)
        self._event = None
        if read:
            self._bytes.copy_(
                torch.cat([views[k].view(torch.uint8) for k in self._order]), non_blocking=on_gpu
            )
            if on_gpu:
                self._event = torch.cuda.Event()
                self._event.record(torch.cuda.current_stream(views[0].device))

    def arrived(self) -> list[Tensor]:
        """The copies of the pieces, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._pieces(self._bytes)

    def send_back(self) -> None:
        device = self._views[0].device
        back = self._pieces(self._bytes.to(device, non_blocking=True))
        torch._foreach_copy_(self._views, back)

    def _pieces(self, data: Tensor) -> list[Tensor]:
        split = dict(zip(self._order, data.split(self._sizes), strict=True))
        return [split[k].view(view.dtype) for k, view in enumerate(self._views)]


def _chunks(weights: Sequence[Tensor], *, read: bool) -> Iterator[_Chunk]:
    """The parameters in chunks of whole blocks; with `read`, the next is under way with each."""
    ends = list(accumulate(w.numel() for w in weights))
    numel = ends[-1] if ends else 0
    width = min(CHUNK, -(-numel // CHUNKS))
    width = -(-width // BLOCK) * BLOCK
    last = None
    piece = 0
    for start in range(0, numel, max(width, 1)):
        stop = min(start + width, numel)
        views: list[Tensor] = []
        while piece < len(weights):
            w, begin = weights[piece], ends[piece] - weights[piece].numel()
            low, high = max(start, begin), min(stop, ends[piece])
            if low < high:
                views.append(w[low - begin : high - begin])
            if ends[piece] > stop:
                break
            piece += 1
        chunk = _Chunk(slice(start, stop), views, read)
        if last is not None:
            yield last
        last = chunk
    if last is not None:
        yield last


def _part(state: Tensor | None, at: slice) -> Tensor | None:
    return None if state is None else state[at]


def _join(parts: list[Entries], gated: bool) -> Entries:
    values = torch.cat([p.values for p in parts]) if parts else torch.empty(0)
    if not gated:
        return Entries.whole(values)
    starts, offsets = [torch.zeros(1, dtype=torch.int64)], [torch.empty(0, dtype=torch.uint8)]
    for p in parts:
        assert p.starts is not None
        assert p.offsets is not None
        starts.append(p.starts[1:] + starts[-1][-1])
        offsets.append(p.offsets)
    return Entries(torch.cat(starts), torch.cat(offsets), values)
