"""Messages that a thread of C's sends on a socket while Python is kept from it."""

import os
import weakref
from collections.abc import Sequence
from ctypes import CDLL, c_char_p, c_int, c_int64, c_void_p
from functools import cache
from itertools import accumulate

from .build import BUILDS, BuildError
from .library import builds_for_this_cpu, load

_NS = 1_000_000_000


class TimedSends:
    """A thread that sends prepared messages, one every so often, without Python's interpreter lock.

    Raises:
        BuildError: there is no compiler, or no thread.
    """

    def __init__(self) -> None:
        self._library = _library()
        self._sends = self._library.loco_sends_start()
        if not self._sends:
            raise BuildError("the system has no thread to give")
        self._end = weakref.finalize(self, _stop, self._library, self._sends, os.getpid())
        self._end.atexit = False  # the thread ends with the process

    def prepare(
        self, socket: int, messages: Sequence[bytes], *, first: float, every: float, expected: int
    ) -> int:
        """Take these messages in the place of the earlier ones -> how many of those were sent.

        Args:
            socket: a connected one, which stays open until `clear`.
            first: seconds until the first message is sent.
            every: seconds between two.
            expected: how many were sent, as far as the caller knows: if it were others, nothing is changed.
        """
        ends = (c_int64 * len(messages))(*accumulate(map(len, messages)))
        return self._library.loco_sends_prepare(
            *(self._sends, socket, len(messages), b"".join(messages), ends),
            *(int(first * _NS), int(every * _NS), expected),
        )

    def clear(self) -> int:
        """Send nothing until messages are prepared again -> how many were sent."""
        return self._library.loco_sends_clear(self._sends)

    def close(self) -> None:
        """End the thread."""
        self._end()


@cache
def _library() -> CDLL:
    library = load(BUILDS[builds_for_this_cpu()[-1]])
    library.loco_sends_start.restype = c_void_p
    library.loco_sends_start.argtypes = ()
    library.loco_sends_prepare.restype = c_int64
    library.loco_sends_prepare.argtypes = (
        *(c_void_p, c_int, c_int64, c_char_p, c_void_p),
        *(c_int64, c_int64, c_int64),
    )
    library.loco_sends_clear.restype = c_int64
    library.loco_sends_clear.argtypes = (c_void_p,)
    library.loco_sends_stop.restype = None
    library.loco_sends_stop.argtypes = (c_void_p,)
    return library


def _stop(library: CDLL, sends: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has no such thread
        library.loco_sends_stop(sends)
