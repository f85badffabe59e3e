"""Host memory for results whose size is known only once they are there."""

import mmap

import torch
from torch import Tensor


def reserve(numel: int, dtype: torch.dtype) -> Tensor:
    """Room for this many elements, which takes memory only where it is written, page by page."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    fresh = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(fresh, dtype=dtype)
