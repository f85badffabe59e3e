"""A line to the process group's store on which every question is answered within a limit, or given up.

torch's own waits for an answer without end when the store's host is stopped, or the link to it is cut. So a
thread asks, and whoever wants to know waits for the thread.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_Asked = SimpleQueue["tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None"]


class Line(Store):
    """A store's own connection, for questions that it can answer at once: it waits for no key.

    A store does one thing at a time; what is asked over another line need not wait for it. A question that
    was given up may still be answered later, so it must not matter when it is.

    Args:
        store: the process group's.
        limit: seconds, after which a question raises a RuntimeError.
    """

    def __init__(self, store: Store, *, limit: float) -> None:
        super().__init__()
        self._store: Any = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._limit = limit
        self._asked: _Asked = SimpleQueue()
        thread = threading.Thread(target=_answer, args=(self._asked,), name="loco store line", daemon=True)
        thread.start()
        # Also at the interpreter's exit, which must not find the thread inside the store.
        weakref.finalize(self, _hang_up, self._asked, thread)

    def set(self, key: str, value: Any) -> None:
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._ask(self._store.get, key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are there."""
        return self._ask(self._store.multi_get, keys)

    def check(self, keys: list[str]) -> bool:
        return self._ask(self._store.check, keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._ask(self._store.compare_set, key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self._ask(self._store.delete_key, key)

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        answer: Future[Any] = Future()
        self._asked.put((answer, question, args))
        try:
            return answer.result(self._limit)
        except TimeoutError:
            answer.cancel()  # if its turn has not come yet
            raise RuntimeError(f"no answer within {self._limit:g} s") from None


def _answer(asked: _Asked) -> None:
    while (one := asked.get()) is not None:
        answer, question, args = one
        if not answer.set_running_or_notify_cancel():
            continue
        try:
            answer.set_result(question(*args))
        except BaseException as error:
            answer.set_exception(error)
        # An error's traceback holds who asked, and with it the line that is to be ended once nobody holds it.
        del one, answer, question, args


def _hang_up(asked: _Asked, thread: threading.Thread) -> None:
    asked.put(None)
    if thread is not threading.current_thread():
        thread.join(0.5)
