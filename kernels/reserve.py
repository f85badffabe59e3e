"""Host memory: what lives long, results whose size is not known in advance, and back to the system."""

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_PAGE = 1 << 21  # bytes of a large one


def reserve(numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor of this many elements that uses physical memory only for the pages that are written."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    fresh = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(fresh, dtype=dtype)


def lasting_zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor of this many zeros that every round passes over: in large pages where the system has them, or
    finding the addresses of a long vector takes a third of such a pass."""
    size = numel * dtype.itemsize
    if size < 2 * _PAGE:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    # One page more than is used: vectors at a distance of exactly 2^k bytes drive each other out of caches.
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # of another system, or of a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=numel)


def give_back() -> None:
    """What was freed, to the system. glibc keeps some of it, in case that as much is asked for again."""
    with suppress(AttributeError):  # of another C library
        ctypes.CDLL(None).malloc_trim(0)
