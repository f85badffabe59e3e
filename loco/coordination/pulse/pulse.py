"""The state of a rank's heartbeat thread: its own heartbeats, and the watches over other ranks'."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import ref

from ...errors import PROGRAM_ENDED, AuthenticationError, first_line
from ..authentication import StoreSeals
from ..heartbeats import AT_WORK, ENDED, Alarm, Beat, Loss
from ..store_client import KeyValueStore
from .stand_in import StandIn

# On an overloaded machine this rank's own beats come late, and so do those of other ranks on it. So this many
# looks in a row must find nothing new of a rank before it counts as silent.
_LOOKS = 4
_logger = logging.getLogger(__name__)


@dataclass
class Pulse:
    """The thread's state. It does not refer to its Liveness, which ends the thread when it is dropped."""

    store: KeyValueStore
    seals: StoreSeals
    name: str
    rank: int
    every: float  # seconds
    stand_in: StandIn | None = None
    status: str = AT_WORK + "starting"
    last_words: str = PROGRAM_ENDED
    beats: int = 0
    awake: float = 0.0  # seconds that this process was, as far as it can tell
    last: float = field(default_factory=lambda: time.monotonic())
    heard: dict[int, Beat] = field(default_factory=dict)  # the newest of each rank
    begun: set[int] = field(default_factory=set)  # those whose keys the store was seen to have
    farewells: list[tuple[str, str]] = field(default_factory=list)  # links that were given up, and why
    confirmed: list[tuple[ref[object], str]] = field(default_factory=list)  # by voter: its latest vote
    watches: list["Watch"] = field(default_factory=list)
    said: threading.Event = field(default_factory=threading.Event)

    def tick(self) -> None:
        now = time.monotonic()
        # A beat and a request that was not answered take three beats' time; what took more was not awake.
        self.awake += min(now - self.last, 3 * self.every)
        self.last = now
        watches = [watch for watch in self.watches if not watch.done]
        try:
            self.beat()
            for watch in watches:
                watch.look(self)
            self.reconnect_stand_in()
        except RuntimeError as error:
            for watch in watches:
                watch.miss(self, error)
        except Exception:  # a thread that ended here would be taken for a dead rank
            _logger.exception("a heartbeat failed, and the next one is tried")
        if self.status.startswith(ENDED) and self.stand_in is not None:
            self.beats += self.stand_in.close()

    def reconnect_stand_in(self) -> None:
        if self.stand_in is not None:
            self.beats = self.stand_in.reconnect(self.key, self.beats, self._writer(self.status))

    def end(self) -> None:
        self.status = ENDED + self.last_words

    def beat(self) -> None:
        status = self.status
        beat = self._writer(status)
        if self.stand_in is not None:
            self.beats = self.stand_in.renew(self.beats, beat)
        self.beats += 1
        while self.farewells:
            link, why = self.farewells[0]
            key = self.farewell_key(link)
            self.store.compare_set(key, "", self.seals.write(key, f"{self.rank} {why}"))
            del self.farewells[0]
        self.store.set(self.key, beat(self.beats))
        if status is self.status:
            self.said.set()

    def _writer(self, status: str) -> Callable[[int], str]:
        """What the store is to hold for a beat, by its count."""
        confirmed = tuple(vote for _, vote in self.confirmed)
        return lambda count: self.seals.write(self.key, str(Beat(count, status, confirmed)))

    def read(self, ranks: Sequence[int]) -> list[Beat]:
        """The newest beat that was heard of each rank; a RuntimeError if the store does not answer."""
        keys = [self._key(rank) for rank in ranks]
        # The usual case: all have begun, and one request tells of all of them.
        if self.begun.issuperset(ranks) or self.store.check(keys):
            self.begun.difference_update(ranks)  # unless the store has their keys still
            found = self.store.multi_get(keys)
            self.begun.update(ranks)
        else:
            found = [self.store.get(key) if self.store.check([key]) else b"" for key in keys]
        for rank, key, value in zip(ranks, keys, found, strict=True):
            beat = self._beat(key, value)
            if beat is None or (self.seals.are_used and beat.count < self.heard.get(rank, beat).count):
                continue
            self.heard[rank] = beat
        return [self.heard.get(rank, Beat()) for rank in ranks]

    def _beat(self, key: str, found: bytes) -> Beat | None:
        try:
            return Beat.parse(self.seals.read(key, found.decode()))
        except (AuthenticationError, ValueError):  # not there, malformed, or not genuine
            return None

    def farewell(self, link: str) -> tuple[int, str] | None:
        """Who was the first to give up this link, and why."""
        key = self.farewell_key(link)
        if not link or not self.store.check([key]):
            return None
        try:
            rank, _, why = self.seals.read(key, self.store.get(key).decode()).partition(" ")
            return int(rank), why
        except (AuthenticationError, ValueError):
            return None

    def farewell_key(self, link: str) -> str:
        return f"loco/{self.name}/left/{link}"

    @property
    def key(self) -> str:
        return self._key(self.rank)

    def _key(self, rank: int) -> str:
        return f"loco/{self.name}/alive/{rank}"


@dataclass
class Heard:
    """A rank's latest beat, since when it is the latest, and how many looks found nothing newer."""

    count: int = -1
    since: float = 0.0
    looks: int = 0


class Watch:
    """One wait for some ranks. It calls `alarm` once, when one of them is lost."""

    def __init__(
        self, ranks: tuple[int, ...], alarm: Alarm, allowed: float, gone: tuple[str, ...], link: str
    ) -> None:
        self.ranks = ranks
        self.done = False
        self._alarm = alarm
        self._allowed = allowed
        self._gone_if = gone
        self._link = link
        self._answered: float | None = None  # when the store last did
        self._heard = {rank: Heard() for rank in ranks}
        self._left: set[int] = set()
        self._given_up = False  # the link, by somebody

    def look(self, pulse: Pulse) -> None:
        beats = dict(zip(self.ranks, pulse.read(self.ranks), strict=True))
        now = self._answered = pulse.awake
        for rank, beat in beats.items():
            heard = self._heard[rank]
            if beat.count != heard.count:
                heard.count, heard.since, heard.looks = beat.count, now, 0
            else:
                heard.looks += 1
        # A rank that leaves may have sent all that is waited for, which gets one more beat's time to arrive.
        left = {rank for rank, beat in beats.items() if beat.status.startswith(self._gone_if)}
        gone, self._left = left & self._left, left
        silent = {
            rank
            for rank, heard in self._heard.items()
            if heard.looks >= _LOOKS and now - heard.since >= self._allowed
        } - gone
        farewell = pulse.farewell(self._link)
        if farewell and self._given_up and not silent:
            self._raise(Loss(gone=farewell[:1], why=farewell[1]))
        self._given_up = farewell is not None
        if silent or gone:
            first = min(gone, default=None)
            why = "" if first is None else beats[first].words
            self._raise(Loss(silent=tuple(sorted(silent)), gone=tuple(sorted(gone)), why=why))

    def miss(self, pulse: Pulse, error: RuntimeError) -> None:
        """The store did not answer."""
        if self._answered is None:
            self._answered = pulse.awake
        elif pulse.awake - self._answered >= self._allowed:
            self._raise(Loss(store=first_line(error)))

    def _raise(self, loss: Loss) -> None:
        if not self.done:
            self.done = True
            self._alarm(loss)
