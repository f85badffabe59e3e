"""The half of patches that reads every weight: from changes to their ranks in their classes, and back."""
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# To pyright a kernel is Python, where a constant is no `constexpr` and `tl` returns nothing.

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference_ranked import PART, Wrong
from ..types import Changes, MalformedError, Ranked
from . import tiles
from .changes import Vector, nothing, room
from .classes import CLASSES, Classes, class_of, from_ordered, ordered, ranks_in_tile
from .digesting import widened
from .pieces import BITS, bits_of

LANES = 128  # changes that a tile ranks at once


# ---- from changes to ranks ----


@triton.jit(
    do_not_specialize=["numel", "first_tile"],
    do_not_specialize_on_alignment=["table", "first_pieces", "lowest", "before", "starts"],
)
def rank_kernel(
    table,
    first_pieces,
    lowest,
    before,
    starts,  # [tiles + 1] int64: the first change of each tile
    positions,
    bits,
    groups,  # [entries] int32: CLASSES · part + class
    ranks,
    steps,
    TILES: tl.constexpr,
    LANES: tl.constexpr,
    numel,
    first_tile,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    tile = first_tile + tl.program_id(0).to(tl.int64)
    part = tile // TILES
    base = tile * TILE
    stop = base + TILE if FULL else numel
    local = tl.arange(0, TILE)
    at = tl.load(starts + tile)
    end = tl.load(starts + tile + 1)
    if at < end:
        low = tl.load(lowest + part).to(tl.int32)
        old = bits_of(table, tl.load(first_pieces + tile), base, stop, local, BITS, ALIGNED, WIDTH, MANTISSA)
        rank = ranks_in_tile(class_of(old, low, WIDTH, MANTISSA), base + local < stop)
        while at < end:
            entry = at + tl.arange(0, LANES)
            there = entry < end
            element = (tl.load(positions + entry, mask=there, other=base) - base).to(tl.int32)
            was = tl.gather(old, element, 0)
            of_class = class_of(was, low, WIDTH, MANTISSA)
            earlier = tl.load(before + (tile + part) * CLASSES + of_class)
            fresh = widened(tl.load(bits + entry, mask=there, other=0))
            tl.store(groups + entry, (part * CLASSES + of_class).to(tl.int32), mask=there)
            tl.store(ranks + entry, earlier + tl.gather(rank, element, 0), mask=there)
            tl.store(steps + entry, ordered(fresh, WIDTH) - ordered(was, WIDTH), mask=there)
            at += LANES


def rank_changes(old: Sequence[Tensor], changes: Changes) -> Ranked:
    numel, device, entries = sum(w.numel() for w in old), changes.positions.device, changes.positions.numel()
    groups = torch.empty(entries, dtype=torch.int32, device=device)
    ranks = torch.empty(entries, dtype=torch.int32, device=device)
    steps = torch.empty(entries, dtype=torch.int64, device=device)
    if not entries:
        parts = -(-numel // PART)
        lowest = torch.zeros(parts, dtype=torch.uint8, device=device)
        return Ranked(lowest, groups.new_zeros(parts, CLASSES.value), ranks, steps)
    with tiles.on_device_of(old[0]):
        vector = Vector(old)
        classes = Classes(vector)
        edges = torch.arange(vector.tiles + 1, device=device) * tiles.TILE
        starts = torch.searchsorted(changes.positions, edges)
        found = (starts, *changes, groups, ranks, steps, PART // tiles.TILE, LANES)
        vector.launch(rank_kernel, classes.lowest, classes.before, *found)
        # In their classes the changes stay in order.
        groups, order = groups.sort(stable=True)
        bounds = torch.arange(classes.parts * CLASSES.value + 1, device=device, dtype=torch.int32)
        counts = torch.searchsorted(groups, bounds, out_int32=True).diff().view(-1, CLASSES.value)
        lowest = torch.where(counts.any(1), classes.lowest, 0)
        return Ranked(lowest, counts, ranks[order], steps[order])


# ---- from ranks to changes ----


@triton.jit
def _first_from(ranks, begin, end, rank):
    """The first of the sorted ranks begin … end that is not below `rank`, or `end`; of each lane."""
    size = end - begin
    while tl.max(size) > 0:
        middle = begin + size // 2
        below = (size > 0) & (tl.load(ranks + middle, mask=size > 0, other=0) < rank)
        begin = tl.where(below, middle + 1, begin)
        size = tl.where(below, size - size // 2 - 1, size // 2)
    return begin


@triton.jit
def _changes_of(tile, part, before, starts, ranks):
    """Of each class the changes in the tile: the first, and the one after the last.

    They are numbered from the part's first change on, in 32 bits; which one that is comes first.
    """
    of_class = tl.arange(0, CLASSES)
    groups = starts + part * CLASSES
    origin = tl.load(groups)
    begin = (tl.load(groups + of_class) - origin).to(tl.int32)
    end = (tl.load(groups + of_class + 1) - origin).to(tl.int32)
    here = before + (tile + part) * CLASSES + of_class
    first = _first_from(ranks + origin, begin, end, tl.load(here))
    return origin, first, _first_from(ranks + origin, first, end, tl.load(here + CLASSES))


@triton.jit(do_not_specialize_on_alignment=["before", "starts", "counts"])
def meet_kernel(
    before,
    starts,  # [parts · CLASSES + 1] int64: the first change of each class of each part
    ranks,
    counts,  # [tiles] int64: the changes in each
    TILES: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    _, first, last = _changes_of(tile, tile // TILES, before, starts, ranks)
    tl.store(counts + tile, tl.sum(last - first).to(tl.int64))


@triton.jit(
    do_not_specialize=["numel", "first_tile"],
    do_not_specialize_on_alignment=["table", "first_pieces", "lowest", "before", "starts", "ends", "wrong"],
)
def place_kernel(
    table,
    first_pieces,
    lowest,
    before,
    starts,
    ranks,
    steps,
    ends,  # [tiles] int64: how many changes there are up to the end of the tile
    positions,
    bits,
    wrong,  # [tiles] int32: whether a step leads out of the format
    TILES: tl.constexpr,
    numel,
    first_tile,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    tile = first_tile + tl.program_id(0).to(tl.int64)
    part = tile // TILES
    base = tile * TILE
    stop = base + TILE if FULL else numel
    local = tl.arange(0, TILE)
    origin, first, last = _changes_of(tile, part, before, starts, ranks)
    count = tl.sum(last - first)
    outside = 0
    if count > 0:
        low = tl.load(lowest + part).to(tl.int32)
        old = bits_of(table, tl.load(first_pieces + tile), base, stop, local, BITS, ALIGNED, WIDTH, MANTISSA)
        of_class = class_of(old, low, WIDTH, MANTISSA)
        there = base + local < stop
        rank = tl.load(before + (tile + part) * CLASSES + of_class) + ranks_in_tile(of_class, there)
        # An element is one that changes if its rank is among those of its class.
        end = tl.gather(last, of_class, 0)
        entry = _first_from(ranks + origin, tl.gather(first, of_class, 0), end, rank)
        candidate = there & (entry < end)
        changed = candidate & (tl.load(ranks + origin + entry, mask=candidate, other=-1) == rank)
        moved = ordered(old, WIDTH) + tl.load(steps + origin + entry, mask=changed, other=0)
        fresh, leaves = from_ordered(moved, WIDTH)
        outside = tl.max((changed & leaves).to(tl.int32))
        place = tl.load(ends + tile) - count + tl.cumsum(changed.to(tl.int32), 0) - 1
        tl.store(positions + place, base + local, mask=changed)
        tl.store(bits + place, fresh.to(bits.dtype.element_ty), mask=changed)
    tl.store(wrong + tile, outside)


def place_ranked(old: Sequence[Tensor], ranked: Ranked) -> Changes:
    entries = ranked.ranks.numel()
    if not entries:
        return nothing(old)
    with tiles.on_device_of(old[0]):
        vector = Vector(old)
        classes = Classes(vector, ranked.lowest)
        starts = torch.zeros(ranked.counts.numel() + 1, dtype=torch.int64, device=vector.device)
        torch.cumsum(ranked.counts.view(-1), 0, out=starts[1:])
        last = ranked.ranks[(starts[1:] - 1).clamp(min=0)].view(-1, CLASSES.value)
        if ((ranked.counts > 0) & (last >= classes.before[:, -1])).any():
            raise MalformedError(Wrong.NO_SUCH_ELEMENT)
        of_part = PART // tiles.TILE
        ends = torch.empty(vector.tiles, dtype=torch.int64, device=vector.device)
        tiles.launch(meet_kernel, vector.tiles, classes.before, starts, ranked.ranks, ends, of_part)
        ends.cumsum_(0)
        changes = room(entries, vector)
        wrong = torch.empty(vector.tiles, dtype=torch.int32, device=vector.device)
        found = (starts, ranked.ranks, ranked.steps, ends, *changes, wrong, of_part)
        vector.launch(place_kernel, classes.lowest, classes.before, *found)
        if wrong.any():
            raise MalformedError(Wrong.BAD_STEP)
    return changes
