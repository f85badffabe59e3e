"""Disks that fail: a small one, to be filled or made read-only, and a C library whose calls return errors."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loco.kernels.cpu import build


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A disk of its own in this folder. Where mounting is not allowed the test is skipped."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs to mount a small tmpfs, which is not allowed: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


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
