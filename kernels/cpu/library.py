"""Finds the compiled library: it came with the wheel, or is compiled at first use and cached.

The file name of a wheel's library is a digest of its sources and flags, so one that was built from others is
not found. It is trusted as the Python files beside it are.

A cached library is found by a key of its sources, flags, compiler and machine. Its file ends with a seal over
that key and the bytes before it, so that a stale or damaged file is never loaded.

The seal is no secret: whoever can write to the cache's folder can run code in this process. So the folder is
used only if nobody else can write to it, and only through a descriptor, since its path may lead elsewhere a
moment after the check.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import shlex
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from . import build

WHEELS_FOLDER = Path(__file__).parent  # where setup.py puts what it compiles
SEAL_BYTES = 32
LONGEST_WAIT = 120.0  # seconds, for another process that compiles

_logger = logging.getLogger(__name__)


def builds_for_this_cpu() -> list[str]:
    """The builds that run here, the best one last. torch says what the CPU can do, and ATEN_CPU_CAPABILITY
    limits both."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    names = build.builds_for_this_machine()
    return names[: names.index(best) + 1] if best in names else names[:1]


def load(extra: tuple[str, ...]) -> ctypes.CDLL:
    """The library built with FLAGS and `extra`: from the wheel, from the cache or compiled now.

    Raises:
        BuildError: there is no compiler, or what it makes can't be used.
    """
    if sys.byteorder != "little":
        raise build.BuildError("the C kernels are written for little-endian machines")
    supplied = _from_wheel(extra)
    if supplied is not None:
        return supplied
    compiler = build.find_compiler()
    version = build.run([*compiler, "--version"]).stdout
    identity = "\0".join([build.library_name(extra), *compiler, version])
    key = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    name = f"kernels-{key}.so"
    with _opened(cache_folder()) as cache:
        if cache is None:
            return _compile(compiler, extra, key, name, None)
        kept = _inside(cache) / name
        library = _load_whole(kept, key)
        if library is None:
            # Compiling takes many seconds of a core, and all ranks of a machine begin at once.
            with _one_at_a_time(cache):
                library = _load_whole(kept, key) or _compile(compiler, extra, key, name, cache)
        return library


def _from_wheel(extra: tuple[str, ...]) -> ctypes.CDLL | None:
    path = WHEELS_FOLDER / build.library_name(extra)
    if not path.exists():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _logger.warning("the C kernels that came with loco can't be loaded: %s", error)
        return None


@contextmanager
def _one_at_a_time(cache: int) -> Iterator[None]:
    """What other processes have begun in this folder ends first, unless that takes too long: its process may
    have been stopped, and the folder's file system may have no locks."""
    try:
        lock = os.open("lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=cache)
    except OSError:  # it can be read only, so nothing is kept in it either
        yield
        return
    try:
        deadline = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:
                break
        yield
    finally:
        os.close(lock)  # which ends the lock, too


def _compile(
    compiler: list[str], extra: tuple[str, ...], key: str, name: str, cache: int | None
) -> ctypes.CDLL:
    _logger.warning("compiling the C kernels with %s: none for this machine came with loco", compiler[0])
    try:
        with tempfile.TemporaryDirectory(prefix="loco-") as folder:
            made = Path(folder) / name
            build.compile_library(compiler, extra, made)
            with made.open("ab") as file:
                file.write(_seal(key, made.read_bytes()))
            library = _load_whole(made, key)  # stays usable after its file is deleted
            if cache is not None:
                _keep(made.read_bytes(), name, cache)
    except OSError as error:
        raise build.BuildError(f"there is no room to compile in: {error}") from error
    if library is None:
        raise build.BuildError(f"{shlex.join(compiler)} made a library that can't be loaded here")
    return library


def cache_folder() -> Path | None:
    """Created if it is missing; None for a user without a home directory."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loco"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder


@contextmanager
def _opened(folder: Path | None) -> Iterator[int | None]:
    """A descriptor of the cache's folder; None if there is none, or if others could change what is in it."""
    descriptor = None
    try:
        # The user's own link is as good as a folder. Another user's leads to wherever that user likes.
        if folder is not None and os.lstat(folder).st_uid == os.getuid():
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        pass
    try:
        yield descriptor if descriptor is not None and _is_mine(descriptor) else None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _is_mine(descriptor: int) -> bool:
    """Whether nobody else can write to this folder."""
    status = os.fstat(descriptor)
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _inside(cache: int) -> Path:
    """A path into the folder that is open, whatever its name leads to by now: dlopen takes nothing else."""
    return Path("/proc/self/fd") / str(cache)


def _load_whole(path: Path, key: str) -> ctypes.CDLL | None:
    """The library, if the file is there and whole. Loading a damaged one could crash the process."""
    try:
        content = path.read_bytes()
        if content[-SEAL_BYTES:] == _seal(key, content[:-SEAL_BYTES]):
            return ctypes.CDLL(str(path))
    except OSError:
        pass
    return None


def _seal(key: str, library: bytes) -> bytes:
    return hashlib.sha256(key.encode() + library).digest()


def _keep(library: bytes, name: str, cache: int) -> None:
    """Store a library for the next process. If that fails, the next process compiles again."""
    unfinished = f"{name}.{uuid.uuid4().hex}"
    try:
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=cache)
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(library)
        os.replace(
            unfinished, name, src_dir_fd=cache, dst_dir_fd=cache
        )  # readers see the whole file, or none
    except OSError:
        with suppress(OSError):
            os.unlink(unfinished, dir_fd=cache)
