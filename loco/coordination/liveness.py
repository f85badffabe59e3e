"""Heartbeats: each rank writes its status into the store several times within `dead_after`.

They go through the process group's store, which every rank can reach already, so they need no port. Silence
is measured by the time for which the listener itself was awake: the sites' clocks need not agree, and a
machine that was suspended accuses nobody when it resumes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import ref

from ..errors import first_line, seconds
from .authentication import StoreSeals
from .heartbeats import AT_WORK, ENDED, LEFT, Alarm, Loss
from .pulse.pulse import Heard, Pulse, Watch
from .pulse.stand_in import StandIn
from .store_client import KeyValueStore, StoreClient, whereabouts
from .ticker import Ticker

BEATS = 8  # in `dead_after` seconds; a rank that misses six of them in a row is silent
_ALLOWED = 6
_SOON = 0.5  # seconds
_POLL = 0.02  # seconds


class Liveness:
    """This rank's own heartbeat, and a listener to the others'. See `Heartbeats`.

    A heartbeat that is malformed, older than one that was read before or, where the ranks share a key, not
    genuine is ignored: it keeps no rank alive, and makes no listener fail.

    Args:
        store: the process group's.
        name: the same on all ranks, and used by nobody else.
        rank: in the default group.
        dead_after: seconds within which a silent rank is noticed once somebody waits for it.
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
        # Requests time out after two beats, so that six silent beats can be observed.
        client = StoreClient(store, limit=2 * dead_after / BEATS, connect_limit=connect_limit)
        every = dead_after / BEATS
        stand_in = StandIn(store, client, every)  # before the first beat: it may have to be compiled
        self._pulse = Pulse(client, seals or StoreSeals(), name, rank, every, stand_in)
        with suppress(RuntimeError):  # the next beat may be in time
            self._pulse.beat()  # so that a rank that waits for this one finds a heartbeat
            self._pulse.reconnect_stand_in()
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
        if back:  # ranks that wait for it from now on must not read that it has left
            self._publish()

    def leave(self, why: str, link: str = "") -> None:
        if link:
            self._pulse.farewells.append((link, why[:400]))
        self._pulse.status = LEFT + why[:400]
        self._publish()

    @property
    def needs_interpreter_lock(self) -> str:
        """Why this rank's beats stop while its program holds the lock; "" if they do not."""
        stand_in = self._pulse.stand_in
        return "" if stand_in is None else stand_in.problem

    def forget(self, link: str) -> None:
        """Remove the report that a link was given up: all ranks have newer links, so none asks for it."""
        self._pulse.store.delete_key(self._pulse.farewell_key(link))

    def take_back(self, link: str) -> None:
        """Remove this rank's own report that it gave up a link. Another rank's stays, for those that have not
        read it yet.

        Raises:
            RuntimeError: the store does not answer.
        """
        farewell = self._pulse.farewell(link)
        if farewell is not None and farewell[0] == self._pulse.rank:
            self.forget(link)

    def _publish(self) -> None:
        self._pulse.said.clear()
        self._ticker.wake()
        self._pulse.said.wait(_SOON)

    def confirm(self, voter: object, vote: str) -> None:
        """Say from the next beat on that this rank has committed `vote`, the latest one of `voter`."""
        others = [one for one in self._pulse.confirmed if one[0]() not in (None, voter)]
        self._pulse.confirmed = [*others, (ref(voter), vote)]

    def is_confirmed(self, ranks: Sequence[int], vote: str) -> bool:
        """Whether one of these ranks confirms this vote, in a heartbeat that it begins after this call.

        It takes half of `dead_after` at most, so silent ranks are not waited for.
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
        self, ranks: Sequence[int], alarm: Alarm, *, link: str = "", left_may_return: bool = False
    ) -> Iterator[None]:
        gone = (ENDED,) if left_may_return else (LEFT, ENDED)
        watch = Watch(tuple(ranks), alarm, self.dead_after * _ALLOWED / BEATS, gone, link)
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
        try:
            return self._pulse.read([rank])[0].words or "nothing"
        except RuntimeError as error:  # this may be why the other one hung up
            where = whereabouts(self._pulse.store, first_line(error))
            return f"nothing, since the sites' store does not answer ({where})"

    def describe(self, loss: Loss, name: Callable[[Sequence[int]], str]) -> str:
        if loss.store:
            return (
                f"no answer from the sites' store for {seconds(self.dead_after)} "
                f"({whereabouts(self._pulse.store, loss.store)}): this process is cut off, or the store's "
                f"host is gone"
            )
        if loss.silent:
            return (
                f"no heartbeat from {name(loss.silent)} within {seconds(self.dead_after)}: dead, stopped or "
                f"cut off; last heard of: {self.last_words(loss.silent[0])}"
            )
        return f"{name(loss.gone[:1])} has left: {loss.why}"

    def close(self, why: str = "") -> None:
        """Say that this rank has ended, and end the thread."""
        self._pulse.last_words = why or self._pulse.last_words
        self._ticker.close()


def await_end(
    store: KeyValueStore, name: str, ranks: Sequence[int], *, seals: StoreSeals, limit: float
) -> bool:
    """Wait until each of these ranks has ended or is silent -> whether that took less than `limit` seconds.

    It starts no thread, so a program can call it while it exits.
    """
    pulse = Pulse(store, seals, name, -1, 0.0)
    deadline = time.monotonic() + limit
    heard = {rank: Heard(since=time.monotonic()) for rank in ranks}
    with suppress(RuntimeError):  # the store is of no use to them either
        while heard and time.monotonic() < deadline:
            for rank, beat in zip(list(heard), pulse.read(list(heard)), strict=True):
                if beat.count != heard[rank].count:
                    heard[rank] = Heard(beat.count, time.monotonic())
                if beat.status.startswith(ENDED) or time.monotonic() - heard[rank].since > limit / 2:
                    del heard[rank]
            time.sleep(_POLL)
    return not heard
