"""A round in a thread of its own."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from ...errors import TransportError, WireError
from ...members.view import View
from ...wire.refusal import Refused
from ..outer.outer_state import OuterState
from ..round import Round
from ..views import Views

_AT_EXIT = 5.0  # seconds
_logger = logging.getLogger(__name__)


class Landing(NamedTuple):
    """What came of a flight.

    come: the round, if it counts.
    behind: the view in which this site is given θ, if the others have gone on without it.
    """

    come: Round | None
    behind: View | None = None


def travel(
    views: Views, round_in: Callable[[View], Round], advice: Callable[[], AbstractContextManager[None]]
) -> Landing:
    """Bring a round to its verdict, tried again as long as that can help.

    Args:
        round_in: makes the round, in a view.
        advice: is put around the error with which it fails.
    """
    attempts = views.membership.attempts()
    while True:
        view: View | None = None
        current: Round | None = None
        try:
            come = views.decide_unless_told_later()
            if come is None:
                view = views.form(ready=True)
                come = views.decide_as_told(view)
                if view.handover is not None and view.handover.source is not None:
                    return Landing(views.landed(come), behind=view)
                if come is None:
                    current = round_in(view)
                    come = views.run(current)
            return Landing(views.landed(come))
        except Refused as refusal:
            error, refused = refusal.error, True
        except (TransportError, WireError) as failure:
            error, refused = failure, False
        own_fault = current is not None and current.failed_here
        with advice():
            attempts.failed(error, linked=view is not None, refused=refused, own_fault=own_fault)


class Flight:
    """
    Args:
        run: brings a round to its verdict.

    Attributes:
        seconds: how long it took; 0 as long as it lasts.
        has_ended: its result is there.
    """

    def __init__(self, run: Callable[[], Landing]) -> None:
        self.seconds = 0.0
        self._run = run
        self._landing: Landing | None = None
        self._error: BaseException | None = None
        self._is_taken = threading.Lock()  # by the thread that travels
        self._has_taken_off = self.has_ended = False
        self._end = SimpleQueue[None]()

    def take_off(self) -> None:
        """Travel, in a thread. Called again, after Ctrl-C, it does what was cut off."""
        if not self._has_taken_off:
            # A program that ends does not wait for sites that may be gone.
            threading.Thread(target=self._travel, name="loco round in flight", daemon=True).start()

    def wait(self, limit: float | None = None) -> bool:
        """-> whether it has ended, after so many seconds at most. Ctrl-C ends the wait alone."""
        if not self.has_ended:
            with suppress(Empty):
                self._end.get(timeout=limit)
        return self.has_ended

    def result(self) -> Landing:
        """Of a flight that has ended.

        Raises:
            Exception: why the round failed.
        """
        if self._error is not None:
            raise self._error
        assert self._landing is not None
        return self._landing

    def _travel(self) -> None:
        if not self._is_taken.acquire(blocking=False):
            return  # Ctrl-C came while a thread began, and another one was begun
        self._has_taken_off, began = True, time.perf_counter()
        try:
            with torch.no_grad():  # which counts for one thread
                self._landing = self._run()
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - began
        self.has_ended = True
        self._end.put(None)


def warn_of_the_end(state: OuterState, flights: list[Flight]) -> None:
    """At the end of the program, or of the optimizer."""
    if not state.on_its_way:
        return
    _logger.warning(
        "the program ends with round %d in flight, which is in no site's weights: call sync() after the last "
        "step, on all sites",
        state.on_its_way,
    )
    for flight in flights:
        flight.wait(_AT_EXIT)  # others may wait for this site's part of it
