"""Patches over 2, 4, 8 … versions, for subscribers that missed some.

A publisher keeps patches in reverse, which take its weights back over 1, 2, 4 … versions, at most one of each
length. Two neighbours of one length are joined into one of twice that length, and also into a forward
patch over both. So a version has one patch for each power of two that divides its position in the chain.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from loco import kernels
from loco.kernels import Changes
from loco.kernels.reserve import give_back

from .vectors import ChangesOf, Vectors

SLICE = 4 * kernels.PART  # elements
CHUNK = 1 << 20  # bytes


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
        room: bytes that it may keep. Longer skips are left out when it is full.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._steps = 0
        self._back: dict[int, _Back] = {}  # by the power of two

    @property
    def bytes(self) -> int:
        return sum(back.patch.bytes for back in self._back.values())

    def add(self, weights: Vectors, undo: ChangesOf, base: int, digest: str, version: int) -> list[Skip]:
        """The patches over several steps that end here.

        It was a step from version `base`, whose weights have this digest, to `version`, which `weights` hold.

        Args:
            undo: what takes this step back.
        """
        self._steps += 1
        blocks: list[_Back] = []  # that end one after the other, the last one where this step begins
        while self._steps % (2 << len(blocks)) == 0:
            earlier = self._back.pop(len(blocks), None)
            if earlier is None or earlier.end != base:
                break  # there was no room for the block before this one
            blocks.append(earlier)
            base, digest = earlier.version, earlier.digest
        *over, back = _join(weights, undo, [block.patch for block in blocks])
        for ended in range(len(blocks) + 1):
            self._back.pop(ended, None)
        if blocks:
            give_back()
        if self.bytes + back.bytes <= self._room:
            self._back[len(blocks)] = _Back(base, digest, version, back)
        return [Skip(b.version, b.digest, patch) for b, patch in zip(blocks, over, strict=True)]


def _join(weights: Vectors, undo: ChangesOf, blocks: list[Packed]) -> list[Packed]:
    """The patches that lead over one block and this step, over two blocks, and so on; at last the patch that
    leads back over all of them.

    The weights are taken back and forth slice by slice, so that this takes memory for one slice's changes.
    """
    made = [Packed({}, {}) for _ in range(len(blocks) + 1)]
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
                patches[j].append(kernels.pack_patch([held], part))
                entries[j] += part.positions.numel()
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
