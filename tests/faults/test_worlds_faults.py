"""Sites that each have a world of their own: one is killed, all come together again, and no bit is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from selection import FLEETS
from sites import free_port


def run(
    folder: Path, ranks: int, victim: str = "", phase: str = "", signal_name: str = "SIGKILL"
) -> list[str]:
    """Two sites, each started by a torchrun of its own that restarts it -> what its ranks said."""
    folder.mkdir()
    script = Path(__file__).parents[1] / "world_site.py"
    told = {"LOCO_SITES": "2", "LOCO_AT": f"127.0.0.1:{free_port()}", "OMP_NUM_THREADS": "1"}
    told |= {"VICTIM": victim, "PHASE": phase, "SIGNAL": signal_name}
    running = {}
    for name in ("a", "b"):
        (folder / name).mkdir()
        command = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "--max-restarts=3",
        ]
        running[name] = subprocess.Popen(
            [sys.executable, *command, "--monitor-interval=0.2", str(script)],
            env=os.environ | told | {"LOCO_SITE": name, "FOLDER": str(folder / name)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        time.sleep(0.3)
    try:
        if signal_name == "SIGSTOP":
            _kill_once_stopped(folder / victim[0] / "struck", running[victim[0]])
        return [process.communicate(timeout=150)[0] for process in running.values()]
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _kill_once_stopped(struck: Path, launcher: subprocess.Popen[str]) -> None:
    """A rank that is stopped for good: its launcher sees nothing of that, and is ended by hand, as the site's
    people would; then the whole site is started again by the test's own launcher."""
    deadline = time.monotonic() + 60
    while not struck.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(4.0)
    listed = subprocess.run(
        ["ps", "-o", "pid=,stat=", "-s", str(launcher.pid)], capture_output=True, text=True
    )
    for line in listed.stdout.splitlines():
        pid, status = line.split()
        if status.startswith("T"):
            os.kill(int(pid), signal.SIGKILL)


def ends(said: list[str]) -> list[list[str]]:
    """By site, the hashes that its ranks ended with."""
    return [
        sorted(line.split()[-1] for line in text.splitlines() if line.startswith("ended")) for text in said
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    clean = run(tmp_path_factory.mktemp("clean") / "run", 2)
    assert [len(site) for site in ends(clean)] == [2, 2], clean
    return ends(clean)


@pytest.mark.check(FLEETS, sample=r"b/0-received-SIGKILL")
@pytest.mark.parametrize(
    ("victim", "phase", "signal_name"),
    [
        ("b/0", "encoded", "SIGKILL"),
        ("b/0", "received", "SIGKILL"),
        ("b/1", "received", "SIGKILL"),
        ("b/1", "committed", "SIGKILL"),
        ("b/1", "applied", "SIGKILL"),
        ("a/0", "received", "SIGKILL"),  # the host of the store at which all meet
        ("a/0", "committed", "SIGKILL"),
        ("a/1", "announced", "SIGKILL"),
        ("b/0", "received", "SIGSTOP"),
        ("a/0", "received", "SIGSTOP"),
    ],
)
def test_a_rank_is_lost_and_both_sites_resume_bit_for_bit(
    victim: str, phase: str, signal_name: str, tmp_path: Path, undisturbed: list[list[str]]
) -> None:
    hurt = run(tmp_path / "hurt", 2, victim, phase, signal_name)
    assert ends(hurt) == undisturbed, hurt
    for text in hurt:  # all ranks of both sites went on from one checkpoint
        begun = [int(line.split()[-1]) for line in text.splitlines() if line.startswith("begins at round")]
        assert begun[:2] == [0, 0], hurt
        assert len(begun) == 4, hurt
        assert 1 <= begun[2] == begun[3], hurt
