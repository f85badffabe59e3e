"""Compiles the C files beside it with the system's compiler at first use, and keeps the library.

A library is found by a key of its sources, flags, compiler and machine. Its file ends with a seal over that
key and the bytes before it, so that no stale or damaged file is taken for it.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
# -ffp-contract=off: no fused multiply-add. The last two allow loops to become vector instructions, and change
# no bits: nothing here reads errno or a floating-point exception flag.
FLAGS = ("-std=c11", "-O3", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
AS_LIBRARY = ("-fPIC", "-shared", "-pthread")
# The builds there are, each with what it needs of a CPU beside what the one before it needs.
BUILDS = {
    "portable": (),
    "avx2": ("-mavx2", "-mf16c"),
    "avx512": ("-mavx2", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
}
SEAL_BYTES = 32


class BuildError(Exception):
    """Why there is no library, and what to do about it."""


def builds_for_this_cpu() -> list[str]:
    """Those that run here, the best one last: as torch finds them, or ATEN_CPU_CAPABILITY limits both."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    names = list(BUILDS)
    if platform.machine() not in ("x86_64", "AMD64") or best not in names:
        return names[:1]
    return names[: names.index(best) + 1]


def load(extra: tuple[str, ...]) -> ctypes.CDLL:
    """The library built with FLAGS and these, from the cache or compiled now.

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

    folder = cache_folder()
    cached = folder / f"kernels-{key}.so" if folder and _is_mine(folder) else None
    library = _open(cached, key) if cached else None
    return library or _build([*compiler, *flags], key, cached)


def _build(command: list[str], key: str, cached: Path | None) -> ctypes.CDLL:
    try:
        with tempfile.TemporaryDirectory(prefix="loco-") as folder:
            made = Path(folder) / f"kernels-{key}.so"
            compile_files(command, made)
            with made.open("ab") as file:
                file.write(_seal(key, made.read_bytes()))
            library = _open(made, key)  # stays usable when its file is gone
            if cached is not None:
                _keep(made, cached)
    except OSError as error:
        raise BuildError(f"there is no room to compile in: {error}") from error
    if library is None:
        raise BuildError(f"{shlex.join(command)} made a library that can't be loaded here")
    return library


def find_compiler() -> list[str]:
    """$CC, or the first of the usual names.

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
    """Made if it is missing; None for a user without a home."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loco"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder


def _is_mine(folder: Path) -> bool:
    """What others may write could be anybody's program."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def compile_files(command: list[str], target: Path) -> None:
    """
    Raises:
        BuildError: the compiler failed, and what it said.
    """
    done = run([*command, "-o", str(target), *(str(path) for path in SOURCES if path.suffix == ".c")])
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed: {done.stderr.strip()}")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    except OSError as error:
        raise BuildError(f"{command[0]} could not be started: {error}") from error


def _open(path: Path, key: str) -> ctypes.CDLL | None:
    """The library, if the file is there and whole. Loading one that is not can kill the process."""
    try:
        content = path.read_bytes()
        if content[-SEAL_BYTES:] == _seal(key, content[:-SEAL_BYTES]):
            return ctypes.CDLL(str(path))
    except OSError:
        pass
    return None


def _seal(key: str, library: bytes) -> bytes:
    return hashlib.sha256(key.encode() + library).digest()


def _keep(made: Path, cached: Path) -> None:
    """For the next process. One that can't write there compiles again."""
    try:
        handle, unfinished = tempfile.mkstemp(dir=cached.parent)
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(made.read_bytes())
        os.replace(unfinished, cached)  # other processes see the whole file, or none
    except OSError:
        Path(unfinished).unlink(missing_ok=True)
