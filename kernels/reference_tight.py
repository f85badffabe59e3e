"""The specification of the tight code: entries in few bytes, given what sender and receiver both hold.

All sites hold θ and m. So a receiver knows how far each weight is from the border at which its cast changes,
and in which direction m would push it. That predicts whether the weight is sent, in which direction, and how
far it moves at least. In addition, nearly every s is a whole multiple of half an FP32 ulp of θ. What can't be
predicted is coded by an rANS coder with the statistics of the frame. docs/wire.md describes the format to the
byte; this is the same, readable and slow.

What both ends know of a weight, from the FP32 bits of θ and m:

    E       exponent of θ (1 for zeros and denormals), and mant its mantissa with the leading bit
    drop    how many bits of the mantissa the gate's format drops
    t       distance of θ from the nearest border, in FP32 ulps of θ; `up` if that lies away from zero
    level   class of E; place: class of t · ulp; pull: whether m points to the nearest border, and its size
    context (level, place, pull)

A frame has for each context the probability that a weight is sent, and the probability that it moves towards
the nearest border; and for each level the distribution of |s| minus the least that the gate sends.
"""

import struct
from collections import Counter
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .types import BLOCK, Entries, Gate, Known, MalformedError

PART = 1 << 18  # elements that are coded independently, so that many threads can work on a frame
LANES = 4  # coder states that take turns, so that a CPU can process them in parallel
LOW = 1 << 31  # a state lies in LOW … 2^63
PLACES = 16
BUCKETS = 56  # of a number below 2^28
ESCAPE = 2 * BUCKETS
SYMBOLS = 2 * BUCKETS + 1
HEAD = struct.Struct("<BbHIBBBBhhhH")  # a Frame, with a zero after `pulls` and one at the end
SIZES = struct.Struct("<III")  # of a part: entries, words, bytes of plain bits


class Wrong(StrEnum):
    """What can be wrong with a frame, in the order of the error numbers of cpu/unpack.c."""

    SHORT = "it ends too early"
    HEAD_RANGE = "a number of its head is out of range"
    NO_MOMENTUM = "it was coded with an outer momentum, which there is not"
    STRAY_BITS = "bits are set that mean nothing"
    NO_CHANCE = "a probability of zero"
    BAD_SHARES = "shares that do not add up"
    PART_COUNTS = "a part has another number of entries than it says"
    BAD_STATE = "a state of the coder is out of range"
    NO_SYMBOLS = "an entry of a level that has no symbols"
    BAD_VALUE = "a value is below zero, or too large"
    LEFT_OVER = "something is left over"
    NOT_FINITE = "a value is infinite or NaN"


# Explicit mantissa bits of a gate's format, and the least exponent of its normal numbers.
FORMATS = {
    torch.bfloat16: (7, -126),
    torch.float16: (10, -14),
    torch.float8_e4m3fn: (3, -6),
    torch.float8_e5m2: (2, -14),
}

# Probabilities, in 1/65536: the odds are 2^((code − 128) / 8).
_STEPS = (65536, 71468, 77936, 84990, 92682, 101070, 110218, 120194)  # 2^(j/8), in 1/65536
_UPPER = [
    (odds << 16) // (odds + 65536) for odds in (_STEPS[c % 8] << c // 8 for c in range(128))
]  # codes 128 … 255
PROBABILITY = [0, *(65536 - p for p in _UPPER[:0:-1]), *_UPPER]


class Frame(NamedTuple):
    """The fields of a frame's head."""

    mantissa: int  # explicit bits of the gate's format
    emin: int  # its least exponent of normal numbers
    reach: int  # 256 / γ
    least: int  # the gate's margin, in half FP32 ulps
    shift: int  # values are multiples of 2^shift half ulps
    levels: int  # 8 >> levels of them
    pulls: int  # 0: m is not looked at; else 2^pulls of them
    e0: int
    d0: int
    m0: int

    @property
    def contexts(self) -> int:
        return (8 >> self.levels) * PLACES << self.pulls


class Views(NamedTuple):
    """What both ends know of some weights. [n] int64 each"""

    exponent: np.ndarray
    distance: np.ndarray  # t
    step: np.ndarray  # the two borders are this many ulps apart
    negative: np.ndarray  # whether s < 0 moves the weight towards the nearest border
    octave: np.ndarray  # of t · ulp
    agrees: np.ndarray  # whether m points towards that border
    pull: np.ndarray  # exponent of m


def views(known: Known, mantissa: int, emin: int) -> Views:
    bits = _bits(known.anchor)
    exponent = np.maximum(bits >> 23 & 255, 1)
    mant = (bits & 0x7FFFFF) | np.where(bits >> 23 & 255, 0x800000, 0)
    drop = np.minimum(23 - mantissa + np.maximum(emin + 127 - exponent, 0), 25)
    past = (1 << drop - 1) - (mant & (1 << drop) - 1)
    distance = np.abs(past)
    negative = (past > 0) ^ (bits >> 31)
    # E + ⌊log2 t⌋, where the logarithm of 0 counts as −1.
    octave = exponent + np.frexp(distance.astype(np.float64))[1] - 1
    m = np.zeros_like(bits) if known.momentum is None else _bits(known.momentum)
    return Views(exponent, distance, 1 << drop, negative, octave, (m >> 31) == negative, m >> 23 & 255)


def contexts(seen: Views, frame: Frame) -> tuple[np.ndarray, np.ndarray]:
    """-> each weight's level and its context"""
    level = np.clip(seen.exponent - frame.e0, 0, 7) >> frame.levels
    place = np.clip(seen.octave - frame.d0, 0, PLACES - 1)
    context = level * PLACES + place
    if frame.pulls:
        size = np.clip(seen.pull - frame.m0, 0, 3) >> 3 - frame.pulls
        context = context << frame.pulls | size << 1 | seen.agrees
    return level, context


def least_sent(seen: Views, i: int, near: bool, frame: Frame) -> int:
    """The least |s| that the gate sends for weight i towards one border, in 2^shift half ulps."""
    away = 2 * (int(seen.distance[i]) if near else int(seen.step[i] - seen.distance[i]))
    least = max(away * frame.reach >> 8, frame.least)
    return least + (1 << frame.shift) - 1 >> frame.shift


def bucket(x: int) -> tuple[int, int, int]:
    """-> the bucket of x ≥ 0 (there are two to an octave), the number of plain bits that follow, and these"""
    if x < 2:
        return x, 0, 0
    plain = x.bit_length() - 2
    return 2 * plain + (x >> plain), plain, x & (1 << plain) - 1


def from_bucket(b: int) -> tuple[int, int]:
    """-> the least x of a bucket, and the number of plain bits that follow"""
    return (b, 0) if b < 2 else ((2 + b % 2) << b // 2 - 1, b // 2 - 1)


def multiple(value: float, exponent: int) -> int | None:
    """|value| in half FP32 ulps at this exponent, if it is a whole number below 2^52."""
    scaled = np.ldexp(abs(value), 151 - exponent)
    return int(scaled) if scaled < 2**52 and scaled == int(scaled) else None


# ---- encoding ----


def reach_of(gate: Gate) -> tuple[int, int, int, int]:
    """The fields of a frame that describe a gate: mantissa, emin, reach, least."""
    reach = min(max(round(256 / gate.gain), 1), 65535)
    return *FORMATS[gate.dtype], reach, min(int(gate.margin * 2**17), 2**31)


def pack(entries: Entries, known: Known, ahead: int = 0) -> Tensor:
    """The entries of a vector, as a frame, which is empty without entries; behind `ahead` bytes of room.

    -> uint8
    """
    assert entries.starts is not None
    assert entries.offsets is not None
    where = entries.indices().numpy()
    if not len(where):
        return torch.empty(ahead, dtype=torch.uint8, device="cpu")
    values = entries.values[slice(*entries.ends)].numpy()
    mantissa, emin = FORMATS[known.gate.dtype]
    seen = views(known, mantissa, emin)
    frame = _choose(where, values, seen, known)
    level, context = contexts(seen, frame)
    symbols = [_symbol(i, v, seen, frame) for i, v in zip(where, values, strict=True)]

    sent, every = (np.bincount(c, minlength=frame.contexts) for c in (context[where], context))
    near = np.bincount(context[where], [s[0] for s in symbols], frame.contexts).astype(int)
    chances = [_code(int(a), int(n)) if a else 0 for a, n in zip(sent, every, strict=True)]
    sides = [_code(int(a), int(n)) if n else 0 for a, n in zip(near, sent, strict=True)]
    counts = [Counter[int]() for _ in range(8 >> frame.levels)]
    for i, s in zip(where, symbols, strict=True):
        counts[level[i]][s[1]] += 1
    tables = [_shares(c) for c in counts]

    out = [
        bytes(ahead),
        HEAD.pack(*frame[:7], 0, *frame[7:], 0),
        _bitmap([c > 0 for c in chances]),
        bytes(filter(None, chances)),
    ]
    out.append(bytes(filter(None, sides)))
    for table in tables:
        out.append(_bitmap([s in table for s in range(SYMBOLS)]))
        out.append(b"".join(share.to_bytes(2, "little") for _, share in table.values()))
    parts = []
    for first in range(0, len(context), PART):
        a, b = np.searchsorted(where, (first, first + PART))
        states, words, plain = _encode_part(
            context[first : first + PART],
            where[a:b] - first,
            symbols[a:b],
            level[first:],
            chances,
            sides,
            tables,
        )
        out.append(SIZES.pack(b - a, len(words), len(plain)))
        parts += [struct.pack("<4Q", *states), plain, struct.pack(f"<{len(words)}I", *words)]
    return torch.frombuffer(bytearray(b"".join([*out, *parts])), dtype=torch.uint8)


def _choose(where: np.ndarray, values: np.ndarray, seen: Views, known: Known) -> Frame:
    """Choose the parameters of a frame for its entries."""
    multiples = [multiple(float(v), int(seen.exponent[i])) for i, v in zip(where, values, strict=True)]
    zeros = Counter(min((m & -m).bit_length() - 1, 31) for m in multiples if m)
    k = len(where)
    odd = k - zeros.total()  # not whole multiples: each takes an escape, about 32 bits
    cost, shift = 32 * odd, 0
    for s in range(1, 32):
        odd += zeros[s - 1]
        if 32 * odd - s * (k - odd) < cost:
            cost, shift = 32 * odd - s * (k - odd), s
    size = sum(k >= limit for limit in (2048, 8192, 32768, 131072))
    levels, pulls = ((3, 1), (2, 1), (1, 2), (1, 3), (0, 3))[size]
    if known.momentum is None:
        levels, pulls = max(levels - 1, 0), 0
    mantissa, emin, reach, least = reach_of(known.gate)
    usual = _median_exponent(_bits(torch.from_numpy(values)))
    return Frame(
        mantissa,
        emin,
        reach,
        least,
        shift=shift,
        levels=levels,
        pulls=pulls,
        e0=usual + mantissa - 3,  # the lowest of the 8: borders a sixteenth of a usual s apart
        d0=int(seen.octave[where].max()) - PLACES + 2,  # nothing is sent in the last place
        m0=0 if known.momentum is None else _median_exponent(_bits(known.momentum)[where]) - 2,
    )


def _symbol(i: int, value: np.float32, seen: Views, frame: Frame) -> tuple[bool, int, int, int]:
    """-> whether it moves towards the nearest border; its symbol; the number of plain bits, and these"""
    near = bool(np.signbit(value)) == bool(seen.negative[i])
    m = multiple(float(value), int(seen.exponent[i]))
    if m is not None and m % (1 << frame.shift) == 0:
        x = (m >> frame.shift) - least_sent(seen, i, near, frame)
        b, plain, bits = bucket(x if x >= 0 else -x - 1)
        if b < BUCKETS:
            return near, b if x >= 0 else BUCKETS + b, plain, bits
    return near, ESCAPE, 32, int(value.view(np.uint32))


def _code(yes: int, of: int) -> int:
    """The code of the probability nearest to yes / of."""
    c = next((c for c in range(1, 256) if PROBABILITY[c] * of >= yes << 16), 255)
    if c > 1 and (yes << 16) - PROBABILITY[c - 1] * of < PROBABILITY[c] * of - (yes << 16):
        c -= 1
    return c


def _shares(counts: Counter[int]) -> dict[int, tuple[int, int]]:
    """Shares of 4096 for the symbols that occur, none of them 0. -> {symbol: (first slot, share)}"""
    total = counts.total()
    shares = {s: max(1, counts[s] * 4096 // total) for s in sorted(counts)}
    for _ in range(sum(shares.values()) - 4096):
        shares[max(shares, key=lambda s: (shares[s], -s))] -= 1
    if shares:
        shares[max(shares, key=lambda s: (shares[s], -s))] += 4096 - sum(shares.values())
    table, start = {}, 0
    for s, share in shares.items():
        table[s] = (start, share)
        start += share
    return table


def _encode_part(
    context: np.ndarray,
    where: np.ndarray,
    symbols: list[tuple[bool, int, int, int]],
    level: np.ndarray,
    chances: list[int],
    sides: list[int],
    tables: list[dict[int, tuple[int, int]]],
) -> tuple[list[int], list[int], bytes]:
    """-> the states that decoding starts with, the words that they read, the plain bits"""
    turns: list[tuple[int, int, int, int]] = []  # lane, and the symbol's start, share and scale
    at, plain, length = 0, 0, 0
    for first in range(0, len(context), BLOCK):
        block = context[first : first + BLOCK]
        here = []
        while at + len(here) < len(where) and where[at + len(here)] < first + BLOCK:
            here.append(at + len(here))
        at += len(here)
        places = {int(where[j]) - first for j in here}
        for turn, i in enumerate(i for i, c in enumerate(block) if chances[c]):
            turns.append((turn % LANES, *_yes_or_no(i in places, PROBABILITY[chances[block[i]]])))
        for turn, j in enumerate(here):
            near, symbol, size, bits = symbols[j]
            i = where[j]
            turns.append((turn % LANES, *_yes_or_no(near, PROBABILITY[sides[context[i]]])))
            turns.append((turn % LANES, *tables[level[i]][symbol], 12))
            plain |= bits << length
            length += size
    states, words = [LOW] * LANES, []
    for lane, start, share, scale in reversed(turns):
        x = states[lane]
        if x >= share << 63 - scale:
            words.append(x & 0xFFFFFFFF)
            x >>= 32
        states[lane] = (x // share << scale) + x % share + start
    return states, words[::-1], plain.to_bytes(-(-length // 8), "little")


def _yes_or_no(yes: bool, chance: int) -> tuple[int, int, int]:
    return (0, chance, 16) if yes else (chance, 65536 - chance, 16)


# ---- decoding ----


def unpack(body: Tensor, count: int, known: Known) -> Entries:
    """The `count` entries of a frame. The limits on memory of `kernels.unpack` hold for the C home only.

    Raises:
        MalformedError: these are not the bytes of a frame.
    """
    raw, n = body.numpy().tobytes(), known.numel
    check_size(body, count, n)
    where: list[int] = []
    values: list[np.float32] = []
    if count:
        reader = _Reader(raw)
        frame = _read_head(reader, known)
        used = reader.bitmap(frame.contexts)
        chances = reader.where(used)
        sides = reader.where(used)
        tables = [_read_shares(reader) for _ in range(8 >> frame.levels)]
        sizes = [SIZES.unpack(reader.take(SIZES.size)) for _ in range(0, n, PART)]
        if sum(size[0] for size in sizes) != count:
            raise MalformedError(Wrong.PART_COUNTS)
        seen = views(known, frame.mantissa, frame.emin)
        level, context = contexts(seen, frame)
        for first, (entries, words, plain) in zip(range(0, n, PART), sizes, strict=True):
            states = list(struct.unpack("<4Q", reader.take(8 * LANES)))
            if not all(LOW <= x < 1 << 63 for x in states):
                raise MalformedError(Wrong.BAD_STATE)
            bits = _Bits(reader.take(plain))
            lanes = _Lanes(states, struct.unpack(f"<{words}I", reader.take(4 * words)))
            found = len(where)
            for block in range(first, min(first + PART, n), BLOCK):
                stop = min(block + BLOCK, n)
                active = [i for i in range(block, stop) if chances[context[i]]]
                here = [i for turn, i in enumerate(active) if lanes.yes(turn % LANES, chances[context[i]])]
                for turn, i in enumerate(here):
                    near = lanes.yes(turn % LANES, sides[context[i]])
                    symbol = lanes.symbol(turn % LANES, tables[level[i]])
                    values.append(_value(i, near, symbol, bits, seen, frame))
                where += here
            if len(where) - found != entries:
                raise MalformedError(Wrong.PART_COUNTS)
            lanes.finish()
            bits.finish()
        reader.finish()
    if not np.isfinite(values).all():
        raise MalformedError(Wrong.NOT_FINITE)
    return Entries.at(
        torch.tensor(where, dtype=torch.int64), torch.from_numpy(np.array(values, dtype=np.float32)), n
    )


def check_size(body: Tensor, count: int, n: int) -> None:
    if not 0 <= count <= n or (count == 0) != (body.numel() == 0):
        raise MalformedError(f"{body.numel()} bytes can't hold {count} of {n} entries")


def _value(i: int, near: bool, symbol: int, bits: "_Bits", seen: Views, frame: Frame) -> np.float32:
    if symbol == ESCAPE:
        return np.uint32(bits.take(32)).view(np.float32)
    x, plain = from_bucket(symbol % BUCKETS)
    x += bits.take(plain)
    least = least_sent(seen, i, near, frame)
    m = (least + x if symbol < BUCKETS else least - x - 1) << frame.shift
    if not 0 <= m < 1 << 52:
        raise MalformedError(Wrong.BAD_VALUE)
    with np.errstate(over="ignore"):  # infinities are refused at the end, all together
        size = np.float32(np.ldexp(float(m), int(seen.exponent[i]) - 151))
    return -size if near == bool(seen.negative[i]) else size


def _read_head(reader: "_Reader", known: Known) -> Frame:
    fields = HEAD.unpack(reader.take(HEAD.size))
    frame = Frame._make(fields[:7] + fields[8:11])
    if (frame.mantissa, frame.emin) not in FORMATS.values():
        raise MalformedError(Wrong.HEAD_RANGE)
    too_large = frame.levels > 3 or frame.pulls > 3 or frame.shift > 31 or frame.least > 2**31
    if too_large or fields[7] or fields[11]:  # these two must be zero
        raise MalformedError(Wrong.HEAD_RANGE)
    if frame.pulls and known.momentum is None:
        raise MalformedError(Wrong.NO_MOMENTUM)
    return frame


def _read_shares(reader: "_Reader") -> dict[int, tuple[int, int]]:
    table, start = {}, 0
    for symbol, occurs in enumerate(reader.bitmap(SYMBOLS)):
        if occurs:
            share = int.from_bytes(reader.take(2), "little")
            table[symbol] = (start, share)
            start += share
            if not share:
                raise MalformedError(Wrong.BAD_SHARES)
    if table and start != 4096:
        raise MalformedError(Wrong.BAD_SHARES)
    return table


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def take(self, size: int) -> bytes:
        taken = self.raw[self.at : self.at + size]
        if len(taken) < size:
            raise MalformedError(Wrong.SHORT)
        self.at += size
        return taken

    def bitmap(self, size: int) -> list[bool]:
        raw = int.from_bytes(self.take(-(-size // 8)), "little")
        if raw >> size:
            raise MalformedError(Wrong.STRAY_BITS)
        return [bool(raw >> i & 1) for i in range(size)]

    def where(self, used: list[bool]) -> list[int]:
        codes = iter(self.take(sum(used)))
        found = [next(codes) if u else 0 for u in used]
        if any(u and not c for u, c in zip(used, found, strict=True)):
            raise MalformedError(Wrong.NO_CHANCE)
        return found

    def finish(self) -> None:
        if self.at != len(self.raw):
            raise MalformedError(Wrong.LEFT_OVER)


class _Lanes:
    def __init__(self, states: list[int], words: tuple[int, ...]) -> None:
        self.states, self.words, self.at = states, words, 0

    def _advance(self, lane: int, start: int, share: int, scale: int) -> None:
        x = self.states[lane]
        x = share * (x >> scale) + (x & (1 << scale) - 1) - start
        if x < LOW:
            if self.at == len(self.words):
                raise MalformedError(Wrong.SHORT)
            x = x << 32 | self.words[self.at]
            self.at += 1
        self.states[lane] = x

    def yes(self, lane: int, code: int) -> bool:
        chance = PROBABILITY[code]
        yes = self.states[lane] & 0xFFFF < chance
        self._advance(lane, *_yes_or_no(yes, chance))
        return yes

    def symbol(self, lane: int, table: dict[int, tuple[int, int]]) -> int:
        slot = self.states[lane] & 4095
        for symbol, (start, share) in table.items():
            if start <= slot < start + share:
                self._advance(lane, start, share, 12)
                return symbol
        raise MalformedError(Wrong.NO_SYMBOLS)

    def finish(self) -> None:
        if self.states != [LOW] * LANES or self.at != len(self.words):
            raise MalformedError(Wrong.LEFT_OVER)


class _Bits:
    def __init__(self, raw: bytes) -> None:
        self.left, self.length = int.from_bytes(raw, "little"), 8 * len(raw)

    def take(self, size: int) -> int:
        if size > self.length:
            raise MalformedError(Wrong.SHORT)
        taken = self.left & (1 << size) - 1
        self.left >>= size
        self.length -= size
        return taken

    def finish(self) -> None:
        if self.left or self.length >= 8:
            raise MalformedError(Wrong.LEFT_OVER)


def _bits(x: Tensor) -> np.ndarray:
    return x.numpy().view(np.uint32).astype(np.int64)


def _median_exponent(bits: np.ndarray) -> int:
    return int(np.sort(bits >> 23 & 255)[len(bits) // 2])


def _bitmap(flags: list[bool]) -> bytes:
    raw = sum(1 << i for i, flag in enumerate(flags) if flag)
    return raw.to_bytes(-(-len(flags) // 8), "little")
