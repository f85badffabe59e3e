"""Processes that a test has started, or that those have."""

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_LONG = 30.0  # seconds


def python_path() -> str:
    """A PYTHONPATH with which a new process finds all that this one finds."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def variables(pid: int) -> dict[str, str]:
    """Of its environment."""
    pairs = (Path("/proc") / str(pid) / "environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def gone(pids: Iterable[int]) -> bool:
    """Whether all of these have ended, after a while. Who has ended may wait long to be asked for it."""
    deadline = time.monotonic() + _LONG
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
