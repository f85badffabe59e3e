"""Decode the body of a tight frame (codec 2) in plain integers, as docs/wire.md describes it.

Nothing here is fast: it is a second reading of the text, to compare other decoders with.
"""

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

PART, BLOCK = 1 << 18, 256  # elements
GATES = {(7, -126), (10, -14), (3, -6), (2, -14)}  # (mantissa, emin) of bf16, fp16, fp8_e4m3, fp8_e5m2
MOST = {"least": 1 << 31, "shift": 31, "levels": 3, "pulls": 3, "zero_11": 0, "zero_18": 0}
S = (65536, 71468, 77936, 84990, 92682, 101070, 110218, 120194)
ESCAPE, BUCKETS = 112, 56


class Head(NamedTuple):
    """The 20 bytes that open a frame; the text names the fields."""

    mantissa: int
    emin: int
    reach: int
    least: int
    shift: int
    levels: int
    pulls: int
    zero_11: int
    e0: int
    d0: int
    m0: int
    zero_18: int


class Weight(NamedTuple):
    """What both ends see of a weight."""

    E: int
    drop: int
    t: int
    negative: bool
    level: int
    context: int


def must(held: bool, rule: str, got: object) -> None:
    """ValueError unless the rule is held."""
    if not held:
        raise ValueError(f"{rule}, got {got}")


class Bytes:
    """The bytes of the body, taken in order."""

    def __init__(self, body: bytes):
        self.body, self.at = body, 0

    def take(self, size: int) -> bytes:
        self.at += size
        must(self.at <= len(self.body), f"the frame must have at least {self.at} bytes", len(self.body))
        return self.body[self.at - size : self.at]

    def flags(self, size: int) -> list[int]:
        """The places of the bits that are set in the next size bytes."""
        bits = int.from_bytes(self.take(size), "little")
        return [i for i in range(8 * size) if bits >> i & 1]


class Part:
    """The four states, the plain bits and the words of a part."""

    def __init__(self, reader: Bytes, words: int, plain: int):
        self.states = list(struct.unpack("<4Q", reader.take(32)))
        must(all(1 << 31 <= x < 1 << 63 for x in self.states), "a state must be in [2^31, 2^63)", self.states)
        self.plain, self.bit = reader.take(plain), 0
        self.words, self.word = struct.unpack(f"<{words}I", reader.take(4 * words)), 0

    def advance(self, state: int, b: int, start: int, share: int) -> None:
        """Take the decision [start, start + share) of 2^b out of a state."""
        x = self.states[state]
        x = share * (x >> b) + x % (1 << b) - start
        if x < 1 << 31:
            must(self.word < len(self.words), "a part must have the words it needs", len(self.words))
            x = (x << 32) + self.words[self.word]
            self.word += 1
        self.states[state] = x

    def yes(self, state: int, p: int) -> bool:
        """A yes or no, yes with probability p / 65536."""
        yes = self.states[state] % 65536 < p
        self.advance(state, 16, *((0, p) if yes else (p, 65536 - p)))
        return yes

    def symbol(self, state: int, slots: list[tuple[int, int, int]]) -> int:
        """A symbol of the level that has these slots."""
        must(bool(slots), "the level of an entry must have symbols", "none")
        symbol, start, share = slots[self.states[state] % 4096]
        self.advance(state, 12, start, share)
        return symbol

    def number(self, bits: int) -> int:
        """A number of so many plain bits, its lowest bit first."""
        first, self.bit = self.bit, self.bit + bits
        must(self.bit <= 8 * len(self.plain), f"a part must have {self.bit} plain bits", 8 * len(self.plain))
        held = int.from_bytes(self.plain[first // 8 : (self.bit + 7) // 8], "little")
        return (held >> first % 8) % (1 << bits)

    def finish(self) -> None:
        """ValueError unless all was used up and the states are 2^31."""
        must(self.states == [1 << 31] * 4, "all states of a part must end at 2^31", self.states)
        must(self.word == len(self.words), "no words may be left over", len(self.words) - self.word)
        rest = 8 * len(self.plain) - self.bit
        must(rest < 8 and not self.number(rest), "no bytes or set bits of plain bits may be left over", rest)


def probability(code: int) -> int:
    """What the code of a probability stands for, in 1/65536."""
    must(code > 0, "the code of a probability must be within 1 … 255", code)
    if code < 128:
        return 65536 - probability(256 - code)
    o = S[(code - 128) % 8] << (code - 128) // 8
    return 65536 * o // (o + 65536)


def read_head(reader: Bytes, has_momentum: bool) -> Head:
    head = Head._make(struct.unpack("<BbHIBBBBhhhH", reader.take(20)))
    must((head.mantissa, head.emin) in GATES, "mantissa and emin must be a format's", head[:2])
    for field, most in MOST.items():
        must(getattr(head, field) <= most, f"{field} must be <= {most}", getattr(head, field))
    must(has_momentum or head.pulls == 0, "pulls must be 0 without an m", head.pulls)
    return head


def read_level(reader: Bytes) -> list[tuple[int, int, int]]:
    """The (symbol, start, share) of each of a level's 4096 slots; none if it has no symbols."""
    occur = reader.flags(15)
    shares = struct.unpack(f"<{len(occur)}H", reader.take(2 * len(occur)))
    must(all(symbol <= ESCAPE for symbol in occur), "symbols must be within 0 … 112", occur)
    must(0 not in shares, "a share must be > 0", shares)
    must(not occur or sum(shares) == 4096, "a level's shares must be 4096 together", shares)
    slots: list[tuple[int, int, int]] = []
    for symbol, share in zip(occur, shares, strict=True):
        slots += [(symbol, len(slots), share)] * share
    return slots


def clip(x: int, a: int, b: int) -> int:
    return min(max(x, a), b)


def see(head: Head, theta: int, m: int) -> Weight:
    """What both ends see of the weight with these FP32 bits; m is not looked at if pulls = 0."""
    field, fraction = theta >> 23 & 255, theta & 0x7FFFFF
    exponent = max(field, 1)
    mant = fraction + ((1 << 23) if field else 0)
    drop = min(23 - head.mantissa + max(head.emin + 127 - exponent, 0), 25)
    past = (1 << drop - 1) - mant % (1 << drop)
    t = abs(past)
    negative = (past > 0) != bool(theta >> 31)
    octave = exponent + t.bit_length() - 1  # E - 1 if t = 0
    level = clip(exponent - head.e0, 0, 7) >> head.levels
    context = level * 16 + clip(octave - head.d0, 0, 15)
    if head.pulls:
        size = clip((m >> 23 & 255) - head.m0, 0, 3) >> (3 - head.pulls)
        context = (context << head.pulls) + 2 * size + (bool(m >> 31) == negative)
    return Weight(exponent, drop, t, negative, level, context)


def read_value(head: Head, weight: Weight, nearest: bool, symbol: int, part: Part) -> int:
    """The FP32 bits of s, with the plain bits that its symbol asks for."""
    if symbol == ESCAPE:
        bits = part.number(32)
    else:
        b = symbol % BUCKETS
        x = b if b < 2 else ((2 + b % 2) << (b // 2 - 1)) + part.number(b // 2 - 1)
        away = 2 * weight.t if nearest else 2 * ((1 << weight.drop) - weight.t)
        u = -(-max(away * head.reach // 256, head.least) >> head.shift)  # rounded up
        h = (u + x if symbol < BUCKETS else u - x - 1) << head.shift
        must(0 <= h < 1 << 52, "h must be in [0, 2^52)", h)
        size = math.ldexp(h, weight.E - 151)  # exact: h has 52 bits, and a double's range is far wider
        try:
            (bits,) = struct.unpack("<I", struct.pack("<f", size))  # to nearest, ties to even
        except OverflowError:
            raise ValueError(f"a value must be finite in FP32, got {size}") from None
        bits |= (nearest == weight.negative) << 31
    must(bits >> 23 & 255 < 255, "a value must be finite in FP32, by its bits", hex(bits))
    return bits


def read_block(
    head: Head, part: Part, block: list[tuple[int, Weight]], chances: dict[int, int], sides: dict[int, int],
    levels: list[list[tuple[int, int, int]]],
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """The entries of a block of (position, weight): first which elements are sent, then what."""
    asked = [(i, weight) for i, weight in block if weight.context in chances]
    sent = [pair for turn, pair in enumerate(asked) if part.yes(turn % 4, chances[pair[1].context])]
    for turn, (i, weight) in enumerate(sent):
        nearest = part.yes(turn % 4, sides[weight.context])
        symbol = part.symbol(turn % 4, levels[weight.level])
        yield i, read_value(head, weight, nearest, symbol, part)


def decode(body: bytes, k: int, theta: list[int], momentum: list[int] | None) -> list[tuple[int, int]]:
    """The (position, FP32 bits of the value) of all k entries of a frame, in order; ValueError if malformed.

    theta and momentum are the FP32 bits of the θ and m of the frame's elements.
    """
    n, ms = len(theta), [0] * len(theta) if momentum is None else momentum
    must((k == 0) == (not body), "an empty body and k = 0 must come together", (len(body), k))
    if not body:
        return []
    reader = Bytes(body)
    head = read_head(reader, momentum is not None)
    used = reader.flags((8 >> head.levels) * 16 * (1 << head.pulls) // 8)
    chances = dict(zip(used, map(probability, reader.take(len(used))), strict=True))
    sides = dict(zip(used, map(probability, reader.take(len(used))), strict=True))
    levels = [read_level(reader) for _ in range(8 >> head.levels)]
    parts = [(first, *struct.unpack("<3I", reader.take(12))) for first in range(0, n, PART)]
    must(sum(entries for _, entries, _, _ in parts) == k, f"the parts must have {k} entries together", parts)
    found: list[tuple[int, int]] = []
    for first, entries, words, plain in parts:
        part, before = Part(reader, words, plain), len(found)
        end = min(first + PART, n)
        for begin in range(first, end, BLOCK):
            block = [(i, see(head, theta[i], ms[i])) for i in range(begin, min(begin + BLOCK, end))]
            found += read_block(head, part, block, chances, sides, levels)
        must(len(found) - before == entries, f"a part must have its {entries} entries", len(found) - before)
        part.finish()
    must(reader.at == len(body), "no bytes of the frame may be left over", len(body) - reader.at)
    return found
