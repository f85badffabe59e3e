"""Changes of weights, and patches of them: found and applied where the weights are, coded on the host."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from . import reference_patch
from .homes import compiled
from .types import Changes, Ranked


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
    in_c = compiled()
    return in_c.patches if in_c else reference_patch


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
