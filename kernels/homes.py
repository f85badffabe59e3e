"""The implementation of the ops on the outer state for each kind of device, which is called its home."""

import os
import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor

from . import reference
from .types import Encoded, Entries, Gate, OuterStep

if TYPE_CHECKING:
    from .cpu import Compiled


class Home(Protocol):
    """The ops of a home, which `reference` specifies."""

    def encode(
        self,
        anchor: Tensor,
        weights: Sequence[Tensor],
        residual: Tensor | None,
        gate: Gate | None,
        factor: float = 1.0,
    ) -> Encoded: ...

    def apply(
        self,
        anchor: Tensor,
        momentum: Tensor | None,
        weights: Sequence[Tensor],
        residual: Tensor | None,
        own: Entries,
        contributions: Sequence[Entries],
        outer: OuterStep,
        returned: Entries | None = None,
    ) -> float: ...

    def write_weights(self, anchor: Tensor, weights: Sequence[Tensor]) -> None: ...

    def digest(self, data: Tensor) -> int: ...


@cache
def home(device: str) -> Home:
    """The home for a type of device. If only the reference can be used, one rank of the machine warns why."""
    if device == "cpu":
        from . import cpu

        try:
            return cpu.best()
        except cpu.BuildError as error:
            why = f"{error}. Install gcc or clang, or name one in the environment variable CC"
    elif device == "cuda":
        try:
            from . import triton
        except ImportError as error:
            why = str(error)
        else:
            return triton
    else:
        why = f"there are no kernels for {device}"
    # What is missing is missing for all ranks of a machine. torchrun numbers them.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warnings.warn(
            f"loco: rounds use plain torch, with equal results but some 20 times slower: {why}",
            RuntimeWarning,
            stacklevel=2,
        )
    return reference


def compiled() -> "Compiled | None":
    """The C home, if there is a compiler."""
    found = home("cpu")
    return None if found is reference else cast("Compiled", found)
