"""What an update is about to overwrite, kept so that it can be put back whatever happens, and when."""

from typing import NamedTuple

import torch
from torch import Tensor

from loco.kernels import Changes

from .places import Places


class _Saved(NamedTuple):
    places: Places
    format: torch.dtype
    positions: Tensor
    bits: Tensor  # as they were
    digests: list[int]


class Journal:
    """Written before the weights are: an exception may come between any two lines (Ctrl-C), and then nobody
    knows how much has been overwritten. Putting back what was there takes no knowing.
    """

    def __init__(self) -> None:
        self._saved: list[_Saved] = []

    def swap(self, places: Places, format: torch.dtype, changes: Changes) -> None:
        """As `Places.swap`."""
        bits = places.take(format, changes.positions)
        self._saved.append(_Saved(places, format, changes.positions, bits, places.digests[format]))
        places.swap(format, changes)

    def restore(self) -> KeyboardInterrupt | None:
        """Put everything back. A Ctrl-C that comes meanwhile must wait, since half of it would be no version.

        -> the Ctrl-C, to be raised by the caller
        """
        interrupt = None
        while True:
            try:
                for one in reversed(self._saved):
                    one.places.swap(one.format, Changes(one.positions, one.bits.clone()))
                    one.places.digests[one.format] = one.digests
                return interrupt
            except KeyboardInterrupt as error:
                interrupt = error
