"""The flat vector is divided into tiles, one program each; every kernel is launched from here."""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements: a power of two, at least a block
WARPS = 4


def launch(kernel: Any, programs: int, *args: Any) -> None:
    """Launch a kernel without fusion, in which a product and a sum would be rounded once instead of twice."""
    kernel[(programs,)](*args, num_warps=WARPS, enable_fp_fusion=False)


def count(numel: int) -> int:
    return -(-numel // TILE)


def runs(first: int, last: int, numel: int) -> Iterator[tuple[int, int, bool]]:
    """Divide the tiles first … last into launches: (first tile, how many, whether all their elements exist).

    Only the last tile of the vector may be incomplete. It gets a launch of its own, so that the others need
    no mask and access 16 bytes at a time, whatever the vector's length.
    """
    full = min(last, numel // TILE)
    if first < full:
        yield first, full - first, True
    if full < last:
        yield full, 1, False


def on_device_of(tensor: Tensor) -> torch.cuda.device_of:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device_of(tensor)


@triton.jit
def load(pointers, there):
    """What is there, and 0 elsewhere. Without a mask, `there` is None."""
    return tl.load(pointers) if there is None else tl.load(pointers, mask=there, other=0)
