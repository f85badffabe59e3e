"""What concerns all ranks, logged once on each machine; and waits and transfers that last, each minute."""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Self
from weakref import WeakSet

REMIND_EVERY = 60.0  # seconds of one wait
SAY_SOON = 4.0  # seconds, for what a user waits for at the start, or what can't be seen otherwise


def warn_once_per_machine(logger: logging.Logger, message: str, *args: object) -> None:
    """Log what every rank logs: as a warning on the first rank of this machine, as information on the others.

    torchrun and other launchers number a machine's ranks in LOCAL_RANK. A process without it is alone.
    """
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    logger.log(logging.WARNING if first else logging.INFO, message, *args)


class Waiting:
    """A wait, as a context: every `REMIND_EVERY` seconds it says what is still waited for, and since when.

    Args:
        what: is still waited for; called by another thread.
        first: seconds until it is said for the first time, if that is sooner.
    """

    def __init__(
        self, logger: logging.Logger, what: Callable[[], str], *, first: float | None = None
    ) -> None:
        self._logger = logger
        self._what = what
        self._began = time.monotonic()
        self.due = self._began + min(REMIND_EVERY, REMIND_EVERY if first is None else first)

    def __enter__(self) -> Self:
        _clock.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _clock.remove(self)

    def say(self) -> None:
        now = time.monotonic()
        self.due = now + REMIND_EVERY
        text = "still waiting after %.0f s: %s"
        warn_once_per_machine(self._logger, text, now - self._began, self._what())


class Progress(Waiting):
    """A wait while bytes are moved, which soon says how far that has come and how long the rest may take.

    Args:
        what: is moved, such as "reading checkpoint 3".
        total: bytes; None: nobody knows yet.
        done: how many have been moved, if that is known otherwise than by `add`.
    """

    def __init__(
        self, logger: logging.Logger, what: str, total: int | None, done: Callable[[], int] | None = None
    ) -> None:
        super().__init__(logger, lambda: self._told(what, total), first=SAY_SOON)
        self._added = 0
        self._done = done or (lambda: self._added)

    def add(self, count: int) -> None:
        self._added += count

    def _told(self, what: str, total: int | None) -> str:
        try:
            done = self._done()
        except (OSError, ValueError):  # a file that has just been closed
            return what
        seconds = time.monotonic() - self._began
        of = "" if total is None else f" of {_megabytes(total)}"
        text = f"{what}: {_megabytes(done)}{of} MB"
        if not done:
            return text
        rate = done / seconds
        left = "" if total is None else f", about {max(total - done, 0) / rate:.0f} s left"
        return f"{text} at {_megabytes(rate)} MB/s{left}"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f}"


class _Clock:
    """One thread for all waits of this process; it ends when there is none left.

    Its lock is one that Ctrl-C can't leave locked, as it can a Condition, whose methods are Python's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sooner = SimpleQueue[None]()  # wakes the thread
        self._waits = WeakSet[Waiting]()  # a wait that Ctrl-C has ended anywhere is forgotten
        self._thread: threading.Thread | None = None
        self._next = 0.0  # when it looks again

    def add(self, wait: Waiting) -> None:
        with self._lock:
            self._waits.add(wait)
            if self._thread is None or not self._thread.is_alive():  # or this is a forked child
                self._thread = threading.Thread(target=self._run, name="loco tells of waits", daemon=True)
                self._thread.start()
            elif wait.due < self._next:
                self._sooner.put(None)

    def remove(self, wait: Waiting) -> None:
        with self._lock:
            self._waits.discard(wait)

    def _run(self) -> None:
        while self._look():
            pass

    def _look(self) -> bool:
        with self._lock:
            due = [wait.due for wait in self._waits]  # of those that are left: one may go at any line
            if not due:
                self._thread = None
                return False
            self._next = min(due)
        with suppress(Empty):
            self._sooner.get(timeout=max(self._next - time.monotonic(), 0.0))
        with self._lock:
            late = [wait for wait in self._waits if wait.due <= time.monotonic()]
        for wait in late:
            wait.say()
        return True


_clock = _Clock()
