"""Host memory: for results whose size is not known in advance, and back to the system."""

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor


def reserve(numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor of this many elements that uses physical memory only for the pages that are written."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    fresh = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(fresh, dtype=dtype)


def give_back() -> None:
    """What was freed, to the system. glibc keeps some of it, in case that as much is asked for again."""
    with suppress(AttributeError):  # of another C library
        ctypes.CDLL(None).malloc_trim(0)
