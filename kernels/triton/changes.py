"""What changed between two versions of some weights, and the changes brought into weights.

Nothing here copies weights: beside its result an op takes some bytes for each tile and for each change.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference_patch import FORMATS
from ..types import Changes
from . import tiles
from .digesting import digest_of, term_at, unsigned, widened
from .pieces import BITS, Pieces, bits_of, table_of

ENTRIES = 1024  # of a program that swaps


class Vector:
    """1-D tensors of one dtype on one device, one after the other."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        first = weights[0]
        if not all(
            w.is_contiguous() and w.device == first.device and w.dtype == first.dtype for w in weights
        ):
            raise ValueError("the weights must be contiguous tensors of one dtype on one device")
        self.device = first.device
        self.bits = FORMATS[first.dtype].bits
        self.format = (self.bits.itemsize, FORMATS[first.dtype].mantissa)
        self.sizes = [w.numel() for w in weights]
        self.numel = sum(self.sizes)
        self.tiles = tiles.count(self.numel)
        self._weights = weights  # the table has only their addresses

    @cached_property
    def pieces(self) -> Pieces:
        return table_of([w.view(self.bits) for w in self._weights])

    def launch(self, kernel: Any, *args: Any, aligned: bool = True) -> None:
        """Run a kernel on all tiles."""
        for first, count, full in tiles.runs(0, self.tiles, self.numel):
            where = (self.pieces.table, self.pieces.first, *args, self.numel, first)
            how = (tiles.TILE, full, self.pieces.aligned and aligned and full, *self.format)
            tiles.launch(kernel, count, *where, *how)


@triton.jit(
    do_not_specialize=["numel", "first_tile"],
    do_not_specialize_on_alignment=["table", "first_pieces", "fresh_table", "counts", "starts"],
)
def find_kernel(
    table,
    first_pieces,
    fresh_table,
    counts,  # [tiles] int64, or None: write what differs
    starts,  # [tiles] int64: where a tile's changes go
    positions,
    bits,
    DTYPES: tl.constexpr,  # of the new weights
    numel,
    first_tile,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    tile = first_tile + tl.program_id(0).to(tl.int64)
    base = tile * TILE
    stop = base + TILE if FULL else numel
    local = tl.arange(0, TILE)
    piece = tl.load(first_pieces + tile)
    # Past the last element both are zeros.
    old = bits_of(table, piece, base, stop, local, BITS, ALIGNED, WIDTH, MANTISSA)
    fresh = bits_of(fresh_table, piece, base, stop, local, DTYPES, ALIGNED, WIDTH, MANTISSA)
    differs = old != fresh
    if counts is not None:
        tl.store(counts + tile, tl.sum(differs.to(tl.int32)).to(tl.int64))
    else:
        place = tl.load(starts + tile) + tl.cumsum(differs.to(tl.int32), 0) - 1
        tl.store(positions + place, base + local, mask=differs)
        tl.store(bits + place, fresh.to(bits.dtype.element_ty), mask=differs)


def find_changes(old: Sequence[Tensor], new: Sequence[Tensor]) -> Changes:
    """The weights are read twice: once to count what differs, and once to write it."""
    if not sum(w.numel() for w in old):
        return nothing(old)
    vector = Vector(old)
    dtype = old[0].dtype
    fresh = [w.contiguous() for w in new]
    if [w.numel() for w in fresh] != vector.sizes or any(w.device != vector.device for w in fresh):
        raise ValueError("the new weights must be as many as the old ones, on their device")
    if any(w.dtype not in (dtype, torch.float32) for w in fresh):
        raise ValueError(f"the new weights must be {dtype} or torch.float32")
    with tiles.on_device_of(old[0]):
        into = table_of([w.view(vector.bits) if w.dtype == dtype else w for w in fresh])
        counts = torch.empty(vector.tiles, dtype=torch.int64, device=vector.device)
        vector.launch(find_kernel, into.table, counts, None, None, None, into.dtypes, aligned=into.aligned)
        ends = counts.cumsum(0)
        changes = room(int(ends[-1]), vector)
        starts = ends.sub_(counts)
        vector.launch(find_kernel, into.table, None, starts, *changes, into.dtypes, aligned=into.aligned)
    return changes


@triton.jit(do_not_specialize=["count", "entries"], do_not_specialize_on_alignment=["table"])
def swap_kernel(
    table,
    positions,
    bits,
    terms,  # [entries] int64: how each one changes the digest of its piece
    count,  # pieces
    entries,
    ENTRIES: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    there = entry < entries
    position = tl.load(positions + entry, mask=there, other=0)
    piece = tl.full((ENTRIES,), 0, tl.int64)
    size = count
    while size > 1:  # it is one of so many, from `piece` on
        half = size // 2
        piece = tl.where(tl.load(table + 3 * (piece + half)) <= position, piece + half, piece)
        size -= half
    begin = tl.load(table + 3 * piece)
    weight = tl.load(table + 3 * piece + 1).to(tl.pointer_type(bits.dtype.element_ty)) + (position - begin)
    old = tl.load(weight, mask=there, other=0)
    fresh = tl.load(bits + entry, mask=there, other=0)
    tl.store(weight, fresh, mask=there)
    tl.store(bits + entry, old, mask=there)
    change = term_at(widened(fresh), position - begin) - term_at(widened(old), position - begin)
    tl.store(terms + entry, change, mask=there)


def swap_bits(weights: Sequence[Tensor], changes: Changes) -> list[int]:
    entries = changes.positions.numel()
    if not entries:
        return [0] * len(weights)
    vector = Vector(weights)
    table = vector.pieces.table
    with tiles.on_device_of(weights[0]):
        sums = torch.zeros(entries + 1, dtype=torch.int64, device=vector.device)
        arguments = (table, *changes, sums[1:], table.shape[0] - 1, entries, ENTRIES)
        tiles.launch(swap_kernel, -(-entries // ENTRIES), *arguments)
        sums.cumsum_(0)
        ends = torch.tensor([0, *vector.sizes]).cumsum(0).to(vector.device)
        return [unsigned(x) for x in sums[torch.searchsorted(changes.positions, ends)].diff().tolist()]


def digest_bits(weights: Tensor) -> int:
    return digest_of(weights.contiguous().view(FORMATS[weights.dtype].bits))


def room(entries: int, vector: Vector) -> Changes:
    positions = torch.empty(entries, dtype=torch.int64, device=vector.device)
    return Changes(positions, torch.empty(entries, dtype=vector.bits, device=vector.device))


def nothing(weights: Sequence[Tensor]) -> Changes:
    device, dtype = (weights[0].device, weights[0].dtype) if weights else ("cpu", torch.bfloat16)
    none = torch.empty(0, dtype=torch.int64, device=device)
    return Changes(none, none.to(FORMATS[dtype].bits))
