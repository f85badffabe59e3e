"""How long a round's exchange takes, by arithmetic: from the bytes and the speed of each code, by ticks.

A tick posts messages, codes what comes next, and waits for both, so it costs the larger of its transfer and
its coding; links carry both directions at once. The ticks are those of loco/exchange/gather.py and
owner_reduce.py. What it leaves out: other traffic, lost packets, late sites, distance but for `latency`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from loco.wire.framing import Frames
from loco.wire.records import RECORD_BYTES

GOODPUT = 1448 / 1514  # of Ethernet frames of 1514 bytes: 14 + 20 + 32 are headers
_ENOUGH = 12  # frames, after which each costs what the one before did


@dataclass(frozen=True)
class Work:
    """Seconds on one core: so many per parameter, and so many per entry."""

    parameter: float = 0.0
    entry: float = 0.0

    def of(self, numel: float, density: float) -> float:
        return numel * (self.parameter + density * self.entry)


@dataclass(frozen=True, kw_only=True)
class Code:
    """A code as it was measured.

    sizes: bytes per entry, by density.
    """

    sizes: Mapping[float, float]
    seal: Work = field(default_factory=Work)
    open: Work = field(default_factory=Work)
    rounds: bool = False  # what is received differs from what was sent, so that a sender reads its own, too

    def body(self, numel: float, density: float) -> float:
        """Bytes of a frame's body."""
        at = sorted(self.sizes)
        each = np.interp(np.log(max(density, 1e-9)), np.log(at), [self.sizes[x] for x in at])
        return float(numel * density * each)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a round takes place.

    Args:
        sites: R.
        numel: parameters that travel over one site's link.
        rate: of a link in each direction, bytes per second.
        latency: seconds for a small message to all peers and theirs back.
        cores: that code for a site; below 1 when sites share one.
        density: of one site's entries, and `union` of all sites' together.
    """

    sites: int
    numel: int
    rate: float
    latency: float = 0.0
    cores: float = 1.0
    density: float = 1.0
    union: float = 1.0

    def transfer(self, moved: float) -> float:
        return moved / (self.rate * GOODPUT) + self.latency


def gather_seconds(code: Code, at: Setting) -> float:
    """Every site's entries to all: frame t travels while t + 1 is coded and t − 1 read."""
    peers = at.sites - 1
    count = _frames(at.numel)
    numel = at.numel / count
    body = code.body(numel, at.density)
    seal = code.seal.of(numel, at.density) / at.cores
    read = code.open.of(numel, at.density) / at.cores

    def ticks(frames: int) -> float:
        seconds = seal
        for tick in range(frames + 1):
            coding = seal * (tick + 1 < frames) + peers * read * (tick >= 1)
            seconds += max(coding, at.transfer(peers * (RECORD_BYTES + body)) if tick < frames else 0.0)
        return seconds

    return _steadily(ticks, count) + _announcement_and_vote(at)


def owner_seconds(code: Code, at: Setting, adding: Work | None = None) -> float:
    """Each site sums a slice and sends the sums, which leave two ticks after the entries."""
    peers, behind = at.sites - 1, 2
    count = _frames(at.numel / at.sites)
    numel = at.numel / at.sites / count
    entries, sums = code.body(numel, at.density), code.body(numel, at.union)

    def seconds_of(work: Work, density: float) -> float:
        return work.of(numel, density) / at.cores

    seal, read = seconds_of(code.seal, at.density), seconds_of(code.open, at.density)
    seal_sums, read_sums = seconds_of(code.seal, at.union), seconds_of(code.open, at.union)
    add_up = peers * read + seal_sums
    if adding is not None:
        add_up += seconds_of(adding, at.sites * at.density)
    if code.rounds:
        add_up += seal + read + seal_sums + read_sums

    def ticks(frames: int) -> float:
        seconds = peers * seal
        for tick in range(frames + behind + 1):
            coding = peers * seal * (tick + 1 < frames)
            coding += add_up * (0 <= tick - 1 < frames) + peers * read_sums * (tick - behind - 1 >= 0)
            both = ((0, entries), (behind, sums))
            bodies = [body for first, body in both if first <= tick < first + frames]
            moved = sum(RECORD_BYTES + body for body in bodies)
            seconds += max(coding, at.transfer(peers * moved) if bodies else 0.0)
        return seconds

    return _steadily(ticks, count) + _announcement_and_vote(at)


def gather_bytes(code: Code, at: Setting) -> float:
    """What a site sends, packet headers not included."""
    return (at.sites - 1) * (code.body(at.numel, at.density) + RECORD_BYTES * (_frames(at.numel) + 2))


def owner_bytes(code: Code, at: Setting) -> float:
    part = at.numel / at.sites
    bodies = code.body(part, at.density) + code.body(part, at.union)
    return (at.sites - 1) * (bodies + RECORD_BYTES * (2 * _frames(part) + 2))


def ring_bytes(at: Setting, *, steps: int = 1) -> float:
    """DDP's: a ring all-reduce of FP32 gradients in each step."""
    return steps * 2 * (at.sites - 1) / at.sites * 4 * at.numel


def ring_seconds(at: Setting, *, steps: int) -> float:
    """2(R − 1) messages of 1/R one after the other. Compute that it could hide behind is not counted."""
    return steps * 2 * (at.sites - 1) * at.transfer(4 * at.numel / at.sites)


def _announcement_and_vote(at: Setting) -> float:
    return 2 * at.transfer((at.sites - 1) * RECORD_BYTES)


def _frames(numel: float) -> int:
    return Frames.of(max(round(numel), 1)).count


def _steadily(ticks: Callable[[int], float], count: int) -> float:
    """Of many frames the later ones cost the same each."""
    if count <= _ENOUGH:
        return ticks(count)
    return ticks(_ENOUGH) + (count - _ENOUGH) * (ticks(_ENOUGH) - ticks(_ENOUGH - 1))
