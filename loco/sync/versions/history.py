"""Patches over 8, 16, 32 … versions, for subscribers that missed some.

A publisher keeps patches in reverse, which take its weights back over 1, 2, 4 … versions, at most one of each
length. Two neighbours of one length are joined into one of twice that length, and also into a forward
patch over both, from eight versions on: who missed fewer reads them one by one. They are published as far
as a budget allows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from loco import kernels
from loco.kernels import Changes
from loco.kernels.reserve import give_back

from .manifest import Manifest
from .vectors import ChangesOf, Vectors

SLICE = 4 * kernels.PART  # elements
CHUNK = 1 << 20  # bytes
_SHORTEST = 2  # blocks before the one from which on a join is published; it spans 2³ versions


class Packed(NamedTuple):
    """A patch of some vectors."""

    bodies: dict[torch.dtype, Tensor]
    entries: dict[torch.dtype, int]

    @property
    def bytes(self) -> int:
        return sum(body.numel() for body in self.bodies.values())

    def chunks(self) -> dict[torch.dtype, list[memoryview]]:
        """The bodies, as they are written."""
        return {f: [part.numpy().data for part in body.split(CHUNK)] for f, body in self.bodies.items()}


class Skip(NamedTuple):
    base: int  # the version that it starts from
    base_digest: str
    patch: Packed


class _Back(NamedTuple):
    """How to get back to a version from the one after its block."""

    version: int
    digest: str
    end: int  # the last version of its block
    patch: Packed


def packed(weights: Vectors, changes: ChangesOf) -> Packed:
    """A patch for subscribers that hold these weights."""
    bodies = {f: kernels.pack_patch(weights.pieces[f], c) for f, c in changes.items() if c.positions.numel()}
    return Packed(bodies, {format: changes[format].positions.numel() for format in bodies})


class History:
    """
    Args:
        room: bytes that it may keep. The longest skips are left out when it is full.
        share: bytes of skips for each byte of patches from one version to the next.
    """

    def __init__(self, room: int, share: float) -> None:
        self._room, self._share = room, share
        self._spare = 0.0  # bytes of skips that may still be published
        self._steps = 0
        self._back: dict[int, _Back] = {}  # by the power of two

    @property
    def bytes(self) -> int:
        return sum(back.patch.bytes for back in self._back.values())

    def add(self, weights: Vectors, undo: ChangesOf, last: Manifest, version: int, size: int) -> list[Skip]:
        """The patches over several steps that end here, as far as the budget allows.

        It was a step from version `last` to `version`, which `weights` hold.

        Args:
            undo: what takes this step back.
            size: of its patch, in bytes.
        """
        if not self._share:
            return []
        self._steps += 1
        self._spare += self._share * size
        base, digest = last.version, last.digest
        blocks: list[_Back] = []  # that end one after the other, the last one where this step begins
        while self._steps % (2 << len(blocks)) == 0:
            earlier = self._back.pop(len(blocks), None)
            if earlier is None or earlier.end != base:
                break  # there is no room for the block before this one
            blocks.append(earlier)
            base, digest = earlier.version, earlier.digest
        *over, back = _join(weights, undo, [block.patch for block in blocks])
        for ended in range(len(blocks) + 1):
            self._back.pop(ended, None)
        if blocks:
            give_back()
        while self._back and self.bytes + back.bytes > self._room:
            del self._back[max(self._back)]  # what would be used last
        if back.bytes <= self._room:
            self._back[len(blocks)] = _Back(base, digest, version, back)
        skips = []
        for block, patch in zip(reversed(blocks), reversed(over), strict=False):  # the longest first
            if patch.bytes <= self._spare:
                self._spare -= patch.bytes
                skips.append(Skip(block.version, block.digest, patch))
        return skips


def _join(weights: Vectors, undo: ChangesOf, blocks: list[Packed]) -> list[Packed]:
    """The patches that lead over the last blocks and this step, from _SHORTEST + 1 blocks on; at last the one
    that leads back over all of them.

    The weights are taken back and forth slice by slice, so that this takes memory for one slice's changes.
    """
    made = [Packed({}, {}) for _ in range(max(0, len(blocks) - _SHORTEST) + 1)]
    for format, whole in weights.whole.items():
        patches: list[list[Tensor]] = [[] for _ in made]
        entries = [0] * len(made)
        edges = torch.arange(0, whole.numel() + SLICE, SLICE).clamp_(max=whole.numel())
        cuts = torch.searchsorted(undo[format].positions, edges).tolist()
        for k, first in enumerate(range(0, whole.numel(), SLICE)):
            held = whole[first : first + SLICE]
            part = Changes(*(x[cuts[k] : cuts[k + 1]].clone() for x in undo[format]))
            part.positions.sub_(first)
            for j, block in enumerate(blocks):
                kernels.swap_bits([held], part)  # back to where the block ends, and `part` leads forward
                older = _slice_of(block, format, held, whole.numel(), first)
                kernels.swap_bits([held], older)
                part = kernels.merge_changes([held], older, part)
                if j >= _SHORTEST:
                    patches[j - _SHORTEST].append(kernels.pack_patch([held], part))
                    entries[j - _SHORTEST] += part.positions.numel()
                kernels.swap_bits([held], part)
            patches[-1].append(kernels.pack_patch([held], part))
            entries[-1] += part.positions.numel()
        for one, slices, count in zip(made, patches, entries, strict=True):
            if count:
                one.bodies[format] = kernels.join_patches(slices, whole.numel(), SLICE)
                one.entries[format] = count
            slices.clear()  # or all patches would be there twice
    return made


def _slice_of(patch: Packed, format: torch.dtype, held: Tensor, numel: int, first: int) -> Changes:
    if format not in patch.bodies:
        return kernels.find_changes([held], [held])  # none
    body = kernels.split_patch(patch.bodies[format], numel, first, first + held.numel())
    return kernels.unpack_patch([held], body)
