"""Waits for messages in a thread of their own, so that the thread that needs them can give them up.

gloo's wait ends with its message or with its time, and not always with its connection: a send that meets a
closed one is forgotten, and whoever waits for it is not told. Nor does Ctrl-C end it.
"""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_GRACE = 0.25  # seconds, for a wait that was interrupted to say how it ended

_Queue = SimpleQueue["_Wait | None"]


class _Wait:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait
        self.error: BaseException | None = None
        self.over = threading.Event()  # or given up
        self.ended = False


class CancellableWait:
    """One thread, started at its first wait. One that is lost to a wait without end is replaced."""

    def __init__(self) -> None:
        self._queue: _Queue | None = None

    def wait(self, wait: Callable[[], object], alarm: "Alarm") -> None:
        """`wait()`, until `alarm` is raised and a little longer.

        Raises:
            RuntimeError: `wait` did, or it was given up.
        """
        if self._queue is None:
            self._queue = SimpleQueue()
            thread = threading.Thread(
                target=_work, args=(self._queue,), name="loco waits for messages", daemon=True
            )
            thread.start()
            weakref.finalize(self, _end, self._queue, thread)
        one = _Wait(wait)
        alarm.ends(one.over)
        queue, self._queue = self._queue, None
        queue.put(one)
        try:
            one.over.wait()
            one.over.clear()
            if not one.ended:
                one.over.wait(_GRACE)
        finally:  # Ctrl-C, too
            if one.ended:
                self._queue = queue
            else:
                queue.put(None)
        if not one.ended:
            raise RuntimeError("given up")
        if one.error is not None:
            raise one.error


class Alarm:
    """What a wait is to be given up for, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._raised = False
        self._event: threading.Event | None = None

    def ends(self, event: threading.Event) -> None:
        with self._lock:
            self._event = event
            if self._raised:
                event.set()

    def ring(self) -> None:
        with self._lock:
            self._raised = True
            if self._event is not None:
                self._event.set()


def _work(queue: _Queue) -> None:
    while (one := queue.get()) is not None:
        try:
            one.wait()
        except BaseException as error:
            one.error = error.with_traceback(None)  # its frames hold messages, and with them connections
        one.ended = True
        one.over.set()
        del one  # for the same reason


def _end(queue: _Queue, thread: threading.Thread) -> None:
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join(_GRACE)
