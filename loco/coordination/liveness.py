"""Signs of life: each rank says every half second that it lives and what it does, and hears who does not.

They travel by the process group's store, which every rank reaches already: no port, no address of its own.
Silence counts by the time that the listener itself was awake: sites' clocks need not agree, and a machine
that was halted accuses nobody when it goes on.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ..errors import first_line
from .store_client import StoreClient

BEATS = 8  # in `dead_after` seconds; who misses six of them in a row is silent
_ALLOWED = 6
_SOON = 0.5  # seconds

# How a word begins: a rank is at work; it has given up a round, and may come back; it has ended.
_AT_WORK, _LEFT, _ENDED = "+", "-", "!"

Alarm = Callable[["Loss"], None]


@dataclass(frozen=True)
class Loss:
    """Who can't be counted on, and why.

    silent: ranks without a sign of life; their processes are dead or stopped, or their links cut.
    gone: ranks that have given up what the others wait for, or ended; their last words say why.
    why: what who has gone said, if it has come back since.
    store: why the store does not answer.
    """

    silent: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    why: str = ""
    store: str = ""


class Liveness:
    """This rank's own sign of life, and an ear for the others'.

    Args:
        store: the process group's.
        name: the same on all ranks, and nobody else's.
        rank: in the default group.
        dead_after: seconds within which a silent rank is noticed, from when somebody waits for it.
    """

    def __init__(self, store: Store, name: str, rank: int, *, dead_after: float) -> None:
        self.dead_after = dead_after
        # Who hears nothing of the store for two beats goes on, to find out whether it is silent for six.
        line = StoreClient(store, limit=2 * dead_after / BEATS)
        self._pulse = _Pulse(line, name, rank, dead_after / BEATS)
        self._pulse.beat()  # whoever waits for this rank from now on finds something
        thread = threading.Thread(
            target=_beat_on, args=(self._pulse,), name=f"loco heartbeat of rank {rank}", daemon=True
        )
        thread.start()
        # Also at the interpreter's exit, which must not find the thread inside the store.
        self._end = weakref.finalize(self, _stop, self._pulse, thread)

    def say(self, doing: str) -> None:
        """What this rank does from now on, for the errors of those who wait for it."""
        back = self._pulse.word.startswith(_LEFT)
        self._pulse.word = _AT_WORK + doing
        if back:  # nobody who meets it from now on may think that it is not there
            self._publish()

    def leave(self, why: str, link: str = "") -> None:
        """This rank has given up what the others wait for. Returns once they can know, or soon anyway.

        link: which it has given up, for good. Who waits on it learns of it even if this rank is back by then.
        """
        if link:
            self._pulse.farewells.append((link, why[:400]))
        self._pulse.word = _LEFT + why[:400]
        self._publish()

    def _publish(self) -> None:
        self._pulse.said.clear()
        self._pulse.wake.set()
        self._pulse.said.wait(_SOON)

    @contextmanager
    def watching(
        self, ranks: Sequence[int], alarm: Alarm, *, link: str = "", reunion: bool = False
    ) -> Iterator[None]:
        """Listen to `ranks` meanwhile. `alarm` is called at most once, by another thread.

        link: that they are waited for on.
        reunion: those who left are expected back, so only an end counts.
        """
        gone = (_ENDED,) if reunion else (_LEFT, _ENDED)
        watch = _Watch(tuple(ranks), alarm, self.dead_after * _ALLOWED / BEATS, gone, link)
        self._pulse.watches.append(watch)
        try:
            yield
        finally:
            watch.done = True
            self._pulse.watches.remove(watch)

    def departed(self, ranks: Sequence[int]) -> list[int]:
        """Those of them that have said that they left, as far as the store can tell."""
        try:
            words = self._pulse.read(ranks)
        except RuntimeError:
            return []
        return [r for r, (_, word) in zip(ranks, words, strict=True) if word.startswith((_LEFT, _ENDED))]

    def last_words(self, rank: int) -> str:
        """What a rank last said, as far as the store can tell."""
        try:
            return self._pulse.read([rank])[0][1][1:] or "nothing"
        except RuntimeError:
            return "nothing that can be read"

    def describe(self, loss: Loss, name: Callable[[Sequence[int]], str]) -> str:
        """A sentence; `name` tells what ranks are called."""
        if loss.store:
            return (
                f"no answer from the process group's store for {self.dead_after:g} s ({loss.store}): this "
                f"process is cut off, or the store's host (torchrun's first node, or rank 0) is gone"
            )
        if loss.silent:
            return (
                f"no sign of life from {name(loss.silent)} within {self.dead_after:g} s: dead, stopped or "
                f"cut off; last heard of: {self.last_words(loss.silent[0])}"
            )
        return f"{name(loss.gone[:1])} has left: {loss.why or self.last_words(loss.gone[0])}"

    def close(self) -> None:
        self._end()


@dataclass
class _Pulse:
    """What the thread works on. It holds no Liveness, so that one that nobody needs any more can end it."""

    store: StoreClient
    name: str
    rank: int
    every: float  # seconds
    word: str = _AT_WORK + "starting"
    beats: int = 0
    awake: float = 0.0  # seconds that this process was, as far as it can tell
    farewells: list[tuple[str, str]] = field(default_factory=list)  # links that were given up, and why
    watches: list["_Watch"] = field(default_factory=list)
    wake: threading.Event = field(default_factory=threading.Event)
    said: threading.Event = field(default_factory=threading.Event)
    ended: bool = False

    def beat(self) -> None:
        self.beats += 1
        word = self.word
        while self.farewells:
            link, why = self.farewells[0]
            self.store.compare_set(self._farewell(link), "", f"{self.rank} {why}")
            del self.farewells[0]
        self.store.set(self._key(self.rank), f"{self.beats} {word}")
        if word is self.word:
            self.said.set()

    def read(self, ranks: Sequence[int]) -> list[tuple[int, str]]:
        """How often each rank has beaten, and its word; a RuntimeError if the store does not answer."""
        keys = [self._key(rank) for rank in ranks]
        if self.store.check(keys):  # the usual case: all have begun, and one question tells of all of them
            found = self.store.multi_get(keys)
        else:
            found = [self.store.get(key) if self.store.check([key]) else b"0 +" for key in keys]
        pairs = (value.decode(errors="replace").partition(" ") for value in found)
        return [(int(beats), word) for beats, _, word in pairs]

    def farewell(self, link: str) -> tuple[int, str] | None:
        """Who was the first to give up this link, and why."""
        if not link or not self.store.check([self._farewell(link)]):
            return None
        rank, _, why = self.store.get(self._farewell(link)).decode(errors="replace").partition(" ")
        return int(rank), why

    def _farewell(self, link: str) -> str:
        return f"loco/{self.name}/left/{link}"

    def _key(self, rank: int) -> str:
        return f"loco/{self.name}/alive/{rank}"


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
        # By rank: its beats, and since when it has been at that number.
        self._heard: dict[int, tuple[int, float]] = dict.fromkeys(ranks, (-1, 0.0))
        self._left: set[int] = set()
        self._given_up = False  # the link, by somebody

    def look(self, pulse: _Pulse) -> None:
        beats = dict(zip(self.ranks, pulse.read(self.ranks), strict=True))
        now = self._answered = pulse.awake
        for rank, (count, _) in beats.items():
            if count != self._heard[rank][0]:
                self._heard[rank] = count, now
        # Who leaves may have sent all that is waited for: it gets one more beat's time to arrive.
        left = {rank for rank, (_, word) in beats.items() if word.startswith(self._gone_if)}
        gone, self._left = left & self._left, left
        silent = {r for r, (_, since) in self._heard.items() if now - since >= self._allowed} - gone
        farewell = pulse.farewell(self._link)
        if farewell and self._given_up and not silent:
            self._raise(Loss(gone=farewell[:1], why=farewell[1]))
        self._given_up = farewell is not None
        if silent or gone:
            self._raise(Loss(silent=tuple(sorted(silent)), gone=tuple(sorted(gone))))

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


def _beat_on(pulse: _Pulse) -> None:
    last = time.monotonic()
    while not pulse.ended:
        pulse.wake.wait(pulse.every)
        pulse.wake.clear()
        now = time.monotonic()
        # A beat and a question that was not answered take three beats' time; what took more was not awake.
        pulse.awake += min(now - last, 3 * pulse.every)
        last = now
        watches = [watch for watch in pulse.watches if not watch.done]
        try:
            pulse.beat()
            for watch in watches:
                watch.look(pulse)
        except RuntimeError as error:
            for watch in watches:
                watch.miss(pulse, error)


def _stop(pulse: _Pulse, thread: threading.Thread) -> None:
    pulse.word = f"{_ENDED}its program has ended, or dropped its optimizer"
    pulse.ended = True
    pulse.wake.set()
    if thread is not threading.current_thread():
        thread.join(2 * _ALLOWED * pulse.every)
