"""The C kernels under the sanitizers of the compiler: memory, undefined behaviour, data races."""

import subprocess
from pathlib import Path

import pytest
from sanitizing import compile_with, sanitizer_or_skip
from selection import C_BUILDS

from loco.kernels.cpu import build, library

HARNESS = Path(__file__).with_name("sanitized.c")
PATCHES = Path(__file__).with_name("fuzz_patches.c")
BUILDS = library.builds_for_this_cpu()
# Address space randomised as far as newer kernels do it is too far for ThreadSanitizer.
STILL = ["setarch", "-R"]


def run(folder: Path, flags: tuple[str, ...], *, prefix: tuple[str, ...] = ()) -> str:
    """What the harness printed, built with these flags."""
    program = compile_with(flags, HARNESS, folder)
    done = subprocess.run([*prefix, str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the harness prints without sanitizers."""
    return run(tmp_path_factory.mktemp("plain"), ())


@pytest.mark.check(C_BUILDS)
@pytest.mark.parametrize("variant", BUILDS)
def test_no_address_error_and_no_undefined_behaviour(tmp_path: Path, variant: str, expected: str) -> None:
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    sanitizer_or_skip(tmp_path, flags)
    assert run(tmp_path, (*build.BUILDS[variant], *flags)) == expected


@pytest.mark.check(C_BUILDS)
@pytest.mark.parametrize("variant", BUILDS)
def test_no_data_race(tmp_path: Path, variant: str, expected: str) -> None:
    flags = ("-fsanitize=thread",)
    sanitizer_or_skip(tmp_path, flags, tuple(STILL))
    assert run(tmp_path, (*build.BUILDS[variant], *flags), prefix=tuple(STILL)) == expected


@pytest.mark.check(C_BUILDS)
@pytest.mark.parametrize("variant", BUILDS)
def test_no_data_race_between_the_parts_of_a_patch(tmp_path: Path, variant: str) -> None:
    flags = ("-fsanitize=thread",)
    sanitizer_or_skip(tmp_path, flags, tuple(STILL))
    program = compile_with((*build.BUILDS[variant], *flags), PATCHES, tmp_path, kernels=("patch_*.c",))
    every_second = [str(program), "40", "1", "2"]
    done = subprocess.run([*STILL, *every_second], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.check(C_BUILDS)
def test_the_harness_sees_what_it_is_for(tmp_path: Path) -> None:
    """The same harness, giving one element less than it promises, must be stopped."""
    flags = ("-fsanitize=address", "-fno-sanitize-recover=all")
    sanitizer_or_skip(tmp_path, flags)
    short = tmp_path / "short.c"
    promised, given = "starts = malloc(8 * (size_t)(blocks + 1))", "starts = malloc(8 * (size_t)blocks)"
    assert promised in HARNESS.read_text()
    short.write_text(HARNESS.read_text().replace(promised, given))
    done = subprocess.run([str(compile_with(flags, short, tmp_path))], capture_output=True, text=True)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
