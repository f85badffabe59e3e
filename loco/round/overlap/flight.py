"""A round in a thread of its own."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch

from ..round import Round


class Flight:
    """
    Args:
        run: brings a round to its verdict, and returns it if it counts.

    Attributes:
        seconds: how long it took; 0 as long as it lasts.
    """

    def __init__(self, run: Callable[[], Round]) -> None:
        self.seconds = 0.0
        self._run = run
        self._come: Round | None = None
        self._error: BaseException | None = None
        self._is_taken = threading.Lock()  # by the thread that travels
        self._has_taken_off = self._has_ended = False
        self._end = SimpleQueue[None]()

    def take_off(self) -> None:
        """Travel, in a thread. Called again, after Ctrl-C, it does what was cut off."""
        if not self._has_taken_off:
            # A program that ends does not wait for sites that may be gone.
            threading.Thread(target=self._travel, name="loco round in flight", daemon=True).start()

    def wait(self, limit: float | None = None) -> bool:
        """-> whether it has ended, after so many seconds at most. Ctrl-C ends the wait alone."""
        if not self._has_ended:
            with suppress(Empty):
                self._end.get(timeout=limit)
        return self._has_ended

    def result(self) -> Round:
        """Of a flight that has ended.

        Raises:
            Exception: why the round failed.
        """
        if self._error is not None:
            raise self._error
        assert self._come is not None
        return self._come

    def _travel(self) -> None:
        if not self._is_taken.acquire(blocking=False):
            return  # Ctrl-C came while a thread began, and another one was begun
        self._has_taken_off, began = True, time.perf_counter()
        try:
            with torch.no_grad():  # which counts for one thread
                self._come = self._run()
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - began
        self._has_ended = True
        self._end.put(None)
