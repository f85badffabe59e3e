"""Compiles the C files beside it: when a wheel is built, or at first use.

Imports nothing but Python's own modules, since setup.py runs it where there may be no torch.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


class BuildError(Exception):
    """Says why there is no library, and what to do about it."""


def builds_for_this_machine() -> list[str]:
    """The builds for its kind of CPU, the best one last. Not every CPU of the kind runs all of them."""
    names = list(BUILDS)
    return names if platform.machine() in ("x86_64", "AMD64") else names[:1]


def library_name(extra: tuple[str, ...]) -> str:
    """The file name of the library that is built with FLAGS and `extra`: other sources, flags or kinds of
    machine give another name."""
    sources = [text for path in SOURCES for text in (path.name, path.read_text(encoding="utf-8"))]
    identity = "\0".join([*sources, platform.machine(), *FLAGS, *AS_LIBRARY, *extra])
    return f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.so"


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


def compile_library(compiler: list[str], extra: tuple[str, ...], target: Path) -> None:
    """Compile SOURCES with FLAGS and `extra`, as many at once as there are cores, and link them.

    Leaves object files beside the target.

    Raises:
        BuildError: the compiler failed; quotes it.
    """
    command = [*compiler, *FLAGS, *AS_LIBRARY, *extra]
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
