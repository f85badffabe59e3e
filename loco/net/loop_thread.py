"""gloo's thread that reads from connections, so that it does not hold up the thread that sends.

A thread that sends holds the connection's lock. If what the peer sends wakes gloo's thread on the same core
meanwhile, that one preempts the sender, finds the lock taken, and asks again and again (gloo's
`Pair::handleEvents`, called for as long as there is something to read) until the scheduler ends its turn:
for some 3 ms nobody sends, several times in a round. A thread of the scheduler's batch policy preempts nobody
when it wakes; it still goes to a core that is free.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME = "gloo_tcp_loop"
_THREADS = Path("/proc/self/task")


@contextmanager
def preempting_nobody() -> Iterator[None]:
    """For threads of links that gloo builds inside it. A system that has no such policy goes on without."""
    before = _loops()
    try:
        yield
    finally:
        for thread in _loops() - before:
            with suppress(OSError):  # it may have ended; or the system allows no change
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _loops() -> set[int]:
    found: set[int] = set()
    if not hasattr(os, "SCHED_BATCH"):
        return found
    with suppress(OSError):
        for thread in _THREADS.iterdir():
            with suppress(OSError):
                if (thread / "comm").read_text().strip() == _NAME:
                    found.add(int(thread.name))
    return found
