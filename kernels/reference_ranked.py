"""Ranked changes as bytes, and back: the half of patches that needs no weights.

The changes of a part come class by class. A change is coded as how many weights of its class lie between it
and the one before (its gap) and by how many ulps the weight moves (its step), by a range coder with
probabilities that adapt. `reference_patch` has the other half.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from .types import MalformedError, Ranked

PART = 1 << 20  # elements
CLASSES = 16
LIMIT = 254  # uses after which a probability no longer adapts faster than by 1/256
MEMORY = 6  # the mean of the gaps is that of the last 2^6 or so
LONGEST_GAP, LONGEST_STEP = 21, 32  # bits
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1


class Wrong(StrEnum):
    """What can be wrong with a patch, in the order of the error numbers of cpu/patch.h."""

    SHORT = "it ends too early"
    PART_SIZES = "the sizes of its parts do not add up"
    BAD_COUNTS = "a part has another number of changes than it says"
    BAD_GAP = "a gap is longer than a part"
    NO_SUCH_ELEMENT = "it changes more weights of a class than there are"
    BAD_STEP = "a step leads out of the format, or nowhere"
    LEFT_OVER = "something is left over, or was not written by an encoder"


def code_ranked(ranked: Ranked) -> Tensor:
    """The bytes of a patch. -> uint8"""
    bodies, start = [], 0
    for low, counts in zip(ranked.lowest.tolist(), ranked.counts.tolist(), strict=True):
        stop = start + sum(counts)
        entries = ranked.ranks[start:stop].tolist(), ranked.steps[start:stop].tolist()
        bodies.append(_code_part(low, counts, *entries) if start < stop else b"")
        start = stop
    sizes = b"".join(len(body).to_bytes(4, "little") for body in bodies)
    return torch.from_numpy(np.frombuffer(b"".join([sizes, *bodies]), dtype=np.uint8).copy())


def _code_part(low: int, counts: list[int], ranks: list[int], steps: list[int]) -> bytes:
    encoder, model, entries = Encoder(), _Model(), zip(ranks, steps, strict=True)
    for k in range(CLASSES):
        model.begin_class()
        last = -1
        for _ in range(counts[k]):
            rank, step = next(entries)
            model.gap(encoder.bit, encoder.plain, rank - last - 1)
            model.step(encoder.bit, encoder.plain, k, step)
            last = rank
    return bytes([low]) + b"".join(map(varint, counts)) + encoder.finish()


def varint(x: int) -> bytes:
    """Seven bits a byte, the lower ones first; the upper bit says that more follow."""
    return bytes([x & 127 | 128]) + varint(x >> 7) if x >= 128 else bytes([x])


def decode_ranked(body: Tensor, numel: int) -> Ranked:
    """What a patch of a vector of `numel` elements says. `body` is untrusted: it may be any bytes.

    Raises:
        MalformedError: these are not the bytes of a patch of any such vector.
    """
    raw, parts = body.numpy().tobytes(), range(0, numel, PART)
    at = 4 * len(parts)
    if len(raw) < at:
        raise MalformedError(Wrong.SHORT)
    bodies = []
    for k in range(len(parts)):
        size = int.from_bytes(raw[4 * k : 4 * k + 4], "little")
        bodies.append(raw[at : at + size])
        at += size
        if at > len(raw):
            raise MalformedError(Wrong.PART_SIZES)
    heads = [_read_head(part, min(PART, numel - first)) for part, first in zip(bodies, parts, strict=True)]
    if at != len(raw):
        raise MalformedError(Wrong.PART_SIZES)
    ranks: list[int] = []
    steps: list[int] = []
    for part, (size, counts) in zip(bodies, heads, strict=True):
        if part:
            _decode_part(part[size:], counts, ranks, steps)
    return Ranked(
        torch.tensor([part[0] if part else 0 for part in bodies], dtype=torch.uint8),
        torch.tensor([counts for _, counts in heads], dtype=torch.int32).view(-1, CLASSES),
        torch.tensor(ranks, dtype=torch.int32),
        torch.tensor(steps, dtype=torch.int64),
    )


def _read_head(body: bytes, elements: int) -> tuple[int, list[int]]:
    """-> the head's bytes, and the number of changes of each class"""
    if not body:
        return 0, [0] * CLASSES
    at, counts = 1, []
    for _ in range(CLASSES):
        size = next((i for i, byte in enumerate(body[at : at + 3], 1) if byte < 128), 0)
        if not size or (size > 1 and not body[at + size - 1]):
            raise MalformedError(Wrong.BAD_COUNTS)
        counts.append(sum((byte & 127) << 7 * i for i, byte in enumerate(body[at : at + size])))
        at += size
    if not 0 < sum(counts) <= elements:
        raise MalformedError(Wrong.BAD_COUNTS)
    return at, counts


def _decode_part(coded: bytes, counts: list[int], ranks: list[int], steps: list[int]) -> None:
    decoder, model = Decoder(coded), _Model()
    for k in range(CLASSES):
        model.begin_class()
        rank = -1
        for _ in range(counts[k]):
            rank += 1 + model.gap(decoder.bit, decoder.plain)
            if rank >= PART:
                raise MalformedError(Wrong.BAD_GAP)
            ranks.append(rank)
            steps.append(model.step(decoder.bit, decoder.plain, k))
    decoder.finish()


# ---- the model: which decisions are taken, and with which probability ----

Bit = Callable[["Chance", int], int]  # codes or decodes one decision; a decoder ignores its second argument
Plain = Callable[[int, int], int]  # so many bits without a model


class Chance:
    """The probability of a 1, in 1/65536, which adapts."""

    def __init__(self) -> None:
        self.one, self.used = 1 << 15, 0

    def learn(self, bit: int) -> None:
        rate = 65536 // (self.used + 2)
        if bit:
            self.one += (65536 - self.one) * rate >> 16
        else:
            self.one -= self.one * rate >> 16
        self.used = min(self.used + 1, LIMIT)


class _Numbers:
    """How a number from 1 on is coded: its length, its two bits below the uppermost, and the rest plainly."""

    def __init__(self) -> None:
        self.chances: dict[tuple[int, ...], Chance] = {}

    def code(self, bit: Bit, plain: Plain, x: int, longest: int) -> int:
        """-> x. A decoder raises if that has more than `longest` bits."""
        left = 0
        while bit(self._chance(left), left < x.bit_length() - 1):
            left += 1
            if left == longest:
                return 0
        length, made = left, 1
        while left and made < 4:
            left -= 1
            made = made << 1 | bit(self._chance(length, made), x >> left & 1)
        return made << left | plain(x & (1 << left) - 1, left)

    def _chance(self, *context: int) -> Chance:
        return self.chances.setdefault(context, Chance())


class _Model:
    def __init__(self) -> None:
        self.gaps = [_Numbers() for _ in range(18)]
        self.sizes = [_Numbers() for _ in range(CLASSES)]
        self.down = [Chance() for _ in range(CLASSES)]
        self.mean = 0  # of the gaps, in 1/256

    def begin_class(self) -> None:
        """An octave up half as many weights change, so gaps are twice as long; none is longer than a part."""
        self.mean = min(2 * self.mean, PART << 8)

    def gap(self, bit: Bit, plain: Plain, gap: int = 0) -> int:
        """Numbers of about the mean's length: their upper bits by a model for means of this size."""
        length = self.mean.bit_length()
        lower = max(length - 11, 0)
        halves = 2 * length + (self.mean >> length - 2 & 1) if length > 1 else 0  # of an octave
        shape = halves & 1 if lower else max(halves - 6, 2)
        upper = self.gaps[shape].code(bit, plain, (gap >> lower) + 1, LONGEST_GAP)
        made = (upper - 1 << lower) + plain(gap & (1 << lower) - 1, lower)
        if not upper or made >= PART:
            raise MalformedError(Wrong.BAD_GAP)
        self.mean += (made << 8 - MEMORY) - (self.mean >> MEMORY)
        return made

    def step(self, bit: Bit, plain: Plain, k: int, step: int = 0) -> int:
        down = bit(self.down[k], step < 0)
        size = self.sizes[k].code(bit, plain, abs(step), LONGEST_STEP)
        if not size:
            raise MalformedError(Wrong.BAD_STEP)
        return -size if down else size


# ---- the coder: decisions narrow a range, and any number of the last range tells them all ----


class Encoder:
    def __init__(self) -> None:
        self.low, self.range, self.shifted = 0, _U64, 0  # low < 2^(64 + shifted)

    def bit(self, chance: Chance, bit: int) -> int:
        bound = (self.range >> 16) * chance.one
        if bit:
            self.range = bound
        else:
            self.low += bound
            self.range -= bound
        chance.learn(bit)
        self._shift()
        return bit

    def plain(self, x: int, size: int) -> int:
        for shift, some in _at_most_16(size):
            self.range >>= some
            self.low += (x >> shift & (1 << some) - 1) * self.range
            self._shift()
        return x

    def _shift(self) -> None:
        if self.range <= _U32:
            self.range <<= 32
            self.low <<= 32
            self.shifted += 32

    def finish(self) -> bytes:
        """The number of the range with the most zeros at its end, without these."""
        for zeros in (56, 48, 40, 32):
            more = -self.low % (1 << zeros)
            if more < self.range:
                break
        return (self.low + more).to_bytes((64 + self.shifted) // 8, "big").rstrip(b"\0")


class Decoder:
    def __init__(self, raw: bytes) -> None:
        self.raw, self.at, self.range = raw, 8, _U64
        self.value = int.from_bytes(raw[:8].ljust(8, b"\0"), "big")  # above the range's low end
        if self.value == self.range:
            raise MalformedError(Wrong.LEFT_OVER)

    def bit(self, chance: Chance, _: int = 0) -> int:
        bound = (self.range >> 16) * chance.one
        bit = int(self.value < bound)
        if bit:
            self.range = bound
        else:
            self.value -= bound
            self.range -= bound
        chance.learn(bit)
        self._shift()
        return bit

    def plain(self, _: int, size: int) -> int:
        made = 0
        for _shift, some in _at_most_16(size):
            self.range >>= some
            now = self.value // self.range
            if now >> some:
                raise MalformedError(Wrong.LEFT_OVER)
            self.value -= now * self.range
            made = made << some | now
            self._shift()
        return made

    def _shift(self) -> None:
        if self.range <= _U32:
            self.range <<= 32
            word = self.raw[self.at : self.at + 4].ljust(4, b"\0")
            self.value = self.value << 32 | int.from_bytes(word, "big")
            self.at += 4

    def finish(self) -> None:
        if len(self.raw) > self.at - 4 or self.raw[-1:] == b"\0":
            raise MalformedError(Wrong.LEFT_OVER)


def _at_most_16(size: int) -> Iterator[tuple[int, int]]:
    while size > 0:
        some = min(size, 16)
        size -= some
        yield size, some
