"""Disks that fail: a small one, or one whose writer is killed, and a C library whose calls fail."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loco.kernels.cpu import build


@contextmanager
def small_disk(folder: Path, size: str, inodes: int = 0) -> Iterator[None]:
    """A disk of its own in this folder, for as many files as its inodes allow (0: any number). Where mounting
    is not allowed the test is skipped."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs to mount a small tmpfs, which is not allowed: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


class DeadlyCall:
    """SIGKILL comes at the `number`-th thing that this process does to the disk in a folder; 0: never."""

    def __init__(self, folder: str, number: int) -> None:
        self._folder, self._number = folder, number
        self.done, self.counting = 0, True
        sys.addaudithook(self.count)

    def count(self, event: str, arguments: Any = ()) -> None:
        """What is no audit event by itself may be counted, too."""
        if not self.counting or (event == "open" and not str(arguments[0]).startswith(self._folder)):
            return
        if event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree", "os.fsync"):
            self.done += 1
            if self.done == self._number:
                os.kill(os.getpid(), signal.SIGKILL)


def failing_library(folder: Path) -> Path:
    """What is preloaded to let calls fail, see failing_disk.c. Without a compiler the test is skipped."""
    library = folder / "failing_disk.so"
    try:
        compiler = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    source = Path(__file__).with_name("failing_disk.c")
    subprocess.run([*compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library
