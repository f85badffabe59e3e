"""What touches every element of the outer state: four ops, each with one home per kind of device; and what
touches every entry of an exchange.

`reference` is the specification, `cpu` the same in C for tensors in host memory, `triton` for GPUs, and
`streamed` brings parameters on a GPU to outer state in host memory. The tight code is worked in host memory
only (`reference_tight`, `cpu`). Entries are added up and checked wherever they are (`reference_entries`, and
`cpu` for host memory).
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from . import reference, reference_entries, reference_tight
from .streamed import Streamed
from .types import BLOCK, Encoded, Entries, Gate, Known, MalformedError, OuterStep

if TYPE_CHECKING:
    from .cpu import Compiled

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


def _compiled() -> "Compiled | None":
    """The C home of host memory, if there is a compiler."""
    from . import cpu

    compiled = home("cpu")
    return compiled if isinstance(compiled, cpu.Compiled) else None


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


class _EntriesHome(Protocol):
    """What is done to entries, wherever they are; `reference_entries` says what it means."""

    def add_up(self, contributions: Sequence[Entries], numel: int) -> Entries: ...

    def check_blocks(self, counts: Tensor, offsets: Tensor, values: Tensor, numel: int) -> Tensor: ...


def _entries_home(values: Tensor) -> _EntriesHome:
    """C for host memory, where there is a compiler; torch for a GPU, which it keeps busy enough."""
    return (_compiled() if values.device.type == "cpu" else None) or reference_entries


def add_up(contributions: Sequence[Entries], numel: int) -> Entries:
    """((0 + c_0) + c_1) + …, in the order given: all entries that any contribution has, or all elements."""
    return _entries_home(contributions[0].values).add_up(contributions, numel)


def check_blocks(counts: Tensor, offsets: Tensor, values: Tensor, numel: int) -> Tensor:
    """Where each block's entries start, given how many each block has. -> [blocks + 1] int64

    Raises:
        MalformedError: these are not the finite entries of a vector of `numel` elements, in order.
    """
    return _entries_home(values).check_blocks(counts, offsets, values, numel)


def packs_fast() -> bool:
    """Whether the tight code is compiled here. Without a compiler it is some hundred times slower."""
    return _compiled() is not None


def pack(entries: Entries, known: Known) -> Tensor | None:
    """Entries in host memory as a frame of the tight code.

    None: a part of them is so unlike the others that its code would be larger than plain bytes.
    """
    return (_compiled() or reference_tight).pack(entries, known)


def unpack(body: Tensor, count: int, known: Known) -> Entries:
    """The `count` entries of such a frame, which may be any bytes at all.

    However hostile they are, this takes 5 bytes for each entry asked for (at most as many as there are
    elements; a page of them is not taken before an entry is read into it), 8 bytes for each block of 256
    elements, 20 bytes for each part of 2^18, and 64 KiB for tables.

    Raises:
        MalformedError: these are not the bytes of a frame.
    """
    return (_compiled() or reference_tight).unpack(body, count, known)
