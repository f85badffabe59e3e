"""No process outlives the one that started it, however that one ends.

A program that cannot ask for this itself is started through this one, which becomes it:

    python -m experiments.processes.orphans <the parent's process id> program arguments…
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process when the one that started it has ended, by SIGKILL too.

    It holds across an exec. `parent`: that one's process id; if it has ended before this call, so does this.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(signal.SIGKILL))
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def through(command: list[str]) -> list[str]:
    """The command that starts `command` as a process that dies with the caller's."""
    return [sys.executable, "-m", "experiments.processes.orphans", str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
