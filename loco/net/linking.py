"""Process groups that can be built again and again, and whose building ends when a rank is lost.

`dist.new_group` names groups by counting and waits by its own clock: a rank that dies meanwhile costs all
others the group's timeout, and leaves them with different counts. These groups are told their names, and find
each other by a store that gives up.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from ..coordination.store_client import KeyValueStore

TRIES = 5  # gloo's, to connect to a rank whose address it knows
_POLL = 0.01  # seconds


class PatientStore(Store):
    """A store as a backend sees it that is being built.

    Args:
        store: answers at once.
        limit: seconds for all waits together.
        hopeful: whether those who are waited for can still come.
    """

    def __init__(self, store: KeyValueStore, *, limit: float, hopeful: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._deadline = time.monotonic() + limit
        self._hopeful = hopeful
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
            if not self._hopeful() or time.monotonic() > self._deadline:
                raise RuntimeError("another rank did not come to build its links")
            time.sleep(_POLL)


def link(
    store: Store, name: str, members: Sequence[int], *, limit: float, timeout: float
) -> dist.ProcessGroup | None:
    """Build a gloo group of these ranks -> it, or None on all others. All build all groups in one order.

    Args:
        store: by which they find each other.
        name: of this group, and of no other that was ever built.
        limit: seconds for one try to connect to another rank.
        timeout: seconds for what is sent later.

    Raises:
        RuntimeError: a rank was lost.
    """
    rank = dist.get_rank()
    torch_own: Any = distributed_c10d
    group, _ = torch_own._new_process_group_helper(
        len(members),
        members.index(rank) if rank in members else None,
        list(members),
        "gloo",
        store,
        name,
        timeout=timedelta(seconds=limit),
    )
    if rank not in members:
        return None
    torch_own._world.pg_group_ranks[group] = {member: place for place, member in enumerate(members)}
    torch_own._set_pg_timeout(timedelta(seconds=timeout), group)
    return group


def only_gloo() -> bool:
    """Whether torch's default process group has no other backend."""
    return {pair.rpartition(":")[2] for pair in str(dist.get_backend_config()).split(",")} == {"gloo"}
