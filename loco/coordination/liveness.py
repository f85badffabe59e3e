"""Heartbeats: each rank says several times within `dead_after` that it lives and what it does.

They travel by the process group's store, which every rank reaches already: no port, no address of its own.
Silence counts by the time that the listener itself was awake: sites' clocks need not agree, and a machine
that was halted accuses nobody when it goes on.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from ..errors import AuthenticationError, first_line
from .authentication import StoreSeals
from .heartbeats import AT_WORK, ENDED, LEFT, Alarm, Beat, Loss
from .store_client import KeyValueStore, StoreClient
from .ticker import Ticker

BEATS = 8  # in `dead_after` seconds; a rank that misses six of them in a row is silent
_ALLOWED = 6
# Where this rank's own beats come late, because its machine is overloaded, those of the others on it do, too:
# so many of its looks in a row must find nothing new of a rank that is silent.
_LOOKS = 4
_SOON = 0.5  # seconds
_POLL = 0.02  # seconds

_logger = logging.getLogger(__name__)


class Liveness:
    """This rank's own heartbeat, and a listener to the others'. See `Heartbeats`.

    A beat that is malformed, or not genuine where the ranks share a key, or older than one that was heard
    before, counts as one that is not there: it makes nobody alive, and no listener fail.

    Args:
        store: the process group's.
        name: the same on all ranks, and nobody else's.
        rank: in the default group.
        dead_after: seconds within which a silent rank is noticed, from when somebody waits for it.
        seals: of the beats, if the ranks share a key.
        connect_limit: as `StoreClient`.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        *,
        dead_after: float,
        seals: StoreSeals | None = None,
        connect_limit: float = 120.0,
    ) -> None:
        self.dead_after = dead_after
        # A rank that hears nothing of the store for two beats goes on, to find out whether it does for six.
        client = StoreClient(store, limit=2 * dead_after / BEATS, connect_limit=connect_limit)
        self._pulse = _Pulse(client, seals or StoreSeals(), name, rank, dead_after / BEATS)
        with suppress(RuntimeError):  # the next beat may be in time
            self._pulse.beat()  # a rank that waits for this one from now on finds something
        self._ticker = Ticker(
            self,
            self._pulse.tick,
            every=self._pulse.every,
            name=f"loco heartbeat of rank {rank}",
            patience=2 * _ALLOWED * self._pulse.every,
            last=self._pulse.end,
        )

    def say(self, doing: str) -> None:
        back = self._pulse.status.startswith(LEFT)
        self._pulse.status = AT_WORK + doing
        if back:  # nobody who meets it from now on may think that it is not there
            self._publish()

    def leave(self, why: str, link: str = "") -> None:
        if link:
            self._pulse.farewells.append((link, why[:400]))
        self._pulse.status = LEFT + why[:400]
        self._publish()

    def forget(self, link: str) -> None:
        """All ranks have other links by now, so none asks who has given up this one."""
        self._pulse.store.delete_key(self._pulse.farewell_key(link))

    def _publish(self) -> None:
        self._pulse.said.clear()
        self._ticker.wake()
        self._pulse.said.wait(_SOON)

    def confirm(self, voter: object, vote: str) -> None:
        """Say from the next beat on that this rank has committed `vote`, the latest one of `voter`."""
        others = [one for one in self._pulse.confirmed if one[0]() not in (None, voter)]
        self._pulse.confirmed = [*others, (ref(voter), vote)]

    def is_confirmed(self, ranks: Sequence[int], vote: str) -> bool:
        """Whether one of these ranks says so, in a beat that it begins after this call.

        Ranks that do not beat are not waited for: it takes half of `dead_after` at most.
        """
        deadline = time.monotonic() + self.dead_after / 2
        began: dict[int, int] | None = None
        while True:
            with suppress(RuntimeError):
                beats = dict(zip(ranks, self._pulse.read(ranks), strict=True))
                if any(vote in beat.confirmed for beat in beats.values()):
                    return True
                began = began or {rank: beat.count for rank, beat in beats.items()}
                # The next beat may have been on its way when this call began.
                if all(beat.count >= began[rank] + 2 for rank, beat in beats.items()):
                    return False
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)

    @contextmanager
    def watching(
        self, ranks: Sequence[int], alarm: Alarm, *, link: str = "", reunion: bool = False
    ) -> Iterator[None]:
        gone = (ENDED,) if reunion else (LEFT, ENDED)
        watch = _Watch(tuple(ranks), alarm, self.dead_after * _ALLOWED / BEATS, gone, link)
        self._pulse.watches.append(watch)
        try:
            yield
        finally:
            watch.done = True
            self._pulse.watches.remove(watch)

    def departed(self, ranks: Sequence[int], link: str) -> Loss | None:
        deadline = time.monotonic() + _SOON
        while time.monotonic() < deadline:
            with suppress(RuntimeError):
                farewell = self._pulse.farewell(link)
                if farewell is not None:
                    return Loss(gone=farewell[:1], why=farewell[1])
                for rank, beat in zip(ranks, self._pulse.read(ranks), strict=True):
                    if beat.has_left:
                        return Loss(gone=(rank,), why=beat.words)
            time.sleep(_POLL)
        return None

    def last_words(self, rank: int) -> str:
        with suppress(RuntimeError):
            return self._pulse.read([rank])[0].words or "nothing"
        return "nothing that can be read"

    def describe(self, loss: Loss, name: Callable[[Sequence[int]], str]) -> str:
        if loss.store:
            return (
                f"no answer from the sites' store for {self.dead_after:g} s ({loss.store}): this process is "
                f"cut off, or the store's host (torchrun's first node, rank 0, or the site whose address is "
                f"LOCO_AT) is gone"
            )
        if loss.silent:
            return (
                f"no sign of life from {name(loss.silent)} within {self.dead_after:g} s: dead, stopped or "
                f"cut off; last heard of: {self.last_words(loss.silent[0])}"
            )
        return f"{name(loss.gone[:1])} has left: {loss.why}"

    def close(self, why: str = "") -> None:
        """Say that this rank has ended, and end the thread."""
        self._pulse.last_words = why or self._pulse.last_words
        self._ticker.close()


@dataclass
class _Pulse:
    """What the thread works on. It holds no Liveness, so that one that nobody needs any more can end it."""

    store: KeyValueStore
    seals: StoreSeals
    name: str
    rank: int
    every: float  # seconds
    status: str = AT_WORK + "starting"
    last_words: str = "its program has ended, or dropped its optimizer"
    beats: int = 0
    awake: float = 0.0  # seconds that this process was, as far as it can tell
    last: float = field(default_factory=lambda: time.monotonic())
    heard: dict[int, Beat] = field(default_factory=dict)  # the newest of each rank
    begun: set[int] = field(default_factory=set)  # those whose keys the store was seen to have
    farewells: list[tuple[str, str]] = field(default_factory=list)  # links that were given up, and why
    confirmed: list[tuple[ref[object], str]] = field(default_factory=list)  # by voter: its latest vote
    watches: list["_Watch"] = field(default_factory=list)
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
        except RuntimeError as error:
            for watch in watches:
                watch.miss(self, error)
        except Exception:  # a thread that ended here would be taken for a dead rank
            _logger.exception("a heartbeat failed, and the next one is tried")

    def end(self) -> None:
        self.status = ENDED + self.last_words

    def beat(self) -> None:
        self.beats += 1
        status = self.status
        while self.farewells:
            link, why = self.farewells[0]
            key = self.farewell_key(link)
            self.store.compare_set(key, "", self.seals.write(key, f"{self.rank} {why}"))
            del self.farewells[0]
        key = self._key(self.rank)
        beat = Beat(self.beats, status, tuple(vote for _, vote in self.confirmed))
        self.store.set(key, self.seals.write(key, str(beat)))
        if status is self.status:
            self.said.set()

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

    def _key(self, rank: int) -> str:
        return f"loco/{self.name}/alive/{rank}"


@dataclass
class _Heard:
    """Of a rank: its beats, since when it has been at that number, and how many looks found nothing newer."""

    count: int = -1
    since: float = 0.0
    looks: int = 0


class _Watch:
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
        self._heard = {rank: _Heard() for rank in ranks}
        self._left: set[int] = set()
        self._given_up = False  # the link, by somebody

    def look(self, pulse: _Pulse) -> None:
        beats = dict(zip(self.ranks, pulse.read(self.ranks), strict=True))
        now = self._answered = pulse.awake
        for rank, beat in beats.items():
            heard = self._heard[rank]
            if beat.count != heard.count:
                heard.count, heard.since, heard.looks = beat.count, now, 0
            else:
                heard.looks += 1
        # A rank that leaves may have sent all that is waited for: it gets one more beat's time to arrive.
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

    def miss(self, pulse: _Pulse, error: RuntimeError) -> None:
        """The store did not answer."""
        if self._answered is None:
            self._answered = pulse.awake
        elif pulse.awake - self._answered >= self._allowed:
            self._raise(Loss(store=first_line(error)))

    def _raise(self, loss: Loss) -> None:
        if not self.done:
            self.done = True
            self._alarm(loss)


def await_end(store: KeyValueStore, name: str, ranks: Sequence[int], *, limit: float) -> bool:
    """Wait until each of these ranks has ended, or is silent -> whether that was within some seconds.

    For a program that ends itself, and so can start no thread.
    """
    pulse = _Pulse(store, StoreSeals(), name, -1, 0.0)
    deadline = time.monotonic() + limit
    heard = {rank: _Heard(since=time.monotonic()) for rank in ranks}
    with suppress(RuntimeError):  # the store is of no use to them either
        while heard and time.monotonic() < deadline:
            for rank, beat in zip(list(heard), pulse.read(list(heard)), strict=True):
                if beat.count != heard[rank].count:
                    heard[rank] = _Heard(beat.count, time.monotonic())
                if beat.status.startswith(ENDED) or time.monotonic() - heard[rank].since > limit / 2:
                    del heard[rank]
            time.sleep(_POLL)
    return not heard
