"""Builds the C kernels with a program around them and the compiler's sanitizers inside."""

from pathlib import Path

import pytest

from loco.kernels.cpu import build


def compile_with(flags: tuple[str, ...], source: Path, folder: Path) -> Path:
    """The program in one C file, and all kernels. Without a compiler the test is skipped."""
    program = folder / source.stem
    try:
        command = [*build.find_compiler(), *build.FLAGS, *flags, "-g", "-pthread", str(source)]
    except build.BuildError as error:
        pytest.skip(str(error))
    build.compile_files(command, program)
    return program


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
