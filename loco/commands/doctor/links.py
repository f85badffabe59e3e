"""What the network between the sites gives: round trips, clocks, and how long bytes take.

All of it goes over the links that the sites have among all ranks, which are of the same make as those of a
round. First each pair of sites alone, other pairs beside it: round trips, then one direction after the
other. Then all sites send to all others at once, as in a round, and after a pause, as in a round: TCP begins
slowly after a pause, which is a part of what a round takes over a long way.

Amounts grow until a transfer takes about a second, or a few while TCP still becomes quicker, so that slow
links are not measured for long.
"""

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch

from ...net.transport import Transport

FIRST, GROWTH = 1 << 16, 4  # bytes of the first transfer, and how many times as many the next one has
PINGS = 11
PAUSE = 1.0  # seconds, in which TCP forgets how fast it was
TRIES = 2  # of each transfer: alone the better one counts, which is what a link can carry; together the mean
_ALONE, _TOGETHER = 0.3, 1.0  # seconds that the last transfer takes, or up to GROWTH times as long
_ALL_PAIRS = 20.0  # seconds for the last transfers of all pairs, where there are many
_MORE = 4  # times as long while it still becomes quicker
_QUICKER = 1.25
_PIECE = 1 << 22  # bytes of one message
_SECONDS = struct.Struct("<d")
_PHASE = "measuring the links"

Points = list[tuple[int, float]]  # bytes, and the seconds they took


@dataclass(kw_only=True)
class Measured:
    """By one rank. Pairs are of sites: (this one, another).

    round_trips: seconds, by pair; measured by the lower site.
    ahead: seconds by which the other one's clock is ahead, by pair.
    rates: bytes a second that came from the other one while that sent to this one alone.
    together: what each rank sends at once to all others, and the mean seconds until the last of all has it.
    """

    round_trips: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    ahead: dict[tuple[int, int], float] = field(default_factory=dict)
    rates: dict[tuple[int, int], float] = field(default_factory=dict)
    together: Points = field(default_factory=list)

    def note(self) -> dict[str, Any]:
        """For the other ranks, as JSON has it."""
        pairs = {name: getattr(self, name) for name in ("round_trips", "ahead", "rates")}
        return {name: [[*pair, found] for pair, found in one.items()] for name, one in pairs.items()} | {
            "together": self.together
        }


class LinkMeasurement:
    """
    Args:
        transport: to all ranks.
        ranks: of this rank's number, by site.
        site: this one.
        most_bytes: that this rank may send in all.
        told: a line of progress.
        names: of the sites.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        site: int,
        *,
        most_bytes: int,
        told: Callable[[str], object],
        names: Sequence[str],
    ) -> None:
        self._transport, self._ranks, self._site = transport, ranks, site
        self._told, self._names = told, names
        # The transfers of one series are GROWTH / (GROWTH − 1) times the last one. There are TRIES for
        # each other site, and for all of them together.
        series = TRIES * len(ranks)
        self._most = max(FIRST, most_bytes * (GROWTH - 1) // GROWTH // series)
        self._piece = torch.zeros(_PIECE, dtype=torch.uint8)
        self._room = torch.empty(_PIECE, dtype=torch.uint8)  # for all that comes

    def run(self) -> Measured:
        """
        Raises:
            TransportError: a link is lost.
        """
        measured = Measured()
        rounds = pairs_by_round(len(self._ranks))
        longest = min(_ALONE, _ALL_PAIRS / (2 * len(rounds)))
        for pairs in rounds:
            self._meet()
            for pair in pairs:
                if self._site in pair:
                    self._measure_pair(measured, sum(pair) - self._site, longest)
        measured.together = self._measure_together()
        return measured

    def _measure_pair(self, measured: Measured, other: int, longest: float) -> None:
        peer, pair = self._ranks[other], (self._site, other)
        asks = self._site < other
        if asks:
            trips, ahead = self._ping(peer)
            measured.round_trips[pair], measured.ahead[pair] = trips, ahead
        else:
            self._answer(peer)
        rates: list[float] = []
        for sends in (asks, not asks):
            points = self._measure_direction(peer, sends=sends, longest=longest)
            rates.append(rate_of(points))
            if not sends:
                measured.rates[pair] = rates[-1]
        there, back = map(rate_text, rates if asks else reversed(rates))
        what = f"{there} to it, {back} back"
        trip = f"{1e3 * median(measured.round_trips[pair]):.3g} ms, " if asks else ""
        self._told(f"with {self._names[other]}: {trip}{what}")

    def _ping(self, peer: int) -> tuple[list[float], float]:
        """-> round trips; and how far the peer's clock is ahead, by the quickest of them (as NTP has it)"""
        trips: list[float] = []
        aheads: list[float] = []
        for _ in range(PINGS):
            sent, began = time.time(), time.perf_counter()
            self._send(peer, 0.0)
            theirs = self._receive(peer)
            trips.append(time.perf_counter() - began)
            aheads.append(theirs - sent - trips[-1] / 2)
        return trips, aheads[trips.index(min(trips))]

    def _answer(self, peer: int) -> None:
        for _ in range(PINGS):
            self._receive(peer)
            self._send(peer, time.time())

    def _measure_direction(self, peer: int, *, sends: bool, longest: float) -> Points:
        points: Points = []
        size = FIRST
        self._swap(peer, 0.0)
        while True:
            seconds = min(self._send_alone(peer, size, sends=sends) for _ in range(TRIES))
            points.append((size, seconds))
            if size * GROWTH > self._most or not goes_on(points, longest):
                return points
            size *= GROWTH

    def _send_alone(self, peer: int, size: int, *, sends: bool) -> float:
        """-> seconds until the receiver has all"""
        began = time.perf_counter()
        self._stream(*(({peer: size}, {}) if sends else ({}, {peer: size})))
        own = time.perf_counter() - began
        theirs = self._swap(peer, own)
        return theirs if sends else own

    def _measure_together(self) -> Points:
        peers = [self._ranks[site] for site in range(len(self._ranks)) if site != self._site]
        points: Points = []
        size = FIRST
        while True:
            each = dict.fromkeys(peers, size // len(peers))
            seconds = fmean(self._send_together(each) for _ in range(TRIES))
            points.append((sum(each.values()), seconds))
            if size * GROWTH > self._most or not goes_on(points, _TOGETHER):
                return points
            size *= GROWTH

    def _send_together(self, each: Mapping[int, int]) -> float:
        """-> seconds until the last rank has all"""
        time.sleep(PAUSE)
        self._meet()
        began = time.perf_counter()
        self._stream(each, each)
        return max(self._meet(time.perf_counter() - began))

    def _stream(self, sends: Mapping[int, int], receives: Mapping[int, int]) -> None:
        """So many bytes to and from peers."""
        outgoing = [(peer, self._piece[:n]) for peer, size in sends.items() for n in _pieces(size)]
        incoming = [(peer, self._room[:n]) for peer, size in receives.items() for n in _pieces(size)]
        self._transport.post(outgoing, incoming, phase=_PHASE).wait(self._transport.patience)

    def _meet(self, seconds: float = 0.0) -> list[float]:
        """All ranks are at the same point -> what each says."""
        patience = self._transport.patience
        records = self._transport.swap_records(_SECONDS.pack(seconds), phase=_PHASE, limit=patience)
        return [_SECONDS.unpack(record)[0] for record in records]

    def _swap(self, peer: int, seconds: float) -> float:
        room = torch.empty(_SECONDS.size, dtype=torch.uint8)
        message = self._transport.message(_SECONDS.pack(seconds))
        self._transport.swap({peer: message}, {peer: room}, phase=_PHASE)
        return _SECONDS.unpack(room.numpy().tobytes())[0]

    def _send(self, peer: int, seconds: float) -> None:
        self._transport.swap({peer: self._transport.message(_SECONDS.pack(seconds))}, {}, phase=_PHASE)

    def _receive(self, peer: int) -> float:
        room = torch.empty(_SECONDS.size, dtype=torch.uint8)
        self._transport.swap({}, {peer: room}, phase=_PHASE)
        return _SECONDS.unpack(room.numpy().tobytes())[0]


def pairs_by_round(sites: int) -> list[list[tuple[int, int]]]:
    """All pairs of sites, in as few rounds as there can be in which no site is in two pairs."""
    seats: list[int | None] = [*range(sites), *([None] if sites % 2 else [])]
    rounds: list[list[tuple[int, int]]] = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats.insert(1, seats.pop())
    return rounds


def goes_on(points: Points, longest: float) -> bool:
    """Whether a transfer of GROWTH times as many bytes would tell more.

    Args:
        longest: seconds that the last one should take at least.
    """
    _, seconds = points[-1]
    if seconds < longest or len(points) == 1:
        return seconds < longest
    return seconds < _MORE * longest and rate_of(points) > _QUICKER * rate_of(points[:-1])


def rate_of(points: Points) -> float:
    """Bytes a second, once they flow: the last transfer took so much longer than the one before."""
    (size, seconds), (less, sooner) = points[-1], points[-2] if len(points) > 1 else (0, 0.0)
    if seconds <= sooner:
        return size / seconds
    return (size - less) / (seconds - sooner)


def rate_text(rate: float) -> str:
    """
    Args:
        rate: bytes a second.
    """
    bits = 8 * rate
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _pieces(size: int) -> list[int]:
    whole, rest = divmod(size, _PIECE)
    return [_PIECE] * whole + [rest] * (rest > 0)
