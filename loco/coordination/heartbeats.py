"""What a rank that waits for others wants to know of them: who is lost, and why. Its wait then ends, with an
error that names that rank."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from ..errors import AuthenticationError, TransportError

Alarm = Callable[["Loss"], None]


@dataclass(frozen=True)
class Loss:
    """Who can't be counted on, and why.

    silent: ranks without a heartbeat; their processes are dead or stopped, or their links cut.
    gone: ranks that have given up what the others wait for, or ended.
    why: what the first of them said then; it may have come back, and have said something else, since.
    store: why the store does not answer.
    """

    silent: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    why: str = ""
    store: str = ""


# How a status begins: a rank is at work; it has given up a round, and may come back; it has ended.
AT_WORK, LEFT, ENDED = "+", "-", "!"


@dataclass(frozen=True)
class Beat:
    """A heartbeat, as the store holds it: JSON, because a vote's name may contain any character.

    count: of the rank's beats. confirmed: its latest votes that were committed, by set of links.
    """

    count: int = 0
    status: str = AT_WORK
    confirmed: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Beat":
        """The inverse of `str`.

        Raises:
            ValueError: it is malformed.
        """
        try:
            count, status, *confirmed = json.loads(text)
        except (TypeError, RecursionError) as error:
            raise ValueError(f"not a heartbeat: {error}") from error
        if type(count) is not int or any(type(part) is not str for part in (status, *confirmed)):
            raise ValueError("not a heartbeat: its fields have other types")
        return cls(count, status, tuple(confirmed))

    def __str__(self) -> str:
        return json.dumps([self.count, self.status, *self.confirmed], separators=(",", ":"))

    @property
    def has_left(self) -> bool:
        return self.status.startswith((LEFT, ENDED))

    @property
    def words(self) -> str:
        return self.status[1:]


class Heartbeats(Protocol):
    """What waits for other ranks need to know of them: of all that live (`Liveness`), or of nobody."""

    dead_after: float

    def say(self, doing: str) -> None:
        """What this rank does from now on, for the errors of those who wait for it."""
        ...

    def leave(self, why: str, link: str = "") -> None:
        """This rank has given up what the others wait for. Returns once they can know, or soon anyway.

        link: which it has given up, for good. A rank that waits on it learns of it even if this rank is back
        by then.
        """
        ...

    def watching(
        self, ranks: Sequence[int], alarm: Alarm, *, link: str = "", reunion: bool = False
    ) -> AbstractContextManager[None]:
        """Listen to `ranks` meanwhile. `alarm` is called at most once, by another thread.

        link: that they are waited for on.
        reunion: those who left are expected back, so only an end counts.
        """
        ...

    def departed(self, ranks: Sequence[int], link: str) -> Loss | None:
        """Who has given up this link, or is one of these ranks and has left, as far as the store can tell.
        Of those who have just hung up: they may be about to say it."""
        ...

    def last_words(self, rank: int) -> str:
        """What a rank last said, as far as the store can tell."""
        ...

    def describe(self, loss: Loss, name: Callable[[Sequence[int]], str]) -> str:
        """A sentence; `name` tells what ranks are called."""
        ...


class NoHeartbeats:
    """Those of a rank that is alone, so that nobody listens to it."""

    dead_after = float("inf")

    def say(self, doing: str) -> None:
        pass

    def leave(self, why: str, link: str = "") -> None:
        pass

    def watching(
        self, ranks: Sequence[int], alarm: Alarm, *, link: str = "", reunion: bool = False
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def departed(self, ranks: Sequence[int], link: str) -> Loss | None:
        return None

    def last_words(self, rank: int) -> str:
        return "nothing"

    def describe(self, loss: Loss, name: Callable[[Sequence[int]], str]) -> str:
        return f"lost {name(loss.silent + loss.gone)}"


class Guard:
    """What has been noticed during one wait."""

    def __init__(self, sentence: Callable[[Loss], str], on_loss: Callable[[], object]) -> None:
        self.loss: Loss | None = None
        self._sentence = sentence
        self._on_loss = on_loss
        self._noticed = threading.Event()

    def notice(self, loss: Loss) -> None:
        self.loss = loss
        self._noticed.set()
        self._on_loss()

    def notices_within(self, seconds: float) -> bool:
        """Whether a rank is lost, or is found to be so within some seconds."""
        return self._noticed.wait(seconds)

    @property
    def sentence(self) -> str:
        """Who is lost, and why; "" if nobody is."""
        return "" if self.loss is None else self._sentence(self.loss)

    def check(self) -> None:
        """For a wait that looks again and again: end it once a rank is lost."""
        if self.loss is not None:
            raise RuntimeError(self.sentence)


@contextmanager
def guarded(
    liveness: Heartbeats,
    ranks: Sequence[int],
    *,
    phase: str,
    named: Callable[[Sequence[int]], str],
    link: str = "",
    reunion: bool = False,
    on_loss: Callable[[], object] = lambda: None,
    raises: bool = True,
) -> Iterator[Guard]:
    """Watch `ranks` meanwhile.

    Args:
        phase: what the wait is for.
        named: tells what ranks are called.
        link, reunion: as `Heartbeats.watching`.
        on_loss: called at most once, by another thread: ends the wait.
        raises: an error inside is raised as that of the rank that was lost, if one was.

    Raises:
        TransportError: names who was lost. It is lasting unless that rank has only given up this round.
    """
    guard = Guard(lambda loss: liveness.describe(loss, named), on_loss)
    with liveness.watching(ranks, guard.notice, link=link, reunion=reunion):
        try:
            yield guard
        except (RuntimeError, ValueError) as error:
            if not raises or guard.loss is None or isinstance(error, AuthenticationError):
                raise
            lasting = reunion or not guard.loss.gone
            raise TransportError(f"{phase}: {guard.sentence}", lasting=lasting) from error
