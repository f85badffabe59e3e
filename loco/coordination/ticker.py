"""A thread that calls one short function periodically, until its owner is gone."""

import threading
import weakref
from collections.abc import Callable


class Ticker:
    """Calls `tick` every `every` seconds, and at once when it is woken.

    Args:
        owner: the thread ends when nothing refers to the owner any more, so `tick` must not refer to it; and
            at the interpreter's exit, when no thread may be inside a C++ library.
        tick: what to do. It handles its own errors: one that escapes ends the thread.
        last: called at the end, before one last tick; None: there is no last tick.
        patience: seconds to wait for the thread's end.
    """

    def __init__(
        self,
        owner: object,
        tick: Callable[[], object],
        *,
        every: float,
        name: str,
        patience: float,
        last: Callable[[], object] | None = None,
    ) -> None:
        self._state = _State(once_more=last is not None)
        self._thread = threading.Thread(target=_run, args=(self._state, tick, every), name=name, daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(owner, _end, self._state, self._thread, last, patience)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def wake(self) -> None:
        self._state.wake.set()

    def close(self) -> None:
        self._finalizer()


class _State:
    def __init__(self, *, once_more: bool) -> None:
        self.once_more = once_more
        self.wake = threading.Event()
        self.ended = False


def _run(state: _State, tick: Callable[[], object], every: float) -> None:
    while not state.ended:
        state.wake.wait(every)
        state.wake.clear()
        if not state.ended:
            tick()
    if state.once_more:
        tick()


def _end(state: _State, thread: threading.Thread, last: Callable[[], object] | None, patience: float) -> None:
    if last is not None:
        last()
    state.ended = True
    state.wake.set()
    if thread is not threading.current_thread():
        thread.join(patience)
