"""gloo pairs that can be built again and again, and whose building ends when a rank is lost.

`dist.new_group` names groups by counting and waits by its own clock: a rank that dies meanwhile costs all
others the group's timeout, and leaves them with different counts. Pairs are outside of torch's process
groups: they are told their name, and find each other by a store that gives up.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ..coordination.store_client import KeyValueStore
from .loop_thread import preempting_nobody
from .mesh import Pairs

TRIES = 5  # gloo's, to connect to a rank whose address it knows
_POLL = 0.01  # seconds


class PatientStore(Store):
    """A store as a backend sees it that is being built.

    Args:
        store: answers at once.
        limit: seconds for all waits together.
        may_still_come: whether no rank that is waited for is lost.
    """

    def __init__(self, store: KeyValueStore, *, limit: float, may_still_come: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._deadline = time.monotonic() + limit
        self._may_still_come = may_still_come
        self.written: list[str] = []  # keys

    def set(self, key: str, value: Any) -> None:
        self.written.append(key)
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        while not self._store.check(keys):
            if not self._may_still_come() or time.monotonic() > self._deadline:
                raise RuntimeError("another rank did not come to build its links")
            time.sleep(_POLL)


def link(store: PatientStore, name: str, member: int, size: int, *, limit: float, address: str = "") -> Pairs:
    """Build gloo pairs between all members of a group; all do it at once.

    Args:
        store: by which they find each other.
        name: of these links, and of no others that were ever built.
        member: this one, of 0 … size−1.
        limit: seconds for one try to connect to another member.
        address: by which the others reach this machine; by default what gloo finds, or its interface if
            GLOO_SOCKET_IFNAME names one.

    Raises:
        RuntimeError: a member was lost.
    """
    gloo: Any = ProcessGroupGloo
    how: Any = timedelta(seconds=limit)
    with preempting_nobody():
        if address and "GLOO_SOCKET_IFNAME" not in os.environ:
            options = gloo._Options()
            options._timeout = how
            options._devices = [gloo.create_device(hostname=address)]
            how = options
        return Pairs(gloo(PrefixStore(name, store), member, size, how), name, member, size)


def forget_messages(where: TracebackType | None) -> None:
    """gloo hangs up once nobody holds its messages, and the frames of a traceback do: drop what ours hold."""
    while where is not None:
        if where.tb_frame.f_globals.get("__name__", "").startswith("loco."):
            with suppress(RuntimeError):  # it is still running
                where.tb_frame.clear()
        where = where.tb_next
