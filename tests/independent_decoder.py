"""A second decoder of the tight code, written from the README's text alone.

Integers and struct, one decision after the other: slow, and without a line of the library's.
"""

import struct
from math import ldexp

STEPS = (65536, 71468, 77936, 84990, 92682, 101070, 110218, 120194)
FORMATS = {(7, -126), (10, -14), (3, -6), (2, -14)}
PART, BLOCK, SYMBOLS, ESCAPE = 1 << 18, 256, 113, 112


class RefusedError(Exception):
    """These bytes are no frame."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise RefusedError(what)


def decode(body: bytes, k: int, theta: list[int], m: list[int] | None) -> list[tuple[int, int]]:
    """The entries of a frame as (index, FP32 bits), given the FP32 bits of θ and m."""
    n = len(theta)
    require(k <= n and (k == 0) == (body == b""), "size")
    return Frame(body, k, theta, m).entries() if k else []


def clip(x: int, a: int, b: int) -> int:
    return min(max(x, a), b)


def probability(code: int) -> int:
    if code < 128:
        return 65536 - probability(256 - code)
    j = code - 128
    odds = STEPS[j % 8] << j // 8
    return 65536 * odds // (odds + 65536)


class Frame:
    def __init__(self, body: bytes, k: int, theta: list[int], m: list[int] | None) -> None:
        self.body, self.at, self.k, self.theta, self.m = body, 0, k, theta, m
        self.read_head()
        self.read_tables()

    def take(self, size: int) -> bytes:
        require(self.at + size <= len(self.body), "it ends too early")
        self.at += size
        return self.body[self.at - size : self.at]

    def bitmap(self, size: int) -> list[int]:
        raw = int.from_bytes(self.take((size + 7) // 8), "little")
        require(raw >> size == 0, "stray bits")
        return [i for i in range(size) if raw >> i & 1]

    def read_head(self) -> None:
        (mantissa, emin, self.reach, self.least, self.shift, levels, pulls, zero) = struct.unpack(
            "<BbHIBBBB", self.take(12)
        )
        self.e0, self.d0, self.m0, last = struct.unpack("<hhhH", self.take(8))
        require((mantissa, emin) in FORMATS, "format")
        require(self.least <= 1 << 31 and self.shift <= 31 and levels <= 3 and pulls <= 3, "range")
        require(zero == 0 and last == 0, "zeros")
        require(pulls == 0 or self.m is not None, "no m")
        self.mantissa, self.emin, self.levels, self.pulls = mantissa, emin, levels, pulls

    def read_tables(self) -> None:
        count = 8 >> self.levels
        used = self.bitmap(count * 16 << self.pulls)
        chances, sides = self.take(len(used)), self.take(len(used))
        require(0 not in chances and 0 not in sides, "probability of zero")
        self.chance = {c: probability(code) for c, code in zip(used, chances, strict=True)}
        self.side = {c: probability(code) for c, code in zip(used, sides, strict=True)}
        self.shares: list[list[tuple[int, int, int]]] = []  # of each level: symbol, start, share
        for _ in range(count):
            table, start = [], 0
            for symbol in self.bitmap(SYMBOLS):
                (share,) = struct.unpack("<H", self.take(2))
                require(share > 0, "share of zero")
                table.append((symbol, start, share))
                start += share
            require(start == 4096 or not table, "shares")
            self.shares.append(table)

    def entries(self) -> list[tuple[int, int]]:
        n = len(self.theta)
        sizes = [struct.unpack("<III", self.take(12)) for _ in range(0, n, PART)]
        require(sum(size[0] for size in sizes) == self.k, "entries of the parts")
        found: list[tuple[int, int]] = []
        for first, (entries, words, plain) in zip(range(0, n, PART), sizes, strict=True):
            part = Part(self.take(32), self.take(plain), self.take(4 * words))
            here: list[tuple[int, int]] = []
            for block in range(first, min(first + PART, n), BLOCK):
                here += self.block(part, block, min(block + BLOCK, first + PART, n))
            require(len(here) == entries, "entries of a part")
            part.finish()
            found += here
        require(self.at == len(self.body), "left over")
        return found

    def block(self, part: "Part", first: int, stop: int) -> list[tuple[int, int]]:
        asked = [w for w in (Weight(self, i) for i in range(first, stop)) if w.context in self.chance]
        sent = [w for turn, w in enumerate(asked) if part.yes(turn % 4, self.chance[w.context])]
        found = []
        for turn, w in enumerate(sent):
            nearest = part.yes(turn % 4, self.side[w.context])
            symbol = part.symbol(turn % 4, self.shares[w.level])
            found.append((w.index, w.value(symbol, nearest, part)))
        return found


class Weight:
    """What both ends see of a weight."""

    def __init__(self, frame: Frame, index: int) -> None:
        bits = frame.theta[index]
        sign, field, fraction = bits >> 31, bits >> 23 & 255, bits & 0x7FFFFF
        self.frame, self.index = frame, index
        self.E = max(field, 1)
        mant = fraction + (1 << 23 if field else 0)
        self.drop = min(23 - frame.mantissa + max(frame.emin + 127 - self.E, 0), 25)
        past = (1 << self.drop - 1) - mant % (1 << self.drop)
        self.t = abs(past)
        self.negative = (past > 0) != bool(sign)
        octave = self.E + self.t.bit_length() - 1  # of t = 0: E − 1
        self.level = clip(self.E - frame.e0, 0, 7) >> frame.levels
        self.context = self.level * 16 + clip(octave - frame.d0, 0, 15)
        if frame.pulls:
            assert frame.m is not None
            m = frame.m[index]
            size = clip((m >> 23 & 255) - frame.m0, 0, 3) >> 3 - frame.pulls
            agrees = bool(m >> 31) == self.negative
            self.context = (self.context << frame.pulls) + 2 * size + agrees

    def value(self, symbol: int, nearest: bool, part: "Part") -> int:
        """FP32 bits."""
        bits = part.plain(32) if symbol == ESCAPE else self.multiple(symbol, nearest, part)
        require(bits >> 23 & 255 != 255, "infinite or NaN")
        return bits

    def multiple(self, symbol: int, nearest: bool, part: "Part") -> int:
        frame, b = self.frame, symbol % 56
        x = b if b < 2 else ((2 + b % 2) << b // 2 - 1) + part.plain(b // 2 - 1)
        away = 2 * self.t if nearest else 2 * ((1 << self.drop) - self.t)
        least = max(away * frame.reach // 256, frame.least)
        u = -(-least // (1 << frame.shift))
        h = (u + x if symbol < 56 else u - x - 1) << frame.shift
        require(0 <= h < 1 << 52, "value")
        try:
            raw = struct.pack("<f", ldexp(float(h), self.E - 151))
        except OverflowError:
            raise RefusedError("infinite") from None
        return int.from_bytes(raw, "little") | (0x80000000 if nearest == self.negative else 0)


class Part:
    """The coder's states, words and plain bits of a part."""

    def __init__(self, states: bytes, plain: bytes, words: bytes) -> None:
        self.states = list(struct.unpack("<4Q", states))
        require(all(1 << 31 <= x < 1 << 63 for x in self.states), "state")
        self.words = list(struct.unpack(f"<{len(words) // 4}I", words))
        self.read = 0
        self.bits, self.bits_left = int.from_bytes(plain, "little"), 8 * len(plain)

    def yes(self, lane: int, p: int) -> bool:
        if self.states[lane] % 65536 < p:
            self.advance(lane, 0, p, 16)
            return True
        self.advance(lane, p, 65536 - p, 16)
        return False

    def symbol(self, lane: int, table: list[tuple[int, int, int]]) -> int:
        slot = self.states[lane] % 4096
        for symbol, start, share in table:
            if start <= slot < start + share:
                self.advance(lane, start, share, 12)
                return symbol
        raise RefusedError("a level without symbols")

    def advance(self, lane: int, start: int, share: int, b: int) -> None:
        x = self.states[lane]
        x = share * (x >> b) + x % (1 << b) - start
        if x < 1 << 31:
            require(self.read < len(self.words), "no word left")
            x = (x << 32) + self.words[self.read]
            self.read += 1
        self.states[lane] = x

    def plain(self, size: int) -> int:
        require(size <= self.bits_left, "no plain bits left")
        taken = self.bits & (1 << size) - 1
        self.bits >>= size
        self.bits_left -= size
        return taken

    def finish(self) -> None:
        require(self.states == [1 << 31] * 4, "states at the end")
        require(self.read == len(self.words), "words left over")
        require(self.bits == 0 and self.bits_left < 8, "plain bits left over")
