"""`python -m experiments.pipeline` as a person runs it: with parts that are killed, and with Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import gone
from selection import COMMANDS

pytest.importorskip("ray", reason="needs ray")

REPOSITORY = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "experiments.pipeline", "preset=smoke", "lr=1e-4", "sync_every=4", "lease=4"]
PATIENCE = 300.0  # seconds: Ray and five processes that import torch start on a busy machine


def started(folder: Path, *more: str) -> subprocess.Popen[str]:
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [*COMMAND, *more],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def descendants(process: int) -> list[int]:
    """Oldest first."""
    try:
        own = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [one for child in map(int, own) for one in (child, *descendants(child))]


def actors(command: subprocess.Popen[str], kind: str) -> list[int]:
    found = []
    for process in descendants(command.pid):
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words.startswith(f"ray::{kind}".encode()):
            found.append(process)
    return found


def wait_for_versions(command: subprocess.Popen[str], folder: Path, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob("runs/pipeline/weights/*/versions/*"))) < count:
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.check(COMMANDS)
def test_a_run_goes_on_without_a_worker_and_without_its_controller(tmp_path: Path) -> None:
    command = started(tmp_path, "steps=160", "max_staleness=2")
    wait_for_versions(command, tmp_path, 4)
    os.kill(actors(command, "Worker")[0], signal.SIGKILL)
    wait_for_versions(command, tmp_path, 12)
    os.kill(actors(command, "Controller")[0], signal.SIGKILL)
    said, errors = command.communicate(timeout=PATIENCE)
    assert command.returncode == 0, errors
    assert "s a step, pass@1" in said
    found = json.loads((tmp_path / "runs/pipeline/pipeline.json").read_text())
    assert len(set(found["digests"])) == 1
    assert len(found["digests"]) == 2
    assert found["evaluations"][-1]["step"] == 160
    assert {int(versions) for versions in found["staleness"]} <= {0, 1, 2}
    assert (tmp_path / "runs/pipeline/pipeline.png").stat().st_size > 10_000
    # All that was trained on after the controller was lost; before it there was as much again.
    assert sum(found["staleness"].values()) > 100


@pytest.mark.check(COMMANDS)
def test_ctrl_c_ends_all_parts_and_says_so_once(tmp_path: Path) -> None:
    command = started(tmp_path, "steps=4000")
    wait_for_versions(command, tmp_path, 3)
    everybody = descendants(command.pid)
    assert len(everybody) > 6
    os.kill(command.pid, signal.SIGINT)
    _, errors = command.communicate(timeout=PATIENCE)
    assert command.returncode == 130
    assert errors.count("interrupted: all parts were stopped, and no results were written") == 1
    assert "Traceback" not in errors
    assert gone(everybody)


@pytest.mark.check(COMMANDS)
def test_a_site_that_is_lost_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    command = started(tmp_path, "steps=4000", "timeout_s=20")
    wait_for_versions(command, tmp_path, 3)
    os.kill(actors(command, "Trainer")[-1], signal.SIGKILL)
    _, errors = command.communicate(timeout=PATIENCE)
    assert command.returncode == 1
    assert "Traceback" not in errors
    assert any(line.startswith("error: ") for line in errors.splitlines()), errors
