"""The weights: many tensors at any addresses, treated as one flat vector that is divided into tiles.

A kernel gets one table of all pieces instead of one launch per piece: each program looks up the pieces that
overlap its tile and processes them in turn.
"""
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# To pyright a kernel is Python, where a constant is no `constexpr` and `tl` returns nothing.

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .rounding import bits_of_bf16, bits_of_fp16, float_of_bf16, through_bf16

FP32 = tl.constexpr(1)
BF16 = tl.constexpr(2)
FP16 = tl.constexpr(4)
BITS = tl.constexpr(8)  # integers of a size that the kernel knows
_CODES = {torch.float32: FP32.value, torch.bfloat16: BF16.value, torch.float16: FP16.value}
_CODES |= dict.fromkeys((torch.uint8, torch.int16, torch.int32), BITS.value)
_STEP = 8  # elements, at least: 16 bytes of a 16-bit dtype


class Pieces(NamedTuple):
    """The positions of the weights, for the kernels."""

    table: Tensor  # [pieces + 1, 3] int64: first element, address, dtype; at the end the number of elements
    first: Tensor  # [tiles] int32: the piece in which a tile begins
    dtypes: int  # the dtypes that occur, one bit each
    aligned: bool  # in full tiles, every part of a piece is a number of 16-byte words at 16-byte addresses
    group: int  # elements that a thread reads at once: 16 bytes of the narrowest dtype, if aligned


def table_of(weights: Sequence[Tensor]) -> Pieces:
    pieces = [w for w in weights if w.numel()]  # no element belongs to an empty piece
    starts = list(accumulate((w.numel() for w in pieces), initial=0))
    total = starts.pop()
    codes = [_CODES[w.dtype] for w in pieces]
    addresses = [w.data_ptr() for w in pieces]
    rows = [*zip(starts, addresses, codes, strict=True), (total, 0, 0)]
    table = torch.tensor(rows, dtype=torch.int64).to(weights[0].device, non_blocking=True)
    edges = torch.arange(0, total, tiles.TILE, device=table.device)
    begins = table[:-1, 0].contiguous()
    first = torch.searchsorted(begins, edges, right=True, out_int32=True) - 1
    widest = 16 // min(w.element_size() for w in pieces)
    step = max(_STEP, widest)
    aligned = all(start % step == 0 and address % 16 == 0 for start, address, _ in rows[:-1])
    group = widest if aligned else 4
    return Pieces(table, first, sum(set(codes)), aligned, group)


@triton.jit
def update_of(
    anchor, kept, factor, table, piece, base, stop, local, DTYPES: tl.constexpr, ALIGNED: tl.constexpr
):
    """Steps 2 and 3: s = c·(float(cast(θ)) − float(w)) + e, at the elements base + local before stop.

    `anchor` holds θ there, `kept` e and `factor` c, and `piece` is the one in which the tile begins.
    """
    update = tl.full(local.shape, 0.0, tl.float32)
    at = base
    while at < stop:
        row = table + 3 * piece
        shift, inside = _part(row, base, stop, local, ALIGNED)
        code = _code(row, DTYPES)
        if FP32 & DTYPES:
            if code == FP32:
                w = tl.load(_pointer(row, shift, tl.float32, ALIGNED) + local, mask=inside, other=0.0)
                update = tl.where(inside, (anchor - w) * factor + kept, update)
        if BF16 & DTYPES:
            if code == BF16:
                bits = tl.load(_pointer(row, shift, tl.int16, ALIGNED) + local, mask=inside, other=0)
                moved = through_bf16(anchor) - float_of_bf16(bits)
                update = tl.where(inside, moved * factor + kept, update)
        if FP16 & DTYPES:
            if code == FP16:
                w = tl.load(_pointer(row, shift, tl.float16, ALIGNED) + local, mask=inside, other=0.0)
                cast = anchor.to(tl.float16).to(tl.float32)
                update = tl.where(inside, (cast - w.to(tl.float32)) * factor + kept, update)
        at = tl.load(row + 3)  # where the next piece begins
        piece += 1
    return update


@triton.jit
def store_weights(anchor, table, piece, base, stop, local, DTYPES: tl.constexpr, ALIGNED: tl.constexpr):
    """Step 8: w = cast(θ), at the same elements."""
    at = base
    while at < stop:
        row = table + 3 * piece
        shift, inside = _part(row, base, stop, local, ALIGNED)
        code = _code(row, DTYPES)
        if FP32 & DTYPES:
            if code == FP32:
                tl.store(_pointer(row, shift, tl.float32, ALIGNED) + local, anchor, mask=inside)
        if BF16 & DTYPES:
            if code == BF16:
                tl.store(_pointer(row, shift, tl.int16, ALIGNED) + local, bits_of_bf16(anchor), mask=inside)
        if FP16 & DTYPES:
            if code == FP16:
                tl.store(_pointer(row, shift, tl.int16, ALIGNED) + local, bits_of_fp16(anchor), mask=inside)
        at = tl.load(row + 3)
        piece += 1


@triton.jit
def bits_of(
    table,
    piece,
    base,
    stop,
    local,
    DTYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    """The bits of the same elements, and of those of FP32 pieces cast to a format. -> uint32

    WIDTH is the format's bytes, and MANTISSA its explicit bits of the mantissa.
    """
    bits = tl.full(local.shape, 0, tl.uint32)
    at = base
    while at < stop:
        row = table + 3 * piece
        shift, inside = _part(row, base, stop, local, ALIGNED)
        code = _code(row, DTYPES)
        if BITS & DTYPES:
            if code == BITS:
                if WIDTH == 1:
                    pointer = _pointer(row, shift, tl.uint8, ALIGNED)
                elif WIDTH == 2:
                    pointer = _pointer(row, shift, tl.uint16, ALIGNED)
                else:
                    pointer = _pointer(row, shift, tl.uint32, ALIGNED)
                held = tl.load(pointer + local, mask=inside, other=0)
                bits = tl.where(inside, held.to(tl.uint32), bits)
        if FP32 & DTYPES:
            if code == FP32:
                w = tl.load(_pointer(row, shift, tl.float32, ALIGNED) + local, mask=inside, other=0.0)
                cast = bits_of_bf16(w) if MANTISSA == 7 else bits_of_fp16(w)
                bits = tl.where(inside, cast.to(tl.uint16, bitcast=True).to(tl.uint32), bits)
        at = tl.load(row + 3)
        piece += 1
    return bits


@triton.jit
def _part(row, base, stop, local, ALIGNED: tl.constexpr):
    """How far into the piece the tile begins (less than 0: before it), and which elements are the piece's."""
    begin = tl.load(row)
    shift = base - begin
    low = tl.maximum(-shift, 0).to(tl.int32)  # inside the tile, so 32 bits do
    high = (tl.minimum(tl.load(row + 3), stop) - base).to(tl.int32)
    if ALIGNED:
        shift = tl.multiple_of(shift, 8)
        low = tl.multiple_of(low, 8)
        high = tl.multiple_of(high, 8)
    return shift, (local >= low) & (local < high)


@triton.jit
def _code(row, DTYPES: tl.constexpr):
    """The piece's dtype; known before the launch if there is only one."""
    if DTYPES == FP32 or DTYPES == BF16 or DTYPES == FP16 or DTYPES == BITS:
        return DTYPES
    else:
        return tl.load(row + 2)


@triton.jit
def _pointer(row, shift, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the tile's first element would be if the piece reached there."""
    pointer = tl.load(row + 1).to(tl.pointer_type(dtype)) + shift
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer
