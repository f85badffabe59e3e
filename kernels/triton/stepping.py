"""Steps 5 to 8 in one pass: the residual, the mean of the contributions, the outer step, the weights.

A sparse contribution is not scattered: that would need a buffer, and threads would wait for each other.
Instead every element looks for its own entry. A block has 32 groups of 8 elements and its entries are
processed 32 at a time, so each group finds its entries among 32 sorted offsets in 6 steps of a search.
"""
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# To pyright a kernel is Python, where a constant is no `constexpr` and `tl` returns nothing.

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import types
from ..reference_entries import add_up
from ..types import Entries, OuterStep
from . import tiles
from .pieces import store_weights, table_of, update_of
from .tiles import load

BLOCK = tl.constexpr(types.BLOCK)
LANES = tl.constexpr(32)
GROUP = tl.constexpr(types.BLOCK // 32)  # elements
ADDED = tl.constexpr(1)  # the row is a contribution; the lowest bit
OWN = tl.constexpr(2)  # the row says what this site has sent


@triton.jit(
    do_not_specialize=["numel", "first_tile", "rows", "factor", "divisor", "lr", "mu"],
    do_not_specialize_on_alignment=["table", "first_pieces", "payloads", "squares"],
)
def apply_kernel(
    anchor,
    momentum,  # or None
    residual,  # or None
    table,
    first_pieces,
    payloads,  # [rows, 4] int64: addresses of starts (0: whole), offsets and values; ADDED and OWN
    squares,  # [tiles] float64: Σ e², or None where there is no residual
    rows,
    factor,
    divisor,
    lr,
    mu,
    numel,
    first_tile,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    DTYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPARSE: tl.constexpr,  # some row has positions
    WHOLE: tl.constexpr,  # some row has none
    ALIGNED_WHOLE: tl.constexpr,  # and all those begin at 16-byte addresses
    NESTEROV: tl.constexpr,
):
    tile = first_tile + tl.program_id(0).to(tl.int64)
    base = tile * TILE
    block = tl.arange(0, TILE // BLOCK)
    lane = tl.arange(0, LANES)[None, :]
    inner = tl.arange(0, GROUP)[None, None, :]
    local = block[:, None, None] * BLOCK + lane[:, :, None] * GROUP + inner
    there = None if FULL else local < numel - base
    stop = base + TILE if FULL else numel
    piece = tl.load(first_pieces + tile)

    total = tl.full(local.shape, 0.0, tl.float32)
    sent = tl.full(local.shape, 0.0, tl.float32)  # by this site
    row = 0
    while row < rows:
        payload = payloads + 4 * row
        starts = tl.load(payload)
        use = tl.load(payload + 3).to(tl.int32)
        if WHOLE:
            if starts == 0:
                values = tl.load(payload + 2).to(tl.pointer_type(tl.float32)) + base
                if ALIGNED_WHOLE:
                    values = tl.multiple_of(values, 16)
                total += load(values + local, there)
        if SPARSE:
            if starts != 0:
                here = starts.to(tl.pointer_type(tl.int64)) + tile * (TILE // BLOCK)
                existing = None if FULL else block * BLOCK < numel - base
                begin = load(here + block, existing)
                size = (load(here + block + 1, existing) - begin).to(tl.int32)
                first = tl.load(here)  # positions of the tile's entries are counted from here
                offsets = tl.load(payload + 1).to(tl.pointer_type(tl.uint8)) + first
                values = tl.load(payload + 2).to(tl.pointer_type(tl.float32)) + first
                at = (begin - first).to(tl.int32)[:, None]
                most = tl.max(size)
                k = 0
                while k < most:
                    known = k + lane < size[:, None]
                    offset = tl.load(offsets + (at + k + lane), mask=known, other=0).to(tl.int32)
                    before, bits = _groups(tl.where(known, offset, BLOCK), lane)
                    packed = (((at + k + before) << GROUP) + bits)[:, :, None]
                    bit = (packed >> inner) & 1
                    place = (packed >> GROUP) + tl.cumsum(bit, 2) - bit
                    value = tl.load(values + place, mask=bit != 0, other=0.0)
                    # Where nothing is found this adds +0, which changes no sum that began with +0.
                    total += tl.where((use & ADDED) != 0, value, 0.0)
                    sent = tl.where((bit != 0) & ((use & OWN) != 0), value, sent)
                    k += LANES
        row += 1

    theta = load(anchor + base + local, there)
    if residual is not None:
        kept = load(residual + base + local, there)
        update = update_of(theta, kept, factor, table, piece, base, stop, local, DTYPES, ALIGNED)
        kept = update - sent
        tl.store(residual + base + local, kept, mask=there)
        exact = kept.to(tl.float64)
        tl.store(squares + tile, tl.sum(exact * exact))

    mean = tl.div_rn(total, divisor)  # a plain division would be an approximate one
    if momentum is not None:
        m = mu * load(momentum + base + local, there) + mean
        tl.store(momentum + base + local, m, mask=there)
        direction = mean + mu * m if NESTEROV else m
    else:
        direction = mean
    theta -= lr * direction
    tl.store(anchor + base + local, theta, mask=there)
    store_weights(theta, table, piece, base, stop, local, DTYPES, ALIGNED)


@triton.jit
def _groups(offset, lane):
    """Of 32 sorted offsets in a block: for each group how many come before it, and a bit for each in it."""
    end = tl.full(offset.shape, 0, tl.int32)  # how many come before the group's end
    limit = (lane + 1) * GROUP
    for step in tl.static_range(5):
        end = _step(offset, end, limit, 16 >> step)
    end = _step(offset, end, limit, 1)
    # The bits of all that come before the group's end; those before its beginning are the neighbour's.
    sums = tl.cumsum(tl.full(offset.shape, 1, tl.int32) << (offset % GROUP), 1)
    below = tl.where(end > 0, tl.gather(sums, tl.maximum(end - 1, 0), 1), 0)
    neighbour = tl.broadcast_to(tl.maximum(lane - 1, 0), offset.shape)
    previous = tl.where(lane > 0, tl.gather(below * 64 + end, neighbour, 1), 0)
    return previous % 64, below - previous // 64


@triton.jit
def _step(offset, end, limit, STEP: tl.constexpr):
    """A step of a binary search, in all groups at once."""
    further = end + STEP
    return tl.where(tl.gather(offset, further - 1, 1) < limit, further, end)


def apply(
    anchor: Tensor,
    momentum: Tensor | None,
    weights: Sequence[Tensor],
    residual: Tensor | None,
    own: Entries,
    contributions: Sequence[Entries],
    outer: OuterStep,
    returned: Entries | None = None,
) -> float:
    numel = anchor.numel()
    if not numel:
        return 0.0
    if residual is not None and own.starts is None:
        residual.zero_()  # everything was sent
        residual = None
    if returned is not None:
        own = add_up([own, returned._replace(values=-returned.values)], numel)
    rows = [(entries, ADDED.value) for entries in contributions]
    if residual is not None:
        mine = [i for i, entries in enumerate(contributions) if entries is own]
        if mine:
            rows[mine[0]] = (own, ADDED.value | OWN.value)
        else:
            rows.append((own, OWN.value))
    with tiles.on_device_of(anchor):
        pieces = table_of(weights)
        payloads = torch.tensor([_row(*row) for row in rows], dtype=torch.int64)
        payloads = payloads.to(anchor.device, non_blocking=True)
        whole = [entries.values for entries, _ in rows if entries.starts is None]
        squares = None
        if residual is not None:
            squares = torch.empty(tiles.count(numel), dtype=torch.float64, device=anchor.device)
        for first, count, full in tiles.runs(0, tiles.count(numel), numel):
            tiles.launch(
                apply_kernel,
                count,
                anchor,
                momentum,
                residual,
                pieces.table,
                pieces.first,
                payloads,
                squares,
                len(rows),
                outer.factor,
                float(outer.divisor),
                outer.lr,
                outer.momentum,
                numel,
                first,
                tiles.TILE,
                full,
                pieces.dtypes,
                pieces.aligned and full,
                len(whole) < len(rows),
                bool(whole),
                all(values.data_ptr() % 16 == 0 for values in whole),
                outer.nesterov,
            )
        return 0.0 if squares is None else math.sqrt(float(squares.sum()))


def _row(entries: Entries, use: int) -> tuple[int, int, int, int]:
    """The addresses of some entries, and what the kernel does with them."""
    starts = 0 if entries.starts is None else entries.starts.data_ptr()
    offsets = 0 if entries.offsets is None else entries.offsets.data_ptr()
    return starts, offsets, entries.values.data_ptr(), use
