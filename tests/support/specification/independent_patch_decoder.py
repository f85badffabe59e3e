"""Decode anchors and patches of weights in plain integers, as docs/sync-format.md describes them.

Nothing here is fast: it is a second reading of the text, to compare other decoders with. Weights are the bits
of a vector's elements.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

PART, MOST_CLASSES = 1 << 20, 16
FORMATS = {  # bytes and mantissa bits
    "bfloat16": (2, 7),
    "float16": (2, 10),
    "float32": (4, 23),
    "float8_e4m3fn": (1, 3),
    "float8_e5m2": (1, 2),
    "uint8": (1, 3),
}


def must(held: bool, rule: str, got: object) -> None:
    """ValueError unless the rule is held."""
    if not held:
        raise ValueError(f"{rule}, got {got}")


def digest_of(bits: list[int]) -> int:
    total = 0
    for i, b in enumerate(bits):
        k = i * 0x9E3779B1 % (1 << 32)
        v = (b + k) % (1 << 32)
        total += (v ^ v >> 15) * (k | 1)
    return total % (1 << 64)


# ---- anchors ----


def decode_anchor(body: bytes, n: int, format: str) -> list[int]:
    width, found, at = FORMATS[format][0], [], 0
    for first in range(0, n, PART):
        size, rotated = min(PART, n - first), [0] * min(PART, n - first)
        for _ in range(width):
            must(at + 5 <= len(body), "an anchor must have all its planes", len(body))
            coding, stop = body[at], at + 5 + int.from_bytes(body[at + 1 : at + 5], "little")
            must(stop <= len(body), f"an anchor must have at least {stop} bytes", len(body))
            plane, at = body[at + 5 : stop], stop
            must(coding in (0, 1), "a plane's coding must be 0 or 1", coding)
            if coding == 1:
                stream = zlib.decompressobj(-15)
                try:
                    plane = stream.decompress(plane)
                except zlib.error as error:
                    raise ValueError(f"a plane must be deflated, got {error}") from error
                must(stream.eof and not stream.unused_data, "a stream must end with its bytes", stop)
            must(len(plane) == size, f"a plane must have {size} bytes", len(plane))
            rotated = [r << 8 | byte for r, byte in zip(rotated, plane, strict=True)]
        found += [r >> 1 | (r & 1) << 8 * width - 1 for r in rotated]
    must(at == len(body), "no bytes may be left over", len(body) - at)
    return found


# ---- patches ----


class Chance:
    def __init__(self) -> None:
        self.one, self.uses = 32768, 0

    def learn(self, bit: int) -> None:
        r = 65536 // (self.uses + 2)
        self.one += (65536 - self.one) * r // 65536 if bit else -(self.one * r // 65536)
        self.uses = min(self.uses + 1, 254)


class Decision(NamedTuple):
    chance: int
    range: int
    value: int
    bound: int
    bit: int


class Coded:
    """The coded bytes of a part, and the chances by which they are read."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.taken = raw, 0
        self.value, self.range = self.take(8), (1 << 64) - 1
        must(self.value < self.range, "value must be below range", self.value)
        self.chances: dict[tuple[Any, ...], Chance] = defaultdict(Chance)
        self.decisions: list[Decision] = []

    def take(self, size: int) -> int:
        first, self.taken = self.taken, self.taken + size
        return int.from_bytes(self.raw[first : self.taken].ljust(size, b"\0"), "big")

    def widen(self) -> None:
        if self.range < 1 << 32:
            self.range, self.value = self.range << 32, (self.value << 32) + self.take(4)

    def decide(self, *which: Any) -> int:
        chance = self.chances[which]
        bound = (self.range >> 16) * chance.one
        bit = int(self.value < bound)
        self.decisions.append(Decision(chance.one, self.range, self.value, bound, bit))
        if bit:
            self.range = bound
        else:
            self.value, self.range = self.value - bound, self.range - bound
        chance.learn(bit)
        self.widen()
        return bit

    def plain(self, bits: int) -> int:
        made = 0
        while bits:
            s = min(bits, 16)
            bits -= s
            self.range >>= s
            x = self.value // self.range
            must(x < 1 << s, f"{s} plain bits must be a number below 2^{s}", x)
            self.value -= x * self.range
            made = made << s | x
            self.widen()
        return made

    def number(self, longest: int, *whose: Any) -> int:
        below = 0
        while self.decide(*whose, "length", below):
            below += 1
            must(below < longest, f"a number must have at most {longest} bits", below + 1)
        made, left = 1, below
        for _ in range(min(below, 2)):
            made, left = made << 1 | self.decide(*whose, "bit", below, made), left - 1
        return made << left | self.plain(left)

    def finish(self) -> None:
        must(self.raw[-1:] != b"\0", "the last coded byte must not be 0", self.raw[-1:])
        must(len(self.raw) <= self.taken - 4, f"at most {self.taken - 4} bytes must be coded", len(self.raw))


def read_counts(body: bytes, elements: int) -> tuple[list[int], int]:
    """The changes of each class, and where the coded bytes begin."""
    counts, at = [], 1
    while len(counts) < MOST_CLASSES:
        count = shift = 0
        while True:
            must(at < len(body), "a body must have all its counts", counts)
            byte, at = body[at], at + 1
            count |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
            must(shift < 21, "a count must have at most 3 bytes", count)
        must(byte > 0 or shift == 7, "the last byte of several must not be 0", count)
        counts.append(count)
    must(0 < sum(counts) <= elements, f"1 to {elements} elements must change", sum(counts))
    return counts, at


def read_gaps_and_steps(coded: Coded, counts: list[int]) -> Iterator[tuple[int, int, int]]:
    """The class, the rank in it, and the step, of all changes."""
    mean = 0
    for class_, count in enumerate(counts):
        mean, rank = min(2 * mean, 1 << 28), -1
        for _ in range(count):
            bits = mean.bit_length()
            b = mean >> bits - 2 & 1 if bits >= 2 else 0
            p = max(bits - 11, 0)
            shape = b if p else max(2 * bits + b - 6, 2)
            gap = (coded.number(21, "gap", shape) - 1 << p) + coded.plain(p)
            must(gap < PART, "a gap must be shorter than a part", gap)
            mean += 4 * gap - mean // 64
            rank += gap + 1
            negative = coded.decide("sign", class_)
            size = coded.number(32, "step", class_)
            yield class_, rank, -size if negative else size


def decode_part(body: bytes, old: list[int], format: str) -> list[tuple[int, int]]:
    width, mantissa = FORMATS[format]
    fields, half = 1 << 8 * width - 1 - mantissa, 1 << 8 * width - 1
    counts, at = read_counts(body, len(old))
    coded = Coded(body[at:])
    found = list(read_gaps_and_steps(coded, counts))
    coded.finish()
    members: list[list[int]] = [[] for _ in range(MOST_CLASSES)]
    for i, bits in enumerate(old):
        members[min(max((bits >> mantissa) % fields - body[0], 0), MOST_CLASSES - 1)].append(i)
    changes = []
    for class_, rank, step in found:
        must(rank < len(members[class_]), f"class {class_} must have that many elements", rank + 1)
        i = members[class_][rank]
        at = (old[i] if old[i] < half else half - 1 - old[i]) + step
        must(-half <= at < half, "a step must lead to a value of the format", at)
        changes.append((i, at if at >= 0 else half - 1 - at))
    return sorted(changes)


def decode_patch(body: bytes, old: list[int], format: str) -> list[tuple[int, int]]:
    """The (position, bits) of all changes, in order; ValueError if malformed."""
    starts = range(0, len(old), PART)
    must(len(body) >= 4 * len(starts), "a patch must have the sizes of its parts", len(body))
    at, found = 4 * len(starts), []
    for k, first in enumerate(starts):
        size = int.from_bytes(body[4 * k : 4 * k + 4], "little")
        at += size
        must(at <= len(body), f"a patch must have at least {at} bytes", len(body))
        if size:
            changes = decode_part(body[at - size : at], old[first : first + PART], format)
            found += [(first + i, bits) for i, bits in changes]
    must(at == len(body), "no bytes may be left over", len(body) - at)
    return found
