"""The compiled library: from a wheel or built once, found again, never taken for another, and replaced by the
reference."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import C_BUILDS

from loco import kernels
from loco.kernels import Gate, OuterStep, Streamed, cpu, reference
from loco.kernels.cpu import build, library

OUTER = OuterStep(divisor=1, lr=0.7, momentum=0.0, nesterov=True)
PROGRAM = """
import sys, torch
from loco import kernels
from loco.kernels import reference
x = torch.arange(1000.0)
for _ in range(2):
    assert kernels.digest(x) == reference.digest(x)
print(type(kernels.home("cpu")).__name__)
"""

SAID = "compiling the C kernels with cc: none for this machine came with loco\n"
COMPILED: dict[tuple[str | bytes, ...], bytes] = {}


@pytest.fixture
def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """An empty cache, and a list of what is compiled from now on."""
    try:
        build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done: list[Path] = []
    compile_library = build.compile_library

    def note(compiler: list[str], extra: tuple[str, ...], target: Path) -> None:
        """What an earlier test has compiled with these flags from these sources is not compiled again."""
        done.append(target)
        key = *compiler, *extra, *(path.read_bytes() for path in build.SOURCES)
        if key not in COMPILED:
            compile_library(compiler, extra, target)
            COMPILED[key] = target.read_bytes()
        target.write_bytes(COMPILED[key])

    monkeypatch.setattr(build, "compile_library", note)
    return done


def cached() -> list[Path]:
    folder = library.cache_folder()
    return [] if folder is None else list(folder.glob("kernels-*"))


def works(flags: tuple[str, ...] = ("-O0",)) -> bool:
    """By default a library that is compiled in a hurry: these tests are about the cache."""
    anchor = torch.linspace(-1, 1, 1003)
    weights, residual = anchor - 1e-3, torch.zeros(1003)
    mine = cpu.Compiled(flags).encode(anchor, [weights], residual, Gate())
    theirs = reference.encode(anchor, [weights], residual, Gate())
    return torch.equal(mine.entries.indices(), theirs.entries.indices()) and mine.digest == theirs.digest


@pytest.mark.check(C_BUILDS)
def test_a_library_is_compiled_once(compiles: list[Path]) -> None:
    assert works()
    assert works()
    assert len(compiles) == 1


@pytest.mark.check(C_BUILDS)
def test_who_begin_at_once_compile_once(compiles: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_library = build.compile_library

    def slowly(compiler: list[str], extra: tuple[str, ...], target: Path) -> None:
        time.sleep(0.3)
        compile_library(compiler, extra, target)

    monkeypatch.setattr(build, "compile_library", slowly)
    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(lambda _: library.load(("-O0",)), range(3)))
    assert len(compiles) == 1


@pytest.mark.check(C_BUILDS)
def test_one_that_stands_still_while_it_compiles_does_not_hold_up_the_others(
    compiles: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LONGEST_WAIT", 0.2)
    folder = library.cache_folder()
    assert folder is not None
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert works()
    assert len(compiles) == 1


@pytest.mark.check(C_BUILDS)
def test_other_flags_and_other_sources_are_other_libraries(
    compiles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert works()
    assert works(("-O0", "-DOTHER"))
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES[0].parent, sources)
    (sources / "digest.c").write_text((sources / "digest.c").read_text() + "\n/* changed */\n")
    monkeypatch.setattr(build, "SOURCES", sorted(sources.glob("*.[ch]")))
    assert works()
    assert len({path.name for path in compiles}) == 3


@pytest.mark.check(C_BUILDS)
def test_what_is_compiled_is_said_once(compiles: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    assert works()
    assert works()
    assert [record.getMessage() + "\n" for record in caplog.records] == [SAID]


@pytest.fixture
def supplied(compiles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library as a wheel brings it."""
    folder = tmp_path / "supplied"
    folder.mkdir()
    made = folder / build.library_name(("-O0",))
    build.compile_library(build.find_compiler(), ("-O0",), made)
    compiles.clear()
    monkeypatch.setattr(library, "WHEELS_FOLDER", folder)
    return made


def test_a_wheels_library_needs_no_compiler(
    supplied: Path, compiles: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert library.load(("-O0",))._name == str(supplied)
    assert works()
    with pytest.raises(build.BuildError, match="no C compiler"):
        library.load(("-O0", "-DOTHER"))
    assert (compiles, cached()) == ([], [])


@pytest.mark.check(C_BUILDS)
def test_a_wheels_library_of_other_sources_is_not_loaded(
    supplied: Path, compiles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES[0].parent, sources)
    (sources / "digest.c").write_text((sources / "digest.c").read_text() + "\n/* changed */\n")
    monkeypatch.setattr(build, "SOURCES", sorted(sources.glob("*.[ch]")))
    assert works()
    assert len(compiles) == 1


def test_a_wheels_library_that_cannot_be_loaded_is_compiled_anew(
    supplied: Path, compiles: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    supplied.write_bytes(b"not a library")
    assert works()
    assert len(compiles) == 1
    assert "the C kernels that came with loco can't be loaded: " in caplog.text


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "empty": lambda mine, other: b"",
    "no library": lambda mine, other: b"not a library",
    "cut short": lambda mine, other: mine[:5000],
    "without its end": lambda mine, other: mine[:-100] + bytes(100),
    "another's": lambda mine, other: other,
}


@pytest.mark.check(C_BUILDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_in_the_cache_is_replaced(compiles: list[Path], damage: str) -> None:
    """In new processes, since a loaded library is not loaded again."""
    cache = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    assert works()
    (other,) = cached()
    assert works(build.BUILDS[library.builds_for_this_cpu()[-1]])
    (mine,) = set(cached()) - {other}
    good = mine.read_bytes()
    mine.write_bytes(DAMAGES[damage](good, other.read_bytes()))
    done = in_new_process(**cache)
    assert (done.stdout, done.stderr) == ("Compiled\n", SAID), done.returncode
    assert mine.read_bytes() == good


def test_a_cache_that_cannot_be_written_costs_a_compilation_only(
    compiles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert works()
    assert works()
    assert len(compiles) == 2


def test_a_compiler_that_fails_is_quoted(compiles: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(build.BuildError, match=r"failed: .*no-such-flag"):
        cpu.Compiled(("--no-such-flag",))
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(build.BuildError, match=r"no C compiler \(no-such-compiler\) was found"):
        cpu.Compiled(())


def in_new_process(**environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[3])
    environment = {"PYTHONPATH": root, "PYTHONWARNINGS": "default", **environment}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd="/", env=environment, capture_output=True, text=True
    )


@pytest.mark.check(C_BUILDS)
def test_without_a_compiler_the_reference_serves_and_one_warning_says_so(tmp_path: Path) -> None:
    done = in_new_process(PATH="", XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout == "module\n", done.stderr
    assert done.stderr.count("Warning") == 1
    assert "no C compiler (cc, gcc or clang) was found. Install gcc or clang" in done.stderr


@pytest.mark.check(C_BUILDS)
@pytest.mark.parametrize(
    "environment",
    [
        {"HOME": "/dev/null/home"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"CC": "cc -ffast-math"},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_in_an_odd_environment_it_is_compiled_all_the_same(
    compiles: list[Path], environment: dict[str, str], tmp_path: Path
) -> None:
    cache = {} if "HOME" in environment else {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = in_new_process(PATH=os.environ["PATH"], **cache, **environment)
    assert (done.stdout, done.stderr) == ("Compiled\n", SAID)


def test_a_user_without_a_home_compiles_for_this_process(
    compiles: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(library.Path, "home", homeless)
    assert works()
    assert works()
    assert len(compiles) == 2


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"CC": "gcc 'x"}, "the environment variable CC can't be read: No closing quotation"),
        pytest.param(
            {"CC": "cc -Ofast -D__FAST_MATH__=1"},
            "every operation must be rounded to FP32 on its own",
            marks=pytest.mark.check(C_BUILDS),
        ),
        ({"TMPDIR": "/proc/none"}, "there is no room to compile in"),
    ],
    ids=lambda value: next(iter(value.items()))[1] if isinstance(value, dict) else "",
)
def test_what_cannot_be_compiled_leaves_the_reference_and_a_warning(
    compiles: list[Path], environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if "TMPDIR" in environment:
        monkeypatch.setattr(library.tempfile, "tempdir", environment["TMPDIR"])
    kernels.home.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=f"(?s)rounds use plain torch, .* times slower: .*{message}"):
            assert kernels.home("cpu") is reference
    finally:
        kernels.home.cache_clear()


@pytest.mark.check(C_BUILDS)
def test_a_library_with_other_bits_is_refused(
    compiles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES[0].parent, sources)
    steps = (sources / "steps.h").read_text()
    assert "total[i] / divisor" in steps
    (sources / "steps.h").write_text(steps.replace("total[i] / divisor", "total[i] * (1 / divisor)"))
    monkeypatch.setattr(build, "SOURCES", sorted(sources.glob("*.[ch]")))
    with pytest.raises(build.BuildError, match="other bits"):
        cpu.Compiled(())


def test_a_cache_that_others_can_write_is_not_trusted(compiles: list[Path]) -> None:
    assert works()
    folder = library.cache_folder()
    assert folder is not None
    folder.chmod(0o777)
    assert works()
    assert len(compiles) == 2


def test_a_link_of_the_user_is_followed(compiles: list[Path], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "loco").symlink_to(tmp_path / "elsewhere")
    assert works()
    assert works()
    assert len(compiles) == 1
    assert len(list((tmp_path / "elsewhere").glob("kernels-*"))) == 1


def test_a_link_of_another_user_is_not_followed(compiles: list[Path], tmp_path: Path) -> None:
    """Not even to a folder of this user: who owns the link chooses where it leads next."""
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "cache").mkdir()
    link = tmp_path / "cache" / "loco"
    link.symlink_to(tmp_path / "mine")
    try:
        os.chown(link, 12345, 12345, follow_symlinks=False)
    except PermissionError:
        pytest.skip("only root can make a link that is another user's")
    assert works()
    assert works()
    assert len(compiles) == 2
    assert not list((tmp_path / "mine").iterdir())


PLANTED = """
#include <stdlib.h>
#include <fcntl.h>
__attribute__((constructor)) static void go(void) { open(getenv("PLANTED"), O_CREAT | O_WRONLY, 0600); }
"""


def test_a_folder_that_is_exchanged_after_the_check_is_not_read(
    compiles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that everybody can write to, the path may lead to another user's folder a moment after it
    was checked. There lies a library with the right name and the right seal, whose code must not run."""
    assert works()
    cache = tmp_path / "cache" / "loco"
    (name,) = (path.name for path in cached())
    planted = tmp_path / "planted"
    planted.mkdir()
    source, evil, ran = tmp_path / "planted.c", planted / name, tmp_path / "ran"
    source.write_text(PLANTED)
    subprocess.run([*build.find_compiler(), "-shared", "-fPIC", "-o", evil, source], check=True)
    code = evil.read_bytes()
    evil.write_bytes(code + library._seal(name.removeprefix("kernels-").removesuffix(".so"), code))
    monkeypatch.setenv("PLANTED", str(ran))
    inode = cache.stat().st_ino

    def then_exchange(look: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def looked(path: Any, **options: Any) -> os.stat_result:
            found = look(path, **options)
            looks.extend([path] if found.st_ino == inode else [])
            if len(looks) == 2 and not cache.is_symlink():
                cache.rename(tmp_path / "checked")
                cache.symlink_to(planted)
            return found

        return looked

    looks: list[Any] = []  # the first is whether the folder is there, the second whose it is
    with monkeypatch.context() as patch:
        for look in ("stat", "fstat"):
            patch.setattr(os, look, then_exchange(getattr(os, look)))
        library.load(("-O0",))
    assert cache.is_symlink()
    assert not ran.exists()
    assert list(planted.iterdir()) == [evil]  # nor was anything written there


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_changes_nothing(device: str) -> None:
    anchor, flat, residual = torch.linspace(-1, 1, 1003), torch.zeros(1003), torch.zeros(1003)
    ops = cpu.Compiled(())
    for home in (ops, Streamed(ops)):
        theta, w, e = anchor.clone(), flat.clone(), residual.clone()
        with torch.device(device):
            entries = home.encode(theta, [w], e, Gate()).entries
            home.apply(theta, None, [w], e, entries, [entries], OUTER)
            home.write_weights(theta, [w])
            assert home.encode(theta[:0], [], e[:0], Gate()).entries.values.device.type == "cpu"
        assert entries.values.device.type == "cpu"
        assert torch.equal(w, theta)
        assert not torch.equal(theta, anchor)


@pytest.mark.check(C_BUILDS)
@pytest.mark.parametrize(("capability", "builds"), [("default", 1), ("avx2", 2)])
def test_a_users_choice_against_newer_instructions_is_kept(capability: str, builds: int) -> None:
    if len(library.builds_for_this_cpu()) < builds:
        pytest.skip("this CPU has not more than that")
    code = "from loco.kernels.cpu import builds_for_this_cpu as b; print(*b())"
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={"PYTHONPATH": root, "PATH": "", "ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == list(build.BUILDS)[:builds], done.stderr
