"""w = cast(θ), for all pieces at once."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .pieces import store_weights, table_of
from .tiles import load


@triton.jit(do_not_specialize=["numel", "first_tile"])
def weights_kernel(
    anchor,
    table,
    first_pieces,
    numel,
    first_tile,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    DTYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    tile = first_tile + tl.program_id(0).to(tl.int64)
    base = tile * TILE
    local = tl.arange(0, TILE)
    stop = base + TILE if FULL else numel
    theta = load(anchor + base + local, None if FULL else local < numel - base)
    store_weights(theta, table, tl.load(first_pieces + tile), base, stop, local, DTYPES, ALIGNED)


def write_weights(anchor: Tensor, weights: Sequence[Tensor]) -> None:
    numel = anchor.numel()
    if not numel:
        return
    with tiles.on_device_of(anchor):
        pieces = table_of(weights)
        for first, count, full in tiles.runs(0, tiles.count(numel), numel):
            tiles.launch(
                weights_kernel,
                count,
                anchor,
                pieces.table,
                pieces.first,
                numel,
                first,
                tiles.TILE,
                full,
                pieces.dtypes,
                pieces.aligned and full,
            )
