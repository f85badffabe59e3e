"""Sites that each have a world of their own, started by a torchrun that restarts it: one is lost, all come
together again, and no bit is lost. Every phase of such losses is in the fault table, without torchrun."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import world_site
from fleet import HEARTBEAT, lighthouse
from selection import FLEETS
from sites import free_port


class Site(NamedTuple):
    """What a site came to: what its torchrun printed, and what each rank has said."""

    printed: str
    said: list[list[str]]

    @property
    def ends(self) -> list[str]:
        """By rank, the hash that it ended with."""
        return [line.split()[-1] for lines in self.said for line in lines if line.startswith("ended")]

    @property
    def lasts(self) -> list[str]:
        """By rank, how many sites its last round had, and the hash of what all sites hold."""
        return [line for lines in self.said for line in lines if line.startswith("last round")]

    @property
    def starts(self) -> list[list[int]]:
        """By rank, the rounds at which it began."""
        return [[int(line.split()[-1]) for line in lines if line.startswith("begins")] for lines in self.said]


def run(
    folder: Path,
    ranks: int,
    victim: str = "",
    phase: str = "",
    signal_name: str = "SIGKILL",
    *,
    meets: str = "address",
    rounds: int = 8,
    pause: float = 0.0,
) -> list[Site]:
    """Two sites. They stay, and meet at an "address", or come and go: "at least 1", or by a "lighthouse"."""
    folder.mkdir()
    with ExitStack() as closing:
        where = {"LOCO_AT": f"127.0.0.1:{free_port()}"}
        if meets == "at least 1":
            where["LOCO_AT_LEAST"] = "1"
        if meets == "lighthouse":
            server, address = lighthouse(HEARTBEAT)
            closing.callback(server.shutdown)
            where = {"LOCO_LIGHTHOUSE": f"http://{address}"}
        return _run(folder, ranks, victim, phase, signal_name, where, rounds, pause)


def _run(
    folder: Path,
    ranks: int,
    victim: str,
    phase: str,
    signal_name: str,
    where: dict[str, str],
    rounds: int,
    pause: float,
) -> list[Site]:
    script = world_site.__file__
    told = {"LOCO_SITES": "2", "OMP_NUM_THREADS": "1", "ROUNDS": str(rounds), "PAUSE": str(pause)} | where
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
        printed = [communicated(process) for process in running.values()]
        said = [[folder / name / f"said-{rank}" for rank in range(ranks)] for name in running]
        return [
            Site(text, [file.read_text().splitlines() if file.exists() else [] for file in files])
            for text, files in zip(printed, said, strict=True)
        ]
    finally:
        for process in running.values():
            signal_all_of(process, "KILL")
            process.wait()


def communicated(process: subprocess.Popen[str]) -> str:
    """What it printed; one that does not end fails the test with all of it."""
    try:
        return process.communicate(timeout=400)[0]
    except subprocess.TimeoutExpired:
        signal_all_of(process, "USR1")  # on which each rank says where it is
        time.sleep(1.0)
        signal_all_of(process, "KILL")
        pytest.fail(f"it did not end, and printed:\n{process.communicate()[0]}")


def signal_all_of(launcher: subprocess.Popen[str], name: str) -> None:
    """Its ranks, too, which have process groups of their own."""
    subprocess.run(["pkill", f"-{name}", "-s", str(launcher.pid)], check=False)


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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    clean = run(tmp_path_factory.mktemp("clean") / "run", 2)
    assert [len(site.ends) for site in clean] == [2, 2], clean
    return [site.ends for site in clean]


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize(
    ("victim", "phase", "signal_name"),
    [
        ("b/1", "applied", "SIGKILL"),
        ("a/0", "committed", "SIGKILL"),  # the host of the store at which all meet
        ("b/0", "received", "SIGSTOP"),
    ],
)
def test_a_rank_is_lost_and_both_sites_resume_bit_for_bit(
    victim: str, phase: str, signal_name: str, tmp_path: Path, undisturbed: list[list[str]]
) -> None:
    hurt = run(tmp_path / "hurt", 2, victim, phase, signal_name)
    assert [site.ends for site in hurt] == undisturbed, hurt
    starts = [rounds for site in hurt for rounds in site.starts]
    # All ranks of both sites went on from one checkpoint.
    assert all(rounds == [0, starts[0][1]] for rounds in starts), hurt
    assert starts[0][1] >= 1


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize(
    ("victim", "meets"),
    # Site a hosts the store.
    [("b/1", "at least 1"), ("a/0", "at least 1"), ("b/0", "lighthouse")],
)
def test_the_other_site_trains_on_and_takes_the_restarted_one_in(
    victim: str, meets: str, tmp_path: Path
) -> None:
    # It takes a torchrun some ten seconds to come back, and a round here takes one.
    sites = run(tmp_path / "run", 2, victim, "received", meets=meets, rounds=40, pause=0.5)
    hurt, other = sites if victim.startswith("a") else sites[::-1]
    assert other.starts == [[0], [0]], other
    assert [rounds[0] for rounds in hurt.starts] == [0, 0]
    assert hurt.starts[0][1:] == hurt.starts[1][1:]
    assert len(hurt.starts[0]) == 2
    assert 5 < hurt.starts[0][1] < 40  # where the other one was by then, and not where its checkpoint was
    assert len(hurt.lasts) == 2
    assert hurt.lasts == other.lasts  # rank by rank, θ, m and the weights
    assert all(line.startswith("last round of 2 sites") for line in hurt.lasts)


@pytest.mark.check(FLEETS)
@pytest.mark.parametrize(
    ("slow", "meets", "ranks"),
    [
        ("b/0", "at least 1", 1),
        ("a/0", "at least 1", 2),
        ("b/0", "lighthouse", 1),
        ("b/0", "address", 1),
    ],
)
def test_a_site_that_ends_first_leaves_the_verdict_on_the_last_round_to_the_others(
    slow: str, meets: str, ranks: int, tmp_path: Path
) -> None:
    """Whichever hosts the store: the slow one has all votes, and asks only when the other has ended."""
    sites = run(tmp_path / "run", ranks, slow, "voted", "", meets=meets, rounds=5)
    assert len(sites[0].lasts) == ranks, sites
    assert sites[0].lasts == sites[1].lasts  # rank by rank, θ, m and the weights
    assert all(line.startswith("last round of 2 sites") for line in sites[0].lasts)
