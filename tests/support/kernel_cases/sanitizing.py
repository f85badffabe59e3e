"""Builds the C kernels with a program around them and the compiler's sanitizers inside."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from loco.kernels.cpu import build, library


def compile_with(
    flags: tuple[str, ...], source: Path, folder: Path, kernels: Sequence[str] = ("*.c",)
) -> Path:
    """The program in one C file, and the kernels' files of these names. Without a compiler skips the test."""
    program = folder / source.stem
    try:
        command = [*build.find_compiler(), *build.FLAGS, *flags, "-g", "-pthread", str(source)]
    except build.BuildError as error:
        pytest.skip(str(error))
    files = [str(path) for path in build.SOURCES if any(path.match(name) for name in kernels)]
    done = build.run([*command, "-o", str(program), *files])
    assert not done.returncode, done.stderr
    return program


def fuzz(
    source: Path,
    folder: Path,
    variant: str,
    cases: int,
    flags: tuple[str, ...] = (),
    kernels: Sequence[str] = ("*.c",),
) -> tuple[list[int], str]:
    """Run a program that reads so many hostile inputs, under the sanitizers of addresses and undefined
    behaviour.

    -> its counts of inputs that went deep, and what to say if they are too few
    """
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", *flags)
    sanitizer_or_skip(folder, flags)
    program = compile_with((*build.BUILDS[variant], *flags), source, folder, kernels)
    seed = 1 + library.builds_for_this_cpu().index(variant)
    done = subprocess.run(
        [str(program), str(cases), str(seed)],
        env={**os.environ, "ASAN_OPTIONS": "quarantine_size_mb=1:max_malloc_fill_size=0"},
        capture_output=True,
        text=True,
    )
    what = f"{cases} cases with the {variant} build: {done.stdout}{done.stderr}"
    assert done.returncode == 0, what
    assert done.stdout.startswith(f"{cases} cases, "), what
    return [int(word) for word in done.stdout.split()[2::2]], what


def sanitizer_or_skip(folder: Path, flags: tuple[str, ...], prefix: tuple[str, ...] = ()) -> None:
    """Not every compiler is installed with its sanitizers' libraries."""
    source = folder / "probe.c"
    source.write_text("int main(void) { return 0; }\n")
    try:
        compiler = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    built = build.run([*compiler, *flags, "-o", str(folder / "probe"), str(source)])
    if built.returncode:
        pytest.skip(f"{compiler[0]} can't build with {' '.join(flags)}: {built.stderr.strip()[:200]}")
    ran = build.run([*prefix, str(folder / "probe")])
    if ran.returncode:
        pytest.skip(f"programs built with {' '.join(flags)} don't run here: {ran.stderr.strip()[:200]}")
