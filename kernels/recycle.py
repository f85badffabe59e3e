"""Host memory that one round leaves mapped for the next: a fresh page takes longer to map than to fill."""

import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

from .reserve import reserve

_LEAST = 1 << 17  # bytes: malloc keeps what is smaller
_KEPT = 2  # uses of the recycler, after which what none of them took is given back

_current: ContextVar["Recycler | None"] = ContextVar("loco recycler", default=None)


class Recycler:
    """Memory for tensors that live for a round. What was given back is taken again; what has not been taken
    for some rounds goes back to the system, and so does all of it with the recycler."""

    def __init__(self) -> None:
        self._uses = 0
        # By capacity and kind, with the use that left it. Tensors of which little is written are a kind of
        # their own: if their memory were taken for others, too, one by one all of it would come to be used.
        self._free: dict[tuple[int, bool], list[tuple[int, mmap.mmap]]] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """What `recycled` makes meanwhile is taken from here."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self._uses += 1
            for kind, free in list(self._free.items()):
                self._free[kind] = [one for one in free if one[0] > self._uses - _KEPT]

    def take(self, size: int, *, at_most: bool) -> np.ndarray:
        """Some bytes, until nobody holds the result."""
        capacity = 1 << (size - 1).bit_length()  # pages that are never written take no memory
        kind = capacity, at_most
        try:
            _, memory = self._free[kind].pop()
        except (KeyError, IndexError):
            memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        lease = np.frombuffer(memory, dtype=np.uint8, count=size)
        weakref.finalize(lease, self._give_back, kind, memory).atexit = False
        return lease

    def _give_back(self, kind: tuple[int, bool], memory: mmap.mmap) -> None:
        self._free.setdefault(kind, []).append((self._uses, memory))


def recycled(
    numel: int, dtype: torch.dtype, device: torch.device | str = "cpu", *, at_most: bool = False
) -> Tensor:
    """As torch.empty; large tensors in host memory are from the recycler that is in use, if there is one, and
    fresh ones use physical memory only for the pages that are written.

    Args:
        at_most: far less than `numel` elements may be written.
    """
    recycler, size = _current.get(), numel * dtype.itemsize
    if size < _LEAST or torch.device(device).type != "cpu":
        return torch.empty(numel, dtype=dtype, device=device)
    if recycler is None:
        return reserve(numel, dtype)
    return torch.from_numpy(recycler.take(size, at_most=at_most)).view(dtype)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """1-D tensors, one after the other."""
    numel = sum(part.numel() for part in parts)
    return torch.cat(list(parts), out=recycled(numel, parts[0].dtype, parts[0].device))
