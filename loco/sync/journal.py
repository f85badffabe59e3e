"""The undo log of an update: the bits that it overwrites, saved before it writes."""

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
    """Each entry is made before the weights are written: an exception such as Ctrl-C may come between any two
    lines, and then nobody knows how much was overwritten. Putting all of it back needs no such knowledge.

    To read the old bits in advance takes longer than to write the new ones. Where one C call swaps the two,
    no exception comes in between, and the bits that it has swapped are those that differ from the new ones.
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
        """Everything is written: keep the old bits, and drop the new ones."""
        self._saved = [one._replace(fresh=None) for one in self._saved]

    def restore(self) -> KeyboardInterrupt | None:
        """Put everything back. A Ctrl-C that comes meanwhile waits, since half of it would be no version.

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
