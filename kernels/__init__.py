"""The work on every element of the outer state and on every entry of an exchange.

The four ops on the outer state (`encode`, `apply`, `write_weights`, `digest`) have one implementation for
each kind of device, which is called its home. `reference` is the specification in plain torch, `cpu` is C for
tensors in host memory, `triton` is for GPUs, and `streamed` is for parameters on a GPU whose outer state is
in host memory. All homes give the same bits.

Where rounds overlap, `cross` is `apply` and `encode` with what lies between them: one pass of C in host
memory, two passes on a GPU.

Entries are added up and checked on the device that holds them (`reference_entries`, and `cpu` for host
memory). The tight code is packed and unpacked in host memory only (`reference_tight`, `cpu`). Changes of
weights are found and applied where the weights are (`reference_patch`, `cpu`, `triton`), and coded as patches
on the host.

Importing this package needs neither triton nor a C compiler: a home is loaded when it is first used.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from . import reference, reference_entries, reference_tight
from .homes import Home, compiled, home
from .patches import (
    digest_bits,
    find_changes,
    merge_changes,
    pack_patch,
    swap_bits,
    unpack_patch,
)
from .reference import run_ahead
from .reference_patch import FORMATS, PART, digest_terms, join_patches, split_patch
from .streamed import Streamed
from .types import (
    BLOCK,
    Changes,
    Encoded,
    Entries,
    Gate,
    Known,
    MalformedError,
    OuterStep,
    all_finite,
)

if TYPE_CHECKING:
    from .cpu import Compiled

__all__ = [
    "BLOCK",
    "FORMATS",
    "PART",
    "Changes",
    "Encoded",
    "Entries",
    "Gate",
    "Known",
    "MalformedError",
    "OuterStep",
    "add_and_split",
    "add_up",
    "all_finite",
    "apply",
    "cross",
    "digest",
    "digest_bits",
    "digest_hex",
    "digest_of_all",
    "digest_terms",
    "encode",
    "find_changes",
    "first_changed",
    "home",
    "join_patches",
    "merge_changes",
    "pack",
    "pack_patch",
    "packs_fast",
    "read_blocks",
    "reference",
    "run_ahead",
    "split_patch",
    "swap_bits",
    "unpack",
    "unpack_patch",
    "write_blocks",
    "write_weights",
]


@cache
def _streamed() -> Home:
    return Streamed(home("cpu"))


def _home_of(anchor: Tensor, weights: Sequence[Tensor]) -> Home:
    on_one_device = all(w.device == anchor.device for w in weights)
    return home(anchor.device.type) if on_one_device else _streamed()


def encode(
    anchor: Tensor,
    weights: Sequence[Tensor],
    residual: Tensor | None,
    gate: Gate | None,
    factor: float = 1.0,
) -> Encoded:
    found = _home_of(anchor, weights).encode(anchor, weights, residual, gate, factor)
    return found._replace(factor=factor)


def apply(
    anchor: Tensor,
    momentum: Tensor | None,
    weights: Sequence[Tensor],
    residual: Tensor | None,
    own: Entries,
    contributions: Sequence[Entries],
    outer: OuterStep,
    returned: Entries | None = None,
) -> float:
    return _home_of(anchor, weights).apply(
        anchor, momentum, weights, residual, own, contributions, outer, returned
    )


def cross(
    anchor: Tensor,
    momentum: Tensor | None,
    weights: Sequence[Tensor],
    residual: Tensor,
    sent: Entries | None,
    contributions: Sequence[Entries],
    outer: OuterStep,
    gate: Gate | None,
    beta: float,
    *,
    returned: Sequence[Entries] = (),
    sends: bool = True,
    beta_before: float | None = None,
) -> tuple[Encoded, float]:
    boundary = anchor, momentum, weights, residual, sent, contributions, outer, gate, beta
    kinds: Any = {"returned": returned, "sends": sends, "beta_before": beta_before}
    if (fused := _fused(anchor, weights)) is not None:
        found, norm = fused.cross(*boundary, **kinds)
    else:
        passes = _home_of(anchor, weights)
        found, norm = reference.cross(passes, *boundary, **kinds)
    return found._replace(factor=outer.factor), norm


def first_changed(anchor: Tensor, weights: Sequence[Tensor], sent: Entries | None, beta: float) -> int:
    return (_fused(anchor, weights) or reference).first_changed(anchor, weights, sent, beta)


def _fused(anchor: Tensor, weights: Sequence[Tensor]) -> "Compiled | None":
    """C, where all is in host memory. A GPU has `cross` as its two passes with torch's operations between
    them."""
    return compiled() if anchor.is_cpu and all(w.is_cpu for w in weights) else None


def write_weights(anchor: Tensor, weights: Sequence[Tensor]) -> None:
    _home_of(anchor, weights).write_weights(anchor, weights)


def digest(data: Tensor) -> int:
    return home(data.device.type).digest(data)


def digest_hex(data: Tensor) -> str:
    """The digest of a tensor as 16 hexadecimal digits, for messages, files and people."""
    return f"{digest(data):016x}"


def digest_of_all(tensors: Iterable[Tensor]) -> bytes:
    """One digest of several tensors, which depends on their order and on where one ends. -> 8 bytes"""
    each = b"".join(digest(tensor).to_bytes(8, "little") for tensor in tensors)
    return hashlib.blake2b(each, digest_size=8).digest()


class _EntriesHome(Protocol):
    """The work on entries, which `reference_entries` specifies."""

    def add_up(self, contributions: Sequence[Entries], numel: int, out: Tensor | None = None) -> Entries: ...

    def add_and_split(
        self, contributions: Sequence[Entries], anchor: Tensor, margin: float
    ) -> tuple[Entries, Entries]: ...

    def write_blocks(self, entries: Entries, ahead: int) -> Tensor: ...

    def read_blocks(self, body: Tensor, count: int, numel: int) -> Entries: ...


def _entries_home(values: Tensor) -> _EntriesHome:
    """C in host memory, if there is a compiler; torch on a GPU, where it is fast enough."""
    return (compiled() if values.is_cpu else None) or reference_entries


def add_up(contributions: Sequence[Entries], numel: int, out: Tensor | None = None) -> Entries:
    """((0 + c_0) + c_1) + …, in the order given.

    The result has the entries that occur in any contribution, or all elements.

    Args:
        out: where the values of all elements are put; may be where one of the contributions has them.
    """
    return _entries_home(contributions[0].values).add_up(contributions, numel, out)


def add_and_split(contributions: Sequence[Entries], anchor: Tensor, margin: float) -> tuple[Entries, Entries]:
    """As `add_up`, in two parts: the sums larger than F · ulp(θ), which go back to all sites, and the others,
    which their owner keeps.

    Args:
        margin: F.
    """
    return _entries_home(contributions[0].values).add_and_split(contributions, anchor, margin)


def write_blocks(entries: Entries, ahead: int = 0) -> Tensor:
    """The values; their offsets; how many entries each block has, in 1 byte, or in 2 if a block has all 256.

    Args:
        ahead: bytes of room in front of them, a multiple of 8, which may hold anything.
    """
    return _entries_home(entries.values).write_blocks(entries, ahead)


def read_blocks(body: Tensor, count: int, numel: int) -> Entries:
    """What `write_blocks` wrote of `count` finite entries of a vector of `numel` elements; offsets and values
    stay where they are. `body` is untrusted: it may be any bytes.

    Raises:
        MalformedError: these are not bytes that it writes.
    """
    return _entries_home(body).read_blocks(body, count, numel)


def packs_fast() -> bool:
    """Whether the tight code is compiled here. Without a compiler it is some hundred times slower."""
    return compiled() is not None


def pack(entries: Entries, known: Known, ahead: int = 0) -> Tensor | None:
    """Entries in host memory as a frame of the tight code, behind `ahead` bytes of room (a multiple of 8).

    None: part of them differs so much from the rest that its code would be larger than plain bytes.
    """
    return (compiled() or reference_tight).pack(entries, known, ahead)


def unpack(body: Tensor, count: int, known: Known) -> Entries:
    """The `count` entries of a frame of the tight code. `body` is untrusted: it may be any bytes.

    Whatever they are, this allocates at most 5 bytes for each of the `count` entries (which may not exceed
    the number of elements; a page is used only once an entry is written to it), 8 bytes for each block of
    256 elements, 20 bytes for each part of 2^18, and 64 KiB for tables.

    Raises:
        MalformedError: these are not the bytes of a frame.
    """
    return (compiled() or reference_tight).unpack(body, count, known)
