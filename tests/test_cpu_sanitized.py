"""The C kernels under the sanitizers of the compiler: memory, undefined behaviour, data races."""

import subprocess
from pathlib import Path

import pytest

from loco.kernels.cpu import build

HARNESS = Path(__file__).with_name("sanitized.c")
BUILDS = build.builds_for_this_cpu()
# Address space randomised as far as newer kernels do it is too far for ThreadSanitizer.
STILL = ["setarch", "-R"]


@pytest.fixture(autouse=True)
def compiler() -> None:
    try:
        build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))


def run(folder: Path, flags: tuple[str, ...], *, prefix: tuple[str, ...] = ()) -> str:
    """What the harness printed, built with these flags."""
    program = folder / "sanitized"
    command = [*build.find_compiler(), *build.FLAGS, *flags, "-g", "-pthread", str(HARNESS)]
    build.compile_files(command, program)
    done = subprocess.run([*prefix, str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def sanitizer_or_skip(folder: Path, flags: tuple[str, ...], prefix: tuple[str, ...] = ()) -> None:
    """Not every compiler is installed with its sanitizers' libraries."""
    source = folder / "probe.c"
    source.write_text("int main(void) { return 0; }\n")
    compiler = build.find_compiler()
    built = build.run([*compiler, *flags, "-o", str(folder / "probe"), str(source)])
    if built.returncode:
        pytest.skip(f"{compiler[0]} can't build with {' '.join(flags)}: {built.stderr.strip()[:200]}")
    ran = build.run([*prefix, str(folder / "probe")])
    if ran.returncode:
        pytest.skip(f"programs built with {' '.join(flags)} don't run here: {ran.stderr.strip()[:200]}")


@pytest.mark.parametrize("variant", BUILDS)
def test_no_address_error_and_no_undefined_behaviour(tmp_path: Path, variant: str) -> None:
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    sanitizer_or_skip(tmp_path, flags)
    assert run(tmp_path, (*build.BUILDS[variant], *flags)) == run(tmp_path, ())


@pytest.mark.parametrize("variant", BUILDS)
def test_no_data_race(tmp_path: Path, variant: str) -> None:
    flags = ("-fsanitize=thread",)
    sanitizer_or_skip(tmp_path, flags, tuple(STILL))
    assert run(tmp_path, (*build.BUILDS[variant], *flags), prefix=tuple(STILL)) == run(tmp_path, ())


def test_the_harness_sees_what_it_is_for(tmp_path: Path) -> None:
    """The same harness, giving one element less than it promises, must be stopped."""
    flags = ("-fsanitize=address", "-fno-sanitize-recover=all")
    sanitizer_or_skip(tmp_path, flags)
    short = tmp_path / "short.c"
    promised, given = "starts = malloc(8 * (size_t)(blocks + 1))", "starts = malloc(8 * (size_t)blocks)"
    assert promised in HARNESS.read_text()
    short.write_text(HARNESS.read_text().replace(promised, given))
    command = [*build.find_compiler(), *build.FLAGS, *flags, "-pthread", str(short)]
    build.compile_files(command, tmp_path / "short")
    done = subprocess.run([str(tmp_path / "short")], capture_output=True, text=True)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
