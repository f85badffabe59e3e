"""A line to the process group's store on which every question is answered within a limit, or given up.

torch's own waits for an answer without end when the store's host is stopped, or the link to it is cut. So a
thread asks, and whoever wants to know waits for the thread. Nor does torch's connect again: a router that
forgets a connection which was idle during the inner steps would cut this rank off for good.
"""

import socket
import threading
import time
import weakref
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_Asked = SimpleQueue["tuple[Future[Any], str, tuple[Any, ...]] | None"]
_AGAIN = 60.0  # seconds until a thread that waits without end is replaced a second time


class StoreClient(Store):
    """A store's own connection, for questions that it can answer at once: it waits for no key.

    A store does one thing at a time; what is asked over another line need not wait for it. A question that
    was given up may still be answered later, or twice, so it must not matter when and how often it is.

    Args:
        store: the process group's.
        limit: seconds, after which a question raises a RuntimeError.
    """

    def __init__(self, store: Store, *, limit: float) -> None:
        super().__init__()
        self._store: Any = store
        self._limit = limit
        self._replaced = -_AGAIN
        self._start(self._store.clone())

    def _start(self, connection: Any) -> None:
        self._asked: _Asked = SimpleQueue()
        thread = threading.Thread(
            target=_answer,
            args=(self._store, connection, self._limit, self._asked),
            name="loco store line",
            daemon=True,
        )
        thread.start()
        # Also at the interpreter's exit, which must not find the thread inside the store.
        self._end = weakref.finalize(self, _hang_up, self._asked, thread)

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._ask("get", key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are there."""
        return self._ask("multi_get", keys)

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._ask("compare_set", key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", key)

    def _ask(self, question: str, *args: Any) -> Any:
        answer: Future[Any] = Future()
        self._asked.put((answer, question, args))
        try:
            return answer.result(self._limit)
        except TimeoutError:
            answer.cancel()  # if its turn has not come yet
            self._replace()
            raise RuntimeError(f"no answer within {self._limit:g} s") from None

    def _replace(self) -> None:
        """Leave a thread to itself that may never hear of its connection again."""
        now = time.monotonic()
        if now - self._replaced >= _AGAIN:
            self._replaced = now
            self._end.detach()
            self._asked.put(None)
            self._start(None)


def _answer(store: Any, connection: Any, limit: float, asked: _Asked) -> None:
    while (one := asked.get()) is not None:
        answer, question, args = one
        if not answer.set_running_or_notify_cancel():
            continue
        try:
            try:
                connection = connection or _connected(store, limit)
                found = getattr(connection, question)(*args)
            except dist.DistNetworkError:
                connection = None
                connection = _connected(store, limit)
                found = getattr(connection, question)(*args)
            answer.set_result(found)
        except BaseException as error:
            answer.set_exception(error)
        # An error's traceback holds who asked, and with it the line that is to be ended once nobody holds it.
        del one, answer, question, args


def _connected(store: Any, limit: float) -> Any:
    """A new connection. torch's own would try for the process group's timeout, and log each time."""
    at = store
    while isinstance(at, PrefixStore):
        at = at.underlying_store
    if isinstance(at, TCPStore):
        try:
            socket.create_connection((at.host, at.port), limit).close()
        except OSError as error:
            raise RuntimeError(f"{at.host}:{at.port} can't be reached: {error}") from error
    return store.clone()


def _hang_up(asked: _Asked, thread: threading.Thread) -> None:
    asked.put(None)
    if thread is not threading.current_thread():
        thread.join(0.5)
