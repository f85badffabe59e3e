"""Steps 2 to 5: one pass over θ, w and e finds the entries to send, the digest of θ and a position that is
not finite.

The position of an entry in the output depends on how many entries come before it. So the pass is divided into
chunks. In a chunk `encode_kernel` writes the entries of each tile to the beginning of the tile's slot in a
staging buffer, and counts the entries of each block; a running sum turns the counts into positions;
`place_kernel` copies the slots there. Nothing waits for the host in between. Therefore the output must be
allocated beforehand: its size is estimated from a few tiles, spread over the whole vector. If the estimate
was too small, the pass runs again with the number of entries, which is known by then.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import types
from ..types import Encoded, Entries, Gate
from . import tiles
from .digesting import digest_terms, unsigned
from .gates import NAMES, beyond_margin, in_steps, visible
from .pieces import Pieces, table_of, update_of
from .tiles import load

CHUNKS = 16  # 5 bytes of staging for each element of a chunk: 0.31 bytes per parameter
SAMPLED = 1024  # tiles that are counted to estimate the number of entries, at least
STRIDE = 61  # tiles from one sample to the next, at most; a prime, to be out of step with matrix rows
SLOTS = 8  # tiles that one program of `place_kernel` copies
WIDTH = 128  # entries of each tile that it copies at once

BLOCK = tl.constexpr(types.BLOCK)


@triton.jit(
    do_not_specialize=["factor", "gain", "margin", "fraction", "numel", "first_tile", "begin", "stride"],
    do_not_specialize_on_alignment=["table", "first_pieces", "counts", "digests", "bad"],
)
def encode_kernel(
    anchor,
    residual,  # or None
    table,
    first_pieces,
    counts,  # [slots · blocks of a tile] int64, or None: keep every s
    offsets,  # [slots · TILE] uint8, or None: keep none
    values,  # [slots · TILE] float32 (all: [numel]), or None
    digests,  # [tiles] int64, or None
    bad,  # [tiles] int64, or None: the first position in the tile whose s is not finite, or numel
    factor,
    gain,
    margin,  # of the BF16 ulp, or None
    fraction,  # of 2^7 BF16 ulps: the step of values; or None
    numel,
    first_tile,
    begin,  # the tile with the first slot
    stride,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    DTYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    GATE: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile = first_tile + tl.program_id(0).to(tl.int64) * stride
    slot = first_tile - begin + tl.program_id(0).to(tl.int64)
    base = tile * TILE
    # A row is what one thread holds: to count and to place its entries it needs no other thread.
    row, column = tl.arange(0, TILE // GROUP)[:, None] * GROUP, tl.arange(0, GROUP)[None, :]
    local = row + column
    there = None if FULL else local < numel - base
    stop = base + TILE if FULL else numel

    theta = load(anchor + base + local, there)
    if residual is not None:
        kept = load(residual + base + local, there)
    else:
        kept = 0.0  # adding it makes −0 into +0
    piece = tl.load(first_pieces + tile)
    update = update_of(theta, kept, factor, table, piece, base, stop, local, DTYPES, ALIGNED)

    if digests is not None:
        terms = digest_terms(theta, base, row, column)
        if not FULL:
            terms = tl.where(there, terms, 0)
        tl.store(digests + tile, tl.sum(terms))
        nonfinite = tl.where(tl.abs(update) < float("inf"), TILE, local)
        worst = tl.min(nonfinite)
        tl.store(bad + tile, tl.where(worst < TILE, base + worst, numel))

    if counts is None:
        tl.store(values + base + local, update, mask=there)
    else:
        sent = visible(theta, update, gain, GATE)
        if margin is not None:
            sent &= beyond_margin(theta, update, margin)
        if fraction is not None:
            update = in_steps(theta, update, fraction)
            sent &= update != 0.0
        if not FULL:
            sent &= there
        within = tl.cumsum(sent.to(tl.int32), 1)
        of_row = tl.sum(sent.to(tl.int32), 1)
        of_block = tl.sum(tl.reshape(of_row, (TILE // BLOCK, BLOCK // GROUP)), 1)
        block = tl.arange(0, TILE // BLOCK)
        existing = None if FULL else block * BLOCK < numel - base
        tl.store(counts + slot * (TILE // BLOCK) + block, of_block.to(tl.int64), mask=existing)
        if values is not None:
            before = tl.cumsum(of_row, 0) - of_row
            place = before[:, None] + within - 1
            tl.store(offsets + slot * TILE + place, (local % BLOCK).to(tl.uint8), mask=sent)
            tl.store(values + slot * TILE + place, update, mask=sent)


@triton.jit(do_not_specialize=["first_tile", "blocks", "capacity"])
def place_kernel(
    starts,
    staged_offsets,
    staged_values,
    offsets,
    values,
    first_tile,
    blocks,
    capacity,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copy the entries of some tiles from their slots to where they belong."""
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    block = tl.minimum((first_tile + slot) * (TILE // BLOCK), blocks)
    begin = tl.load(starts + block)
    end = tl.minimum(tl.load(starts + tl.minimum(block + TILE // BLOCK, blocks)), capacity)
    size = (end - begin).to(tl.int32)
    lane = tl.arange(0, WIDTH)[None, :]
    most = tl.max(size)
    k = 0
    while k < most:
        mask = k + lane < size[:, None]
        source = (slot * TILE)[:, None] + (k + lane)
        target = begin[:, None] + (k + lane)
        tl.store(offsets + target, tl.load(staged_offsets + source, mask=mask), mask=mask)
        tl.store(values + target, tl.load(staged_values + source, mask=mask), mask=mask)
        k += WIDTH


class _Pass(NamedTuple):
    """What an encode reads, and what it finds in each tile."""

    anchor: Tensor
    residual: Tensor | None
    pieces: Pieces
    gate: Gate | None
    factor: float
    digests: Tensor  # [tiles] int64
    bad: Tensor  # [tiles] int64

    @property
    def numel(self) -> int:
        return self.anchor.numel()

    def whole(self) -> Entries:
        values = torch.empty_like(self.anchor)
        self._launch(0, tiles.count(self.numel), values=values, findings=True)
        return Entries.whole(values)

    def sparse(self) -> Entries:
        count = tiles.count(self.numel)
        blocks = -(-self.numel // types.BLOCK)
        per_tile = tiles.TILE // types.BLOCK
        chunk = -(-count // CHUNKS)
        device = self.anchor.device
        capacity = self._expected()
        starts = torch.zeros(blocks + 1, dtype=torch.int64, device=device)
        staged_offsets = torch.empty(chunk * tiles.TILE, dtype=torch.uint8, device=device)
        staged_values = torch.empty(chunk * tiles.TILE, dtype=torch.float32, device=device)
        while True:
            offsets = torch.empty(capacity, dtype=torch.uint8, device=device)
            values = torch.empty(capacity, dtype=torch.float32, device=device)
            for first in range(0, count, chunk):
                last = min(first + chunk, count)
                here = starts[first * per_tile : min(last * per_tile, blocks) + 1]
                self._launch(first, last, here[1:], staged_offsets, staged_values, findings=True)
                here.cumsum_(0)  # its first element is the sum of all before it; the blocks' counts follow
                tiles.launch(
                    place_kernel,
                    -(-(last - first) // SLOTS),
                    starts,
                    staged_offsets,
                    staged_values,
                    offsets,
                    values,
                    first,
                    blocks,
                    capacity,
                    tiles.TILE,
                    SLOTS,
                    WIDTH,
                )
            total = int(starts[-1])
            if total <= capacity:
                return Entries(starts, offsets[:total], values[:total])
            capacity = total

    def _expected(self) -> int:
        """An estimate of the number of entries, which is hardly ever too small."""
        full = self.numel // tiles.TILE
        stride = max(1, min(STRIDE, full // SAMPLED))
        sampled = full // stride if stride > 1 else tiles.count(self.numel)
        per_tile = tiles.TILE // types.BLOCK
        counts = torch.zeros(sampled, per_tile, dtype=torch.int64, device=self.anchor.device)
        self._launch(0, sampled, counts.view(-1), stride=stride)
        if stride == 1:
            return int(counts.sum())
        of_tile = counts.sum(1).double()
        mean, deviation = torch.stack([of_tile.mean(), of_tile.std()]).tolist()
        likely = mean + 5 * deviation / math.sqrt(sampled)
        return min(self.numel, math.ceil(likely * tiles.count(self.numel)) + types.BLOCK)

    def _launch(
        self,
        begin: int,
        end: int,
        counts: Tensor | None = None,
        offsets: Tensor | None = None,
        values: Tensor | None = None,
        *,
        stride: int = 1,
        findings: bool = False,
    ) -> None:
        """Run `encode_kernel` on the tiles begin … end, or on as many tiles at distances of `stride`."""
        gate = self.gate or Gate()
        for first, count, full in tiles.runs(begin, end, self.numel):
            tiles.launch(
                encode_kernel,
                count,
                self.anchor,
                self.residual,
                self.pieces.table,
                self.pieces.first,
                counts,
                offsets,
                values,
                self.digests if findings else None,
                self.bad if findings else None,
                self.factor,
                gate.gain,
                gate.margin or None,
                2.0**-7 / gate.value_steps if gate.value_steps else None,
                self.numel,
                first,
                begin,
                stride,
                tiles.TILE,
                full,
                self.pieces.dtypes,
                self.pieces.aligned and full,
                NAMES[self.gate.dtype] if self.gate else None,
                self.pieces.group,
            )


def encode(
    anchor: Tensor,
    weights: Sequence[Tensor],
    residual: Tensor | None,
    gate: Gate | None,
    factor: float = 1.0,
) -> Encoded:
    numel = anchor.numel()
    if not numel:
        nothing = torch.empty_like(anchor)
        entries = Entries.at(nothing.long(), nothing, 0) if gate else Entries.whole(nothing)
        return Encoded(entries, 0, -1)
    with tiles.on_device_of(anchor):
        found = torch.empty(2, tiles.count(numel), dtype=torch.int64, device=anchor.device)
        the_pass = _Pass(anchor, residual, table_of(weights), gate, factor, *found.unbind())
        entries = the_pass.sparse() if gate else the_pass.whole()
        total, first_bad = torch.stack([found[0].sum(), found[1].min()]).tolist()
    return Encoded(entries, unsigned(total), first_bad if first_bad < numel else -1)
