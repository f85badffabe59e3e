"""What an update is about to overwrite, kept so that it can be put back whatever happens, and when."""

from typing import NamedTuple

import torch
from torch import Tensor

from loco.kernels import Changes

from .weights.publisher_memory import PublisherMemory


class _Saved(NamedTuple):
    memory: PublisherMemory
    format: torch.dtype
    positions: Tensor
    bits: Tensor  # as they were; while they are swapped, those that are not yet are `fresh`
    fresh: Tensor | None  # what is written; None: all of it may have been
    digests: list[int]


class Journal:
    """Written before the weights are: an exception may come between any two lines (Ctrl-C), and then nobody
    knows how much has been overwritten. Putting back what was there takes no knowing.

    What was there is read in advance, which takes longer than to write. Where one call of C reads and writes,
    and no exception comes in between, the bits that it has swapped are those that differ from the fresh ones.
    """

    def __init__(self) -> None:
        self._saved: list[_Saved] = []

    def swap_bits(self, memory: PublisherMemory, format: torch.dtype, changes: Changes) -> None:
        """As `PublisherMemory.swap_bits`. `changes` belong to the journal from then on."""
        positions, digests = changes.positions, memory.digests[format]
        if memory.swaps_in_one_call(format):
            saved = _Saved(memory, format, positions, changes.bits, changes.bits.clone(), digests)
        else:
            saved = _Saved(memory, format, positions, memory.take(format, positions), None, digests)
        self._saved.append(saved)
        memory.swap_bits(format, changes)

    def complete(self) -> None:
        """All is written: what it was is kept, and what it is need not be."""
        self._saved = [one._replace(fresh=None) for one in self._saved]

    def restore(self) -> KeyboardInterrupt | None:
        """Put everything back. A Ctrl-C that comes meanwhile must wait, since half of it would be no version.

        -> the Ctrl-C, to be raised by the caller
        """
        interrupt = None
        while True:
            try:
                for one in reversed(self._saved):
                    one.memory.swap_bits(one.format, _overwritten(one))
                    one.memory.digests[one.format] = one.digests
                return interrupt
            except KeyboardInterrupt as error:
                interrupt = error


def _overwritten(one: _Saved) -> Changes:
    """A copy, since it will be swapped, perhaps twice."""
    if one.fresh is None:
        return Changes(one.positions, one.bits.clone())
    swapped = one.bits != one.fresh
    return Changes(one.positions[swapped], one.bits[swapped])
