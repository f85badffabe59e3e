"""Host memory for results whose size is not known in advance."""

import mmap

import torch
from torch import Tensor


def reserve(numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor of this many elements that uses physical memory only for the pages that are written."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    fresh = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(fresh, dtype=dtype)
