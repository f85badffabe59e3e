"""The work on every element of the outer state and on every entry of an exchange.

The four ops on the outer state (`encode`, `apply`, `write_weights`, `digest`) have one implementation for
each kind of device, which is called its home. `reference` is the specification in plain torch, `cpu` is C for
tensors in host memory, `triton` is for GPUs, and `streamed` is for parameters on a GPU whose outer state is
in host memory. All homes give the same bits.

Entries are added up and checked on the device that holds them (`reference_entries`, and `cpu` for host
memory). The tight code is packed and unpacked in host memory only (`reference_tight`, `cpu`). Changes of
weights are found and applied where the weights are (`reference_patch`, `cpu`, `triton`), and coded as patches
on the host.

Importing this package needs neither triton nor a C compiler: a home is loaded when it is first used.
"""

import hashlib
import os
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from . import reference, reference_entries, reference_patch, reference_tight
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
    Ranked,
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
    "add_up",
    "all_finite",
    "apply",
    "check_blocks",
    "digest",
    "digest_bits",
    "digest_hex",
    "digest_of_all",
    "digest_terms",
    "encode",
    "find_changes",
    "join_patches",
    "merge_changes",
    "pack",
    "pack_patch",
    "packs_fast",
    "split_patch",
    "split_sums",
    "swap_bits",
    "unpack",
    "unpack_patch",
    "write_weights",
]


class Home(Protocol):
    """The ops of a home, which `reference` specifies."""

    def encode(
        self,
        anchor: Tensor,
        weights: Sequence[Tensor],
        residual: Tensor | None,
        gate: Gate | None,
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


def _compiled() -> "Compiled | None":
    """The C home, if there is a compiler."""
    from . import cpu

    compiled = home("cpu")
    return compiled if isinstance(compiled, cpu.Compiled) else None


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
) -> Encoded:
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

    def split_sums(self, sums: Entries, anchor: Tensor, margin: float) -> tuple[Entries, Entries]: ...

    def check_blocks(self, counts: Tensor, offsets: Tensor, values: Tensor, numel: int) -> Tensor: ...


def _entries_home(values: Tensor) -> _EntriesHome:
    """C in host memory, if there is a compiler; torch on a GPU, where it is fast enough."""
    return (_compiled() if values.device.type == "cpu" else None) or reference_entries


def add_up(contributions: Sequence[Entries], numel: int, out: Tensor | None = None) -> Entries:
    """((0 + c_0) + c_1) + …, in the order given.

    The result has the entries that occur in any contribution, or all elements.

    Args:
        out: where the values of all elements are put; may be where one of the contributions has them.
    """
    return _entries_home(contributions[0].values).add_up(contributions, numel, out)


def split_sums(sums: Entries, anchor: Tensor, margin: float) -> tuple[Entries, Entries]:
    """The sums larger than F · ulp(θ), which go back to all sites, and the others, which their owner keeps.

    Args:
        margin: F.
    """
    return _entries_home(sums.values).split_sums(sums, anchor, margin)


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

    None: part of them differs so much from the rest that its code would be larger than plain bytes.
    """
    return (_compiled() or reference_tight).pack(entries, known)


def unpack(body: Tensor, count: int, known: Known) -> Entries:
    """The `count` entries of a frame of the tight code. `body` is untrusted: it may be any bytes.

    Whatever they are, this allocates at most 5 bytes for each of the `count` entries (which may not exceed
    the number of elements; a page is used only once an entry is written to it), 8 bytes for each block of
    256 elements, 20 bytes for each part of 2^18, and 64 KiB for tables.

    Raises:
        MalformedError: these are not the bytes of a frame.
    """
    return (_compiled() or reference_tight).unpack(body, count, known)


class _PatchHome(Protocol):
    """The work on versions of weights, which `reference_patch` specifies."""

    def find_changes(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> Changes: ...

    def swap_bits(self, weights: Sequence[Tensor], changes: Changes) -> list[int]: ...

    def digest_bits(self, weights: Tensor) -> int: ...


class _HostPatchHome(_PatchHome, Protocol):
    """For weights in host memory, and the coder for weights anywhere."""

    def pack_patch(self, old: Sequence[Tensor], changes: Changes) -> Tensor: ...

    def unpack_patch(self, old: Sequence[Tensor], body: Tensor) -> Changes: ...

    def merge_changes(self, old: Sequence[Tensor], earlier: Changes, later: Changes) -> Changes: ...

    def code_ranked(self, ranked: Ranked) -> Tensor: ...

    def decode_ranked(self, body: Tensor, numel: int) -> Ranked: ...


class _DevicePatchHome(_PatchHome, Protocol):
    """For weights on a device: what reads all of them."""

    def rank_changes(self, old: Sequence[Tensor], changes: Changes) -> Ranked: ...

    def place_ranked(self, old: Sequence[Tensor], ranked: Ranked) -> Changes: ...


def _host_patches() -> _HostPatchHome:
    compiled = _compiled()
    return compiled.patches if compiled else reference_patch


def _device_patches(weights: Sequence[Tensor]) -> _DevicePatchHome | None:
    """The home of weights on a device, or None if they are in host memory.

    Raises:
        ValueError: nothing here can work on patches of weights on such a device.
    """
    device = weights[0].device.type if weights else "cpu"
    if device == "cpu":
        return None
    if device != "cuda":
        raise ValueError(f"patches are of weights on cpu or cuda, got weights on {device}")
    from . import triton

    return triton


def find_changes(old: Sequence[Tensor], new: Sequence[Tensor]) -> Changes:
    """The elements whose bits differ, with their new bits, on the device of the weights."""
    return (_device_patches(old) or _host_patches()).find_changes(old, new)


def swap_bits(weights: Sequence[Tensor], changes: Changes) -> list[int]:
    """Write the bits of some elements, and leave what they held in `changes`. -> how each piece's digest
    changes
    """
    return (_device_patches(weights) or _host_patches()).swap_bits(weights, changes)


def merge_changes(old: Sequence[Tensor], earlier: Changes, later: Changes) -> Changes:
    """What two changes, one after the other, change of old weights in host memory."""
    return _host_patches().merge_changes(old, earlier, later)


def digest_bits(weights: Tensor) -> int:
    """A 64-bit digest of the elements of a 1-D tensor, which `swap_bits` keeps up to date."""
    return (_device_patches([weights]) or _host_patches()).digest_bits(weights)


def pack_patch(old: Sequence[Tensor], changes: Changes) -> Tensor:
    """The changes of a vector, as a patch for those who have its old version. -> uint8, in host memory"""
    device = _device_patches(old)
    if device is None:
        return _host_patches().pack_patch(old, changes)
    return _host_patches().code_ranked(device.rank_changes(old, changes).to("cpu"))


def unpack_patch(old: Sequence[Tensor], body: Tensor) -> Changes:
    """The changes that a patch makes, on the device of the weights. `body` is in host memory, and untrusted:
    it may be any bytes.

    Raises:
        MalformedError: these are not the bytes of a patch of this vector.
    """
    device = _device_patches(old)
    if device is None:
        return _host_patches().unpack_patch(old, body)
    ranked = _host_patches().decode_ranked(body, sum(piece.numel() for piece in old))
    return device.place_ranked(old, ranked.to(old[0].device))
