"""A round in a thread of its own."""

import threading
import time
from collections.abc import Callable

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
        self._began = time.perf_counter()
        # A program that ends does not wait for sites that may be gone.
        self._thread = threading.Thread(target=self._travel, name="loco round in flight", daemon=True)
        self._thread.start()

    def wait(self, limit: float | None = None) -> bool:
        """-> whether it has ended, after so many seconds at most. Ctrl-C ends the wait alone."""
        self._thread.join(limit)
        return not self._thread.is_alive()

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
        try:
            with torch.no_grad():  # which counts for one thread
                self._come = self._run()
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - self._began
