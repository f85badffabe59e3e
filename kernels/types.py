"""The arguments and results of the ops, which are the same for every home."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .recycle import joined

BLOCK = 256  # elements: a position inside a block is one byte


def all_finite(values: Tensor) -> bool:
    """Whether no value is infinite or NaN. Their sum nearly always tells, at the speed of reading them, which
    takes isfinite() twenty times as long; large values may add up to infinity, too."""
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())


class Entries(NamedTuple):
    """Some entries of a flat FP32 vector of n elements, block by block; or all elements (without positions).

    Block b covers BLOCK elements from b · BLOCK on; the last block may be shorter. The entries of a block can
    be found without reading the others, so many threads can work on a payload at once.
    """

    starts: Tensor | None  # [⌈n / BLOCK⌉ + 1] int64: block b has the entries starts[b] … starts[b + 1]
    offsets: Tensor | None  # [k] uint8, positions inside their blocks, increasing
    values: Tensor  # [k] float32

    @staticmethod
    def whole(values: Tensor) -> "Entries":
        return Entries(None, None, values)

    @staticmethod
    def at(indices: Tensor, values: Tensor, numel: int) -> "Entries":
        """The entries at strictly increasing positions of a vector of `numel` elements."""
        edges = torch.arange(-(-numel // BLOCK) + 1, device=indices.device) * BLOCK
        return Entries(torch.searchsorted(indices, edges), (indices % BLOCK).to(torch.uint8), values)

    @staticmethod
    def none(numel: int, device: torch.device) -> "Entries":
        """No entries of a vector of `numel` elements."""
        nowhere = torch.empty(0, dtype=torch.int64, device=device)
        return Entries.at(nowhere, torch.empty(0, dtype=torch.float32, device=device), numel)

    @property
    def length(self) -> int:
        """How many entries these are."""
        first, last = self.ends
        return last - first

    @property
    def ends(self) -> tuple[int, int]:
        """The first of these among `values`, and the one behind the last."""
        if self.starts is None:
            return 0, self.values.numel()
        first, last = self.starts.as_strided(
            (2,), (self.starts.numel() - 1,)
        ).tolist()  # which waits once for a GPU
        return first, last

    def part(self, at: slice) -> "Entries":
        """The entries of some whole blocks, given by the elements they cover; shares offsets and values with
        `self`."""
        if self.starts is None:
            return Entries.whole(self.values[at])
        first, last = (-(-element // BLOCK) for element in (at.start, at.stop))
        return Entries(self.starts[first : last + 1], self.offsets, self.values)

    def cut(self, at: slice) -> "Entries":
        """As `part`, but with `starts` of their own, from 0, and no other offsets and values."""
        part = self.part(at)
        if part.starts is None:
            return part
        assert part.offsets is not None
        first, last = part.ends
        return Entries(part.starts - first, part.offsets[first:last], part.values[first:last])

    def placed(self, at: slice, numel: int) -> "Entries":
        """A cut of some whole blocks as entries of the whole vector, which has none elsewhere; shares offsets
        and values with `self`."""
        assert self.starts is not None
        before = at.start // BLOCK
        behind = -(-numel // BLOCK) + 1 - before - self.starts.numel()
        starts = [self.starts[:1].expand(before), self.starts, self.starts[-1:].expand(behind)]
        return self._replace(starts=torch.cat(starts))

    def filled(self) -> "Entries":
        """Of room for more entries, those that `starts` tells of."""
        assert self.starts is not None
        assert self.offsets is not None
        count = int(self.starts[-1])
        return Entries(self.starts, self.offsets[:count], self.values[:count])

    def add_to(self, vector: Tensor) -> None:
        vector[slice(None) if self.starts is None else self.indices()] += self.values

    @staticmethod
    def join(parts: Sequence["Entries"]) -> "Entries":
        """The entries of several vectors one after the other. All but the last non-empty one must be a whole
        number of blocks long."""
        values = joined([part.values for part in parts])
        starts, offsets, found = [], [], 0
        for part in parts:
            if part.starts is None or part.offsets is None:
                return Entries.whole(values)
            starts.append(part.starts[:-1] + found)
            offsets.append(part.offsets)
            found += part.values.numel()
        end = torch.full((1,), found, dtype=torch.int64, device=values.device)
        return Entries(joined([*starts, end]), joined(offsets), values)

    def to(self, device: torch.device | str) -> "Entries":
        return Entries(*(None if x is None else x.to(device) for x in self))  # pyright: ignore[reportArgumentType]

    def within(self, at: slice) -> tuple[Tensor, Tensor]:
        """The entries among some elements: their positions in these, and their values."""
        assert self.starts is not None
        first, last = at.start // BLOCK, -(-at.stop // BLOCK)
        where = self.indices(first, last)
        here = (where >= at.start) & (where < at.stop)
        values = self.values[int(self.starts[first]) : int(self.starts[last])]
        return where[here] - at.start, values[here]

    def indices(self, first: int = 0, last: int | None = None) -> Tensor:
        """The positions of all entries, or of those in the blocks first … last. -> int64"""
        assert self.starts is not None
        assert self.offsets is not None
        starts = self.starts[first : None if last is None else last + 1]
        of_block = torch.arange(first, first + starts.numel() - 1, device=starts.device) * BLOCK
        offsets = self.offsets[int(starts[0]) : int(starts[-1])]
        return of_block.repeat_interleave(starts.diff()) + offsets


class Encoded(NamedTuple):
    """What one pass over a site's state finds."""

    entries: Entries
    digest: int  # of θ, 64 bits
    first_nonfinite: int  # position of the first s that is infinite or NaN, or -1
    factor: float = 1.0  # c, which Δ was multiplied by


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Send an entry if its update, times `gain`, would change the cast of its weight to `dtype`.

    Two economies, off by default, are measured in ulp(θ), the BF16 ulp of the weight: updates of at most
    `margin` · ulp(θ) are not sent, and values are sent as the nearest multiple of ulp(θ) / `value_steps`.
    """

    dtype: torch.dtype = torch.bfloat16
    gain: float = 1.0  # γ
    margin: float = 0.0  # f
    value_steps: int | None = None  # V, a power of two from 1 to 256; None: exact values


class Known:
    """What the sender and the receivers of some entries all hold, and from which both predict the entries.

    Args:
        anchor: θ, float32.
        momentum: m, float32.
        gate: its format says which borders an update must have crossed.
        at: the elements that are meant, of these; by default all. They are cut out once a code asks for them.
    """

    __slots__ = ("_anchor", "_at", "_momentum", "gate", "numel")

    def __init__(self, anchor: Tensor, momentum: Tensor | None, gate: Gate, at: slice | None = None) -> None:
        self._anchor, self._momentum, self.gate = anchor, momentum, gate
        self._at = slice(0, anchor.numel()) if at is None else at
        self.numel = self._at.stop - self._at.start

    @property
    def anchor(self) -> Tensor:
        return self._anchor[self._at]

    @property
    def momentum(self) -> Tensor | None:
        return None if self._momentum is None else self._momentum[self._at]

    @property
    def device(self) -> torch.device:
        return self._anchor.device

    def part(self, at: slice) -> "Known":
        first = self._at.start
        return Known(self._anchor, self._momentum, self.gate, slice(first + at.start, first + at.stop))

    def to(self, device: torch.device | str) -> "Known":
        momentum = None if self.momentum is None else self.momentum.to(device)
        return Known(self.anchor.to(device), momentum, self.gate)


class Changes(NamedTuple):
    """Some elements of a vector, and the bits that they change to, or had before."""

    positions: Tensor  # [k] int64, increasing
    bits: Tensor  # [k], integers of the elements' size


class Ranked(NamedTuple):
    """Changes as a patch tells them: part by part, in a part class by class, and in a class in order.

    `reference_patch` says what parts, classes and steps are.
    """

    lowest: Tensor  # [parts] uint8: the exponent field of class 0; 0 in a part without changes
    counts: Tensor  # [parts, CLASSES] int32: how many weights of the class change
    ranks: Tensor  # [k] int32: how many weights of the class come before this one in the part
    steps: Tensor  # [k] int64: new − old, in the format's order of all its values

    def to(self, device: torch.device | str) -> "Ranked":
        return Ranked(*(x.to(device) for x in self))


class MalformedError(ValueError):
    """Bytes that no encoder writes."""


@dataclass(frozen=True, kw_only=True)
class OuterStep:
    """The constants of the outer optimizer. They are rounded to FP32 when they are used with FP32 tensors."""

    divisor: float  # of the sum over all sites: R, or the sum of their weights
    factor: float = 1.0  # c, which this site's Δ is multiplied by
    lr: float  # α
    momentum: float  # μ
    nesterov: bool
