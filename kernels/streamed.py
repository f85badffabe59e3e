"""The ops for outer state in host memory beside parameters on a GPU.

The host's home does the work, where the state is: the parameters are copied to the host in chunks and back
again. While one chunk is processed, the next is being copied.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .recycle import recycled
from .types import BLOCK, Encoded, Entries, Gate, OuterStep

if TYPE_CHECKING:
    from . import Home

CHUNK = 1 << 24  # elements at most
CHUNKS = 64  # at least, so that the few that are in flight take less than 0.5 byte per parameter


class Streamed:
    """The ops of `reference`, on state in host memory and parameters elsewhere.

    Args:
        home: does the work on the host.
    """

    def __init__(self, home: "Home") -> None:
        self._home = home
        # Kept from one op to the next: once a round is agreed on, apply must not run out of memory.
        self._slots: list[_Slot] = []

    def encode(
        self,
        anchor: Tensor,
        weights: Sequence[Tensor],
        residual: Tensor | None,
        gate: Gate | None,
        factor: float = 1.0,
    ) -> Encoded:
        n = anchor.numel()
        values = recycled(n, torch.float32, at_most=gate is not None)
        offsets = recycled(n, torch.uint8, at_most=True)
        starts = torch.zeros(-(-n // BLOCK) + 1, dtype=torch.int64, device="cpu")
        count, first_nonfinite = 0, -1
        for chunk in self._chunks(weights, read=True):
            at = chunk.at
            part = self._home.encode(anchor[at], chunk.arrived(), _part(residual, at), gate, factor)
            if first_nonfinite < 0 <= part.first_nonfinite:
                first_nonfinite = at.start + part.first_nonfinite
            found = part.entries
            here = slice(count, count + found.values.numel())
            values[here] = found.values
            if found.starts is not None:
                assert found.offsets is not None
                offsets[here] = found.offsets
                first = at.start // BLOCK + 1
                starts[first : first + found.starts.numel() - 1] = found.starts[1:] + count
            count = here.stop
        entries = Entries.whole(values) if gate is None else Entries(starts, offsets[:count], values[:count])
        # A digest depends on the positions of the words, so it is taken of the whole anchor.
        return Encoded(entries, self._home.digest(anchor), first_nonfinite)

    def apply(
        self,
        anchor: Tensor,
        momentum: Tensor | None,
        weights: Sequence[Tensor],
        residual: Tensor | None,
        own: Entries,
        contributions: Sequence[Entries],
        outer: OuterStep,
        returned: Entries | None = None,
    ) -> float:
        squares = 0.0
        for chunk in self._chunks(weights, read=residual is not None):
            at = chunk.at
            norm = self._home.apply(
                anchor[at],
                _part(momentum, at),
                chunk.arrived(),
                _part(residual, at),
                own.part(at),
                [c.part(at) for c in contributions],
                outer,
                None if returned is None else returned.part(at),
            )
            chunk.send_back()
            squares += norm * norm
        return math.sqrt(squares)

    def write_weights(self, anchor: Tensor, weights: Sequence[Tensor]) -> None:
        for chunk in self._chunks(weights, read=False):
            self._home.write_weights(anchor[chunk.at], chunk.arrived())
            chunk.send_back()

    def digest(self, data: Tensor) -> int:
        return self._home.digest(data)

    def _chunks(self, weights: Sequence[Tensor], *, read: bool) -> Iterator["_Chunk"]:
        """The parameters in chunks of whole blocks. With `read`, each is copied here while the one before it
        is processed."""
        weights = [w for w in weights if w.numel()]
        if not weights:
            return
        ends = list(accumulate(w.numel() for w in weights))
        numel = ends[-1]
        width = -(-min(CHUNK, -(-numel // CHUNKS)) // BLOCK) * BLOCK
        slots = self._slots_of(width * max(w.element_size() for w in weights), weights[0].device)
        before = None
        piece = 0
        for number, start in enumerate(range(0, numel, width)):
            stop = min(start + width, numel)
            views: list[Tensor] = []
            while True:
                w, begin = weights[piece], ends[piece] - weights[piece].numel()
                views.append(w[max(start - begin, 0) : stop - begin])
                if ends[piece] >= stop:
                    break
                piece += 1
            if ends[piece] == stop:
                piece += 1
            chunk = _Chunk(slice(start, stop), views, slots[number % 3], read=read)
            if before is not None:
                yield before
            before = chunk
        if before is not None:
            yield before

    def _slots_of(self, size: int, device: torch.device) -> list["_Slot"]:
        """Three buffers: for the chunk that is processed, the next one, and the one that is copied back."""
        kept = self._slots
        if not kept or kept[0].here.numel() < size or kept[0].there.device != device:
            self._slots = []
            self._slots = [_Slot(size, device) for _ in range(3)]
        return self._slots


class _Slot:
    """A buffer for one chunk on each side, which is reused."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.here = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.there = torch.empty(size, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if pinned else None
        self.blocking = not pinned

    def mark(self) -> None:
        """Call it after a copy was started."""
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.there.device))

    def wait(self) -> None:
        """Wait until the last copy is done."""
        if self._copied is not None:
            self._copied.synchronize()


class _Chunk:
    """Some elements of the parameters and their copy in host memory. It takes one transfer each way, whatever
    the number of parameters they belong to."""

    def __init__(self, at: slice, views: list[Tensor], slot: _Slot, *, read: bool) -> None:
        self.at = at
        self._views = views
        self._slot = slot
        # Pieces with wide elements first, so that all are aligned.
        self._order = sorted(range(len(views)), key=lambda k: -views[k].element_size())
        self._sizes = [views[k].numel() * views[k].element_size() for k in self._order]
        self._total = sum(self._sizes)
        slot.wait()
        if read:
            there = slot.there[: self._total]
            torch.cat([views[k].view(torch.uint8) for k in self._order], out=there)
            slot.here[: self._total].copy_(there, non_blocking=not slot.blocking)
            slot.mark()

    def arrived(self) -> list[Tensor]:
        """The copies of the pieces in host memory, once they have arrived."""
        self._slot.wait()
        return self._pieces(self._slot.here)

    def send_back(self) -> None:
        there = self._slot.there[: self._total]
        there.copy_(self._slot.here[: self._total], non_blocking=not self._slot.blocking)
        self._slot.mark()
        torch._foreach_copy_(self._views, self._pieces(there))  # pyright: ignore[reportPrivateImportUsage]

    def _pieces(self, data: Tensor) -> list[Tensor]:
        split = dict(zip(self._order, data[: self._total].split(self._sizes), strict=True))
        return [split[k].view(view.dtype) for k, view in enumerate(self._views)]


def _part(state: Tensor | None, at: slice) -> Tensor | None:
    return None if state is None else state[at]
