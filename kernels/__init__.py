"""What touches every element of the outer state: four ops, each with one home per kind of device; and what
touches every entry of an exchange.

`reference` is the specification, `cpu` the same in C for tensors in host memory, `triton` for GPUs, and
`streamed` brings parameters on a GPU to outer state in host memory. The tight code is worked in host memory
only (`reference_tight`, `cpu`); entries are added up and checked where they are (`reference_entries`, `cpu`).
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Protocol

from torch import Tensor

from . import reference, reference_entries, reference_tight
from .streamed import Streamed
from .types import BLOCK, Encoded, Entries, Gate, Known, MalformedError, OuterStep

__all__ = [
    "BLOCK",
    "Encoded",
    "Entries",
    "Gate",
    "Known",
    "MalformedError",
    "OuterStep",
    "add_up",
    "apply",
    "check_blocks",
    "digest",
    "encode",
    "pack",
    "packs_fast",
    "unpack",
    "write_weights",
]


class Home(Protocol):
    """What a home offers; `reference` says what the ops mean."""

    def encode(
        self, anchor: Tensor, weights: Sequence[Tensor], residual: Tensor | None, gate: Gate | None
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
    ) -> float: ...

    def write_weights(self, anchor: Tensor, weights: Sequence[Tensor]) -> None: ...

    def digest(self, data: Tensor) -> int: ...


@cache
def home(device: str) -> Home:
    """The home for a type of device. Where only the reference can serve, a warning says why, once."""
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
            why = f"{error}. Install triton"
        else:
            return triton
    else:
        why = f"there are no kernels for {device}"
    warnings.warn(
        f"loco: rounds use plain torch, with equal results but some 20 times slower: {why}",
        RuntimeWarning,
        stacklevel=2,
    )
    return reference


@cache
def _streamed() -> Home:
    return Streamed(home("cpu"))


def _home_of(anchor: Tensor, weights: Sequence[Tensor]) -> Home:
    on_one_device = all(w.device == anchor.device for w in weights)
    return home(anchor.device.type) if on_one_device else _streamed()


def encode(anchor: Tensor, weights: Sequence[Tensor], residual: Tensor | None, gate: Gate | None) -> Encoded:
    return _home_of(anchor, weights).encode(anchor, weights, residual, gate)


def apply(
    anchor: Tensor,
    momentum: Tensor | None,
    weights: Sequence[Tensor],
    residual: Tensor | None,
    own: Entries,
    contributions: Sequence[Entries],
    outer: OuterStep,
) -> float:
    return _home_of(anchor, weights).apply(anchor, momentum, weights, residual, own, contributions, outer)


def write_weights(anchor: Tensor, weights: Sequence[Tensor]) -> None:
    _home_of(anchor, weights).write_weights(anchor, weights)


def digest(data: Tensor) -> int:
    return home(data.device.type).digest(data)


def add_up(contributions: Sequence[Entries], numel: int) -> Entries:
    return reference_entries.add_up(contributions, numel)


def check_blocks(counts: Tensor, offsets: Tensor, values: Tensor, numel: int) -> Tensor:
    return reference_entries.check_blocks(counts, offsets, values, numel)


def packs_fast() -> bool:
    """Whether the tight code is compiled here. Without a compiler it is some hundred times slower."""
    return home("cpu") is not reference


def pack(entries: Entries, known: Known) -> Tensor | None:
    """Entries in host memory as a frame of the tight code, or None where plain bytes are smaller."""
    compiled = home("cpu")
    return (reference_tight if compiled is reference else compiled).pack(entries, known)


def unpack(body: Tensor, count: int, known: Known) -> Entries:
    """The entries of such a frame.

    Raises:
        MalformedError: these are not the bytes of a frame.
    """
    compiled = home("cpu")
    return (reference_tight if compiled is reference else compiled).unpack(body, count, known)
