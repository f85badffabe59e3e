"""The specification of patches: the weights that changed between two versions, in few bytes, bit for bit.

Whoever has the old version of some weights gets the new one from a patch. docs/sync-format.md describes its
bytes; this is the same, readable and slow. Nothing here computes with weights: they are bit patterns of a
format.

At reinforcement learning's rates a step moves few weights, most of them by one ulp. What the receiver
already has says most about which: the ulp doubles from one octave to the next, so the chance that a step
crosses the border to the next value halves. Inside an octave, changes come close to independent. So the
weights are sorted into classes by their old exponents, and a patch has, class by class, how many weights of
the class lie between two changes (a gap), and by how many ulps the weight moves (its step).

    class    exponent field of the old weight, less that of class 0, cut to 0 … 15
    gap      how many weights of the class lie between two that changed
    step     new − old, in the format's order of all its values: ± 1 for neighbours

A vector of weights is coded in parts of 2^20, so that many threads can work on it. What reads every weight
(`rank_changes`, `place_ranked`) can run where the weights are; what codes the few that change is in
`reference_ranked`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .reference import CHUNK, cast
from .reference_ranked import CLASSES, PART, Wrong, code_ranked, decode_ranked
from .reserve import reserve
from .types import Changes, MalformedError, Ranked

SAMPLED, RARE = 16, 1024  # of one weight in 16, at most one in 1024 is above class 15
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1


class Format(NamedTuple):
    bits: torch.dtype  # integers of its size
    mantissa: int  # explicit bits

    @property
    def width(self) -> int:
        return self.bits.itemsize

    def fields(self, bits: np.ndarray) -> np.ndarray:
        """The exponent fields of some bits. -> int64"""
        return bits >> self.mantissa & (1 << 8 * self.width - 1 - self.mantissa) - 1


FORMATS = {
    torch.float32: Format(torch.int32, 23),
    torch.bfloat16: Format(torch.int16, 7),
    torch.float16: Format(torch.int16, 10),
    torch.float8_e4m3fn: Format(torch.uint8, 3),
    torch.float8_e5m2: Format(torch.uint8, 2),
    torch.uint8: Format(torch.uint8, 3),  # any other data, as bytes
}


# ---- changes ----


def find_changes(old: Sequence[Tensor], new: Sequence[Tensor]) -> Changes:
    """The elements whose bits differ, with their new bits. FP32 `new` is cast to the dtype of `old` first.

    Args:
        old, new: 1-D pieces of one vector each, of the same sizes.
    """
    positions, bits, start = [], [], 0
    for before, after in zip(old, new, strict=True):
        for was, now in zip(before.split(CHUNK), after.split(CHUNK), strict=True):
            fresh = bits_of(now if now.dtype == was.dtype else cast(now, was.dtype))
            where = (bits_of(was) != fresh).nonzero().view(-1)
            positions.append(where + start)
            bits.append(fresh[where])
            start += was.numel()
    dtype = FORMATS[old[0].dtype].bits if old else torch.int16
    none = torch.empty(0, dtype=torch.int64)
    return Changes(torch.cat([none, *positions]), torch.cat([none.to(dtype), *bits]))


def swap_bits(weights: Sequence[Tensor], changes: Changes) -> list[int]:
    """Write the bits of some elements, and leave what they held in `changes`. So a second call takes it back.

    -> for each piece, how its digest changes (mod 2^64)
    """
    digests, start = [], 0
    for piece in weights:
        first, last = np.searchsorted(changes.positions.numpy(), (start, start + piece.numel()))
        where = changes.positions[first:last] - start
        held, fresh = bits_of(piece), changes.bits[first:last]
        was = held[where]
        digests.append(digest_terms(fresh, where) - digest_terms(was, where) & _U64)
        held[where] = fresh
        fresh.copy_(was)
        start += piece.numel()
    return digests


def merge_changes(old: Sequence[Tensor], earlier: Changes, later: Changes) -> Changes:
    """What two changes, one after the other, change of the old weights. Elements that end as they began are
    left out.
    """
    positions = torch.cat([later.positions, earlier.positions])
    bits = torch.cat([later.bits, earlier.bits])
    order = torch.argsort(positions, stable=True)  # of two of one element the later one comes first
    positions, bits = positions[order], bits[order]
    counts = torch.ones_like(positions, dtype=torch.bool)
    counts[1:] = positions[1:] != positions[:-1]
    before = torch.cat([bits.new_empty(0), *map(bits_of, old)])
    counts &= before[positions] != bits
    return Changes(positions[counts], bits[counts])


def digest_bits(weights: Tensor) -> int:
    """A 64-bit digest of the elements of a 1-D tensor: `reference.digest` with a word for each element's
    bits.

    It is a sum over the elements, so a change of some of them changes it by their terms alone.
    """
    whole = torch.arange(weights.numel())
    return sum(digest_terms(bits_of(weights)[at], at) for at in whole.split(CHUNK)) & _U64


def digest_terms(bits: Tensor, positions: Tensor) -> int:
    """What elements of these bits at these positions add to a digest, mod 2^64."""
    k = positions.numpy().astype(np.uint64) * 0x9E3779B1 & _U32
    v = unsigned(bits).astype(np.uint64) + k & _U32
    return int(((v ^ v >> 15) * (k | 1)).sum(dtype=np.uint64))


def split_patch(body: Tensor, numel: int, first: int, last: int) -> Tensor:
    """The patch of some whole parts of a vector of `numel` elements: those of the elements `first` to `last`.

    Raises:
        MalformedError: the sizes of the parts do not add up.
    """
    parts = -(-numel // PART)
    begin, end = first // PART, -(-last // PART)
    if body.numel() < 4 * parts:
        raise MalformedError(Wrong.SHORT)
    sizes = body[: 4 * parts].numpy().copy().view("<u4").astype(np.int64)
    at = 4 * parts + np.concatenate([[0], np.cumsum(sizes)])
    if at[-1] != body.numel():
        raise MalformedError(Wrong.PART_SIZES)
    return torch.cat([body[4 * begin : 4 * end], body[int(at[begin]) : int(at[end])]])


def join_patches(patches: Sequence[Tensor], numel: int, width: int) -> Tensor:
    """The patch of a vector of `numel` elements, from those of its slices of `width` elements, a number of
    parts.
    """
    heads = [4 * -(-min(width, numel - first) // PART) for first in range(0, numel, width)]
    tables = [patch[:head] for patch, head in zip(patches, heads, strict=True)]
    bodies = [patch[head:] for patch, head in zip(patches, heads, strict=True)]
    whole = reserve(sum(patch.numel() for patch in patches), torch.uint8)
    return torch.cat([*tables, *bodies], out=whole)


def bits_of(weights: Tensor) -> Tensor:
    """The same memory as integers."""
    return weights.view(FORMATS[weights.dtype].bits)


def unsigned(bits: Tensor) -> np.ndarray:
    """-> int64"""
    return bits.numpy().astype(np.int64) & (1 << 8 * bits.element_size()) - 1


def ordered(bits: np.ndarray, width: int) -> np.ndarray:
    """Bits as numbers in the order of the format's values, with −0 just below +0. Its own inverse, but for
    signs.
    """
    half = 1 << 8 * width - 1
    return np.where(bits < half, bits, half - 1 - bits)


# ---- patches ----


def pack_patch(old: Sequence[Tensor], changes: Changes) -> Tensor:
    """The changes of a vector, as a patch. -> uint8"""
    return code_ranked(rank_changes(old, changes))


def unpack_patch(old: Sequence[Tensor], body: Tensor) -> Changes:
    """The changes that a patch makes. `body` is untrusted: it may be any bytes.

    Raises:
        MalformedError: these are not the bytes of a patch of this vector.
    """
    return place_ranked(old, decode_ranked(body, sum(piece.numel() for piece in old)))


def rank_changes(old: Sequence[Tensor], changes: Changes) -> Ranked:
    """Where the changes are, told by the old weights' classes: what there is to code."""
    format, vector = _vector_of(old)
    positions, fresh = changes.positions.numpy(), unsigned(changes.bits)
    lowest, counts = [], []
    none = np.empty(0, dtype=np.int64)
    ranks, steps = [none], [none]
    for first in range(0, len(vector), PART):
        part = vector[first : first + PART]
        a, b = np.searchsorted(positions, (first, first + PART))
        where = positions[a:b] - first
        lowest.append(_lowest_field(part, format) if a < b else 0)
        classes = _classes(part, lowest[-1], format)
        moved = ordered(fresh[a:b], format.width) - ordered(part[where], format.width)
        of_class = [np.flatnonzero(classes[where] == k) for k in range(CLASSES)]
        counts.append([len(mine) for mine in of_class])
        for k, mine in enumerate(of_class):
            ranks.append(np.searchsorted(np.flatnonzero(classes == k), where[mine]))
            steps.append(moved[mine])
    return Ranked(
        torch.tensor(lowest, dtype=torch.uint8),
        torch.tensor(counts, dtype=torch.int32).view(-1, CLASSES),
        torch.from_numpy(np.concatenate(ranks).astype(np.int32)),
        torch.from_numpy(np.concatenate(steps)),
    )


def place_ranked(old: Sequence[Tensor], ranked: Ranked) -> Changes:
    """The changes of which these are the ranks: the inverse of `rank_changes`.

    Raises:
        MalformedError: there are no such changes of these weights.
    """
    format, vector = _vector_of(old)
    half = 1 << 8 * format.width - 1
    none = np.empty(0, dtype=np.int64)
    positions, fresh, at = [none], [none], 0
    for part, (low, counts) in enumerate(zip(ranked.lowest.tolist(), ranked.counts.tolist(), strict=True)):
        first = part * PART
        classes = _classes(vector[first : first + PART], low, format)
        where = [none]
        for k, count in enumerate(counts):
            members = np.flatnonzero(classes == k)
            ranks = ranked.ranks[at : at + count].numpy()
            if count and ranks[-1] >= len(members):
                raise MalformedError(Wrong.NO_SUCH_ELEMENT)
            where.append(members[ranks] + first)
            at += count
        here = np.concatenate(where)
        order = np.argsort(here)
        steps = ranked.steps[at - len(here) : at].numpy()
        moved = (ordered(vector[here], format.width) + steps)[order]
        if len(moved) and not -half <= moved.min() <= moved.max() < half:
            raise MalformedError(Wrong.BAD_STEP)
        positions.append(here[order])
        fresh.append(np.where(moved >= 0, moved, half - 1 - moved))
    narrow = np.concatenate(fresh).astype(f"<u{format.width}").view(f"<i{format.width}")
    return Changes(torch.from_numpy(np.concatenate(positions)), torch.from_numpy(narrow).view(format.bits))


def _vector_of(weights: Sequence[Tensor]) -> tuple[Format, np.ndarray]:
    pieces = [unsigned(bits_of(piece)) for piece in weights]
    format = FORMATS[weights[0].dtype] if weights else FORMATS[torch.bfloat16]
    return format, np.concatenate([np.empty(0, dtype=np.int64), *pieces])


def _lowest_field(old: np.ndarray, format: Format) -> int:
    """The field of class 0. Class 15 has the highest that at most a few weights exceed."""
    sample = np.sort(format.fields(old[::SAMPLED]))[::-1]
    return max(int(sample[len(sample) // RARE]) - (CLASSES - 1), 0)


def _classes(old: np.ndarray, low: int, format: Format) -> np.ndarray:
    return np.clip(format.fields(old) - low, 0, CLASSES - 1)
