"""Which elements of which tensors are published, and in which order: the same at both ends.

Tensors are published as vectors, one for each format: all BF16 elements, one tensor after the other, then all
FP16 ones, and so on. Whatever has no floating-point format (counters, masks, packed integers) is a vector of
bytes.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from loco.kernels.reference_patch import FORMATS

BYTES = torch.uint8


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of a tensor: a box of its elements, and of these, in row-major order, those from `start` to
    `stop`.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    offset: tuple[int, ...]  # of the box in the tensor
    size: tuple[int, ...]  # of the box
    start: int
    stop: int

    @staticmethod
    def whole(name: str, shape: Sequence[int], dtype: torch.dtype) -> "Region":
        box = tuple(shape)
        return Region(
            name=name, shape=box, dtype=dtype, offset=(0,) * len(box), size=box, start=0, stop=math.prod(box)
        )

    @property
    def format(self) -> torch.dtype:
        """Of the vector that it belongs to."""
        return self.dtype if self.dtype in FORMATS else BYTES

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        return self == Region.whole(self.name, self.shape, self.dtype)

    def box(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.offset, self.size, strict=True))

    def __str__(self) -> str:
        whose = f"{self.name}, {list(self.shape)} of {name_of_dtype(self.dtype)}"
        if self.is_whole:
            return whose
        return (
            f"{whose}, its elements {self.start} to {self.stop} of {list(self.size)} from {list(self.offset)}"
        )


@dataclass(frozen=True)
class Layout:
    """The regions that a publisher publishes, in order."""

    regions: tuple[Region, ...]

    @property
    def formats(self) -> list[torch.dtype]:
        """The vectors that there are."""
        return sorted({region.format for region in self.regions}, key=str)

    def of_format(self, format: torch.dtype) -> list[Region]:
        """The regions of a vector, which stand in it in this order."""
        return [region for region in self.regions if region.format == format]

    @property
    def numel(self) -> int:
        return sum(region.stop - region.start for region in self.regions)

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.regions)

    @cached_property
    def text(self) -> bytes:
        return json.dumps([_plain(region) for region in self.regions], separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        return digest_of(self.text)

    @staticmethod
    def load(text: bytes | bytearray) -> "Layout":
        """
        Raises:
            ValueError: this is no layout.
        """
        try:
            return Layout(tuple(_region(*entry) for entry in json.loads(text)))
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"it describes no tensors ({error})") from error

    def difference(self, other: "Layout") -> str:
        """The first region in which another layout differs, in words; "" if there is none."""
        mine, theirs = {r.name: r for r in self.regions}, {r.name: r for r in other.regions}
        for name in mine.keys() | theirs.keys():
            if mine.get(name) != theirs.get(name):
                return f"{mine.get(name, f'no {name}')}; then {theirs.get(name, f'no {name}')}"
        return "" if self == other else "the order of the tensors"


def digest_of(text: bytes | bytearray) -> str:
    return hashlib.sha256(text).hexdigest()


def _plain(region: Region) -> list[Any]:
    entry: list[Any] = [region.name, list(region.shape), name_of_dtype(region.dtype)]
    if not region.is_whole:
        entry += [list(region.offset), list(region.size), region.start, region.stop]
    return entry


def _region(name: str, shape: list[int], dtype: str, *part: Any) -> Region:
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype) or not isinstance(name, str):
        raise TypeError(f"{dtype} is no dtype")
    whole = Region.whole(name, [_natural(n) for n in shape], found)
    if not part:
        return whole
    offset, size, start, stop = part
    inside = all(
        _natural(at) + _natural(n) <= most for at, n, most in zip(offset, size, shape, strict=True)
    ) and 0 <= _natural(start) <= _natural(stop) <= math.prod(size)
    if not inside:
        raise ValueError(f"a part of {name} lies outside it")
    return Region(
        name=name,
        shape=whole.shape,
        dtype=found,
        offset=tuple(offset),
        size=tuple(size),
        start=start,
        stop=stop,
    )


def _natural(n: Any) -> int:
    if type(n) is not int or n < 0:
        raise ValueError(f"{n!r} is no size")
    return n


def name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cut(regions: Sequence[Region], share: int, of: int) -> list[Region]:
    """One of `of` shares of about equal size. All together have every element once."""
    total, found, at = sum(region.nbytes for region in regions), [], 0
    low, high = total * share // of, total * (share + 1) // of
    for region in regions:
        width = region.dtype.itemsize
        start = min(max(-(-(low - at) // width), 0), region.stop - region.start)
        stop = min(max(-(-(high - at) // width), 0), region.stop - region.start)
        if start < stop:
            found.append(replace(region, start=region.start + start, stop=region.start + stop))
        at += region.nbytes
    return found
