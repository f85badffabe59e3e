"""A wait for other ranks ends once one of them is lost, with an error that names it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..errors import AuthenticationError, TransportError
from .heartbeats import Heartbeats, Loss


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
