"""The weights by class, as `reference_patch` sorts them: by exponent, from the lowest field of their part on.

A tile counts its elements by class, and running sums over the tiles of a part tell how many of a class come
before a tile. Inside a tile a scan tells the rest. No element's class or rank is ever stored: the kernels
compute them again.
"""
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# To pyright a kernel is Python, where a constant is no `constexpr` and `tl` returns nothing.

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference_patch
from ..reference_ranked import PART
from . import tiles
from .changes import Vector
from .pieces import BITS, bits_of

SAMPLES = 1024  # that are counted at once
FIELDS = tl.constexpr(256)
CLASSES = tl.constexpr(reference_patch.CLASSES)
SAMPLED = tl.constexpr(reference_patch.SAMPLED)
RARE = tl.constexpr(reference_patch.RARE)


@triton.jit
def _field(bits, WIDTH: tl.constexpr, MANTISSA: tl.constexpr):
    return ((bits >> MANTISSA) & ((1 << (8 * WIDTH - 1 - MANTISSA)) - 1)).to(tl.int32)


@triton.jit
def class_of(bits, low, WIDTH: tl.constexpr, MANTISSA: tl.constexpr):
    return tl.minimum(tl.maximum(_field(bits, WIDTH, MANTISSA) - low, 0), CLASSES - 1)


@triton.jit
def ordered(bits, WIDTH: tl.constexpr):
    """The place in the order of all values of the format: see `reference_patch.ordered`. -> int64"""
    wide = bits.to(tl.int64)
    sign = wide >> (8 * WIDTH - 1)
    magnitude = wide - (sign << (8 * WIDTH - 1))
    return tl.where(sign == 0, magnitude, -1 - magnitude)


@triton.jit
def from_ordered(place, WIDTH: tl.constexpr):
    """The bits at a place in the order, and whether they are outside of the format."""
    negative = place < 0
    magnitude = tl.where(negative, -1 - place, place)
    bits = magnitude + (negative.to(tl.int64) << (8 * WIDTH - 1))
    return bits, (magnitude >> (8 * WIDTH - 1)) != 0


@triton.jit
def _one(of_class, there, WORD: tl.constexpr):
    """A one in the 16 bits of an element's class, if this word of four classes has them. Sums of it count."""
    one = tl.full(of_class.shape, 1, tl.int64) << (of_class % 4 * 16)
    return tl.where(there & (of_class // 4 == WORD), one, 0)


@triton.jit
def ranks_in_tile(of_class, there):
    """How many elements of the same class come before each in the tile."""
    rank = tl.full(of_class.shape, 0, tl.int32)
    for word in tl.static_range(CLASSES // 4):
        counts = tl.cumsum(_one(of_class, there, word), 0)
        mine = ((counts >> (of_class % 4 * 16)) & 0xFFFF).to(tl.int32) - 1
        rank = tl.where(of_class // 4 == word, mine, rank)
    return rank


@triton.jit(do_not_specialize=["numel", "parts"], do_not_specialize_on_alignment=["table", "first_pieces"])
def lowest_kernel(
    table,
    first_pieces,
    lowest,  # [parts] uint8
    numel,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    SAMPLES: tl.constexpr,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    """The field of class 0, of each part: class 15 has the highest that at most a few weights exceed."""
    part = tl.program_id(0).to(tl.int64)
    first = part * PART
    last = tl.minimum(first + PART, numel)
    local = tl.arange(0, SAMPLES) * SAMPLED
    counts = tl.full((FIELDS,), 0, tl.int32)
    base = first
    while base < last:
        stop = tl.minimum(base + SAMPLES * SAMPLED, last)
        piece = tl.load(first_pieces + base // TILE)
        # Past the last element there are zeros. They are of field 0, of which the number does not matter.
        bits = bits_of(table, piece, base, stop, local, BITS, False, WIDTH, MANTISSA)
        counts += tl.histogram(_field(bits, WIDTH, MANTISSA), FIELDS)
        base += SAMPLES * SAMPLED
    at_least = tl.sum(counts) - tl.cumsum(counts, 0) + counts
    sampled = ((last - first + SAMPLED - 1) // SAMPLED).to(tl.int32)
    field = tl.arange(0, FIELDS)
    top = tl.max(tl.where(at_least > sampled // RARE, field, 0))
    tl.store(lowest + part, tl.maximum(top - (CLASSES - 1), 0).to(tl.uint8))


@triton.jit(
    do_not_specialize=["numel", "first_tile"],
    do_not_specialize_on_alignment=["table", "first_pieces", "lowest", "counts"],
)
def count_kernel(
    table,
    first_pieces,
    lowest,
    counts,  # [parts, tiles of a part + 1, CLASSES] int32; the first row of a part stays zero
    TILES: tl.constexpr,  # of a part
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
    bits = bits_of(table, tl.load(first_pieces + tile), base, stop, local, BITS, ALIGNED, WIDTH, MANTISSA)
    of_class = class_of(bits, tl.load(lowest + part).to(tl.int32), WIDTH, MANTISSA)
    here = counts + (tile + part + 1) * CLASSES
    lane = tl.arange(0, 4)
    for word in tl.static_range(CLASSES // 4):
        total = tl.sum(_one(of_class, base + local < stop, word))
        tl.store(here + 4 * word + lane, ((total >> (16 * lane)) & 0xFFFF).to(tl.int32))


class Classes:
    """The weights of a vector by class.

    `before` tells for each tile, and for a part's end, how many of each class come before it in the part.
    """

    def __init__(self, vector: Vector, lowest: Tensor | None = None) -> None:
        tile = tiles.TILE
        self.vector, self.parts = vector, -(-vector.numel // PART)
        if lowest is None:
            lowest = torch.empty(self.parts, dtype=torch.uint8, device=vector.device)
            where = (vector.pieces.table, vector.pieces.first, lowest, vector.numel)
            tiles.launch(lowest_kernel, self.parts, *where, PART, tile, SAMPLES, *vector.format)
        self.lowest = lowest
        of_part = PART // tile
        shape = (self.parts, of_part + 1, CLASSES.value)
        self.before = torch.zeros(shape, dtype=torch.int32, device=vector.device)
        vector.launch(count_kernel, lowest, self.before, of_part)
        self.before.cumsum_(1)
