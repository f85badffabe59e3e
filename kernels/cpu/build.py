"""Compiles the C files beside it with the system's compiler at first use, and caches the library.

A library is found by a key of its sources, flags, compiler and machine. Its file ends with a seal over that
key and the bytes before it, so that a stale or damaged file is never loaded.

The seal is no secret: whoever can write to the cache's folder can run code in this process. So the folder is
used only if nobody else can write to it, and only through a descriptor, since its path may lead elsewhere a
moment after the check.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
# -ffp-contract=off: no fused multiply-add. The last two allow loops to become vector instructions, and change
# no bits: nothing here reads errno or a floating-point exception flag.
FLAGS = ("-std=c11", "-O3", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
AS_LIBRARY = ("-fPIC", "-shared", "-pthread")
# The builds, each with the flags for the instructions that it uses.
BUILDS = {
    "portable": (),
    "avx2": ("-mavx2", "-mf16c"),
    "avx512": ("-mavx2", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mbmi2"),
}
SEAL_BYTES = 32
LONGEST_WAIT = 120.0  # seconds, for another process that compiles


class BuildError(Exception):
    """Says why there is no library, and what to do about it."""


def builds_for_this_cpu() -> list[str]:
    """The builds that run here, the best one last. torch says what the CPU can do, and ATEN_CPU_CAPABILITY
    limits both."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    names = list(BUILDS)
    if platform.machine() not in ("x86_64", "AMD64") or best not in names:
        return names[:1]
    return names[: names.index(best) + 1]


def load(extra: tuple[str, ...]) -> ctypes.CDLL:
    """The library built with FLAGS and `extra`, from the cache or compiled now.

    Raises:
        BuildError: there is no compiler, or what it makes can't be used.
    """
    if sys.byteorder != "little":
        raise BuildError("the C kernels are written for little-endian machines")
    compiler = find_compiler()
    flags = (*FLAGS, *AS_LIBRARY, *extra)
    version = run([*compiler, "--version"]).stdout
    sources = [text for path in SOURCES for text in (path.name, path.read_text(encoding="utf-8"))]
    identity = "\0".join([*sources, *compiler, version, platform.machine(), *flags])
    key = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    name = f"kernels-{key}.so"
    with _opened(cache_folder()) as cache:
        if cache is None:
            return _build([*compiler, *flags], key, name, None)
        kept = _inside(cache) / name
        library = _load_whole(kept, key)
        if library is None:
            # Compiling takes many seconds of a core, and all ranks of a machine begin at once.
            with _one_at_a_time(cache):
                library = _load_whole(kept, key) or _build([*compiler, *flags], key, name, cache)
        return library


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


def _build(command: list[str], key: str, name: str, cache: int | None) -> ctypes.CDLL:
    try:
        with tempfile.TemporaryDirectory(prefix="loco-") as folder:
            made = Path(folder) / name
            compile_files(command, made)
            with made.open("ab") as file:
                file.write(_seal(key, made.read_bytes()))
            library = _load_whole(made, key)  # stays usable after its file is deleted
            if cache is not None:
                _keep(made.read_bytes(), name, cache)
    except OSError as error:
        raise BuildError(f"there is no room to compile in: {error}") from error
    if library is None:
        raise BuildError(f"{shlex.join(command)} made a library that can't be loaded here")
    return library


def find_compiler() -> list[str]:
    """$CC, or the first of the usual names that is installed.

    Raises:
        BuildError: there is none.
    """
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise BuildError(f"the environment variable CC can't be read: {error}") from error
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C compiler ({named[0] if named else 'cc, gcc or clang'}) was found")


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


def compile_files(command: list[str], target: Path) -> None:
    """Run the compiler on SOURCES, on as many at once as there are cores, and link them.

    Raises:
        BuildError: the compiler failed; quotes it.
    """
    objects = {path: str(target.parent / f"{path.stem}.o") for path in SOURCES if path.suffix == ".c"}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = ([*command, "-c", "-o", made, str(source)] for source, made in objects.items())
        list(pool.map(_run_or_fail, commands))
    _run_or_fail([*command, "-o", str(target), *objects.values()])


def _run_or_fail(command: list[str]) -> None:
    done = run(command)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed: {done.stderr.strip()}")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    except OSError as error:
        raise BuildError(f"{command[0]} could not be started: {error}") from error


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
