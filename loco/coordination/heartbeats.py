"""The interface of heartbeats: who is lost, and why. `guarded` ends a wait for a rank that is lost, with an
error that names it."""

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
    """Ranks that a wait can no longer count on, and why.

    silent: ranks without a heartbeat; their processes are dead or stopped, or their links cut.
    gone: ranks that have given up what the others wait for, or ended.
    why: the reason that the first of them gave; its status may have changed since.
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
    """This rank's status, for the others, and theirs: `Liveness`; `NoHeartbeats` of a rank that is alone."""

    dead_after: float

    def say(self, doing: str) -> None:
        """Report what this rank does from now on. Errors on ranks that wait for it quote it."""
        ...

    def leave(self, why: str, link: str = "") -> None:
        """Report that this rank has given up what the others wait for. Returns once the report is in the
        store, or after a moment.

        link: the one that it has given up for good. A rank that waits on this link learns of that, even if
        this rank works again by then.
        """
        ...

    def watching(
        self, ranks: Sequence[int], alarm: Alarm, *, link: str = "", left_may_return: bool = False
    ) -> AbstractContextManager[None]:
        """Listen to `ranks` while the body runs. `alarm` is called at most once, by another thread.

        link: the one on which they are waited for.
        left_may_return: ranks that have left are expected back; only ranks that have ended count as lost.
        """
        ...

    def departed(self, ranks: Sequence[int], link: str) -> Loss | None:
        """Which rank has given up this link, or which of these ranks has left, as far as the store can tell.
        Waits a moment, because a rank that has just hung up may be about to report it."""
        ...

    def last_words(self, rank: int) -> str:
        """A rank's latest status, as far as the store can tell."""
        ...

    def describe(self, loss: Loss, name: Callable[[Sequence[int]], str]) -> str:
        """A sentence for an error; `name` names ranks."""
        ...


class NoHeartbeats:
    """For a rank that is alone: nobody waits for it."""

    dead_after = float("inf")

    def say(self, doing: str) -> None:
        pass

    def leave(self, why: str, link: str = "") -> None:
        pass

    def watching(
        self, ranks: Sequence[int], alarm: Alarm, *, link: str = "", left_may_return: bool = False
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def departed(self, ranks: Sequence[int], link: str) -> Loss | None:
        return None

    def last_words(self, rank: int) -> str:
        return "nothing"

    def describe(self, loss: Loss, name: Callable[[Sequence[int]], str]) -> str:
        return f"lost {name(loss.silent + loss.gone)}"


class Guard:
    """Whether a rank was lost during one wait, and which."""

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
        """Raise a RuntimeError if a rank is lost; for waits that poll."""
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
    left_may_return: bool = False,
    on_loss: Callable[[], object] = lambda: None,
    raises: bool = True,
) -> Iterator[Guard]:
    """Watch `ranks` while the body runs.

    Args:
        phase: what the wait is for.
        named: names ranks in errors.
        link, left_may_return: as `Heartbeats.watching`.
        on_loss: called at most once, by another thread: ends the wait.
        raises: if a rank was lost, an error of the body is raised as a TransportError that names it.

    Raises:
        TransportError: names who was lost. It is lasting unless that rank has only given up this round.
    """
    guard = Guard(lambda loss: liveness.describe(loss, named), on_loss)
    with liveness.watching(ranks, guard.notice, link=link, left_may_return=left_may_return):
        try:
            yield guard
        except (RuntimeError, ValueError) as error:
            if not raises or guard.loss is None or isinstance(error, AuthenticationError):
                raise
            lasting = left_may_return or not guard.loss.gone
            raise TransportError(f"{phase}: {guard.sentence}", lasting=lasting) from error
