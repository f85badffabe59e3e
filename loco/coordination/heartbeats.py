"""What a rank that waits for others wants to know of them: who is lost, and why."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

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
