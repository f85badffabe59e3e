"""The commands as a person runs them: what they write, and how they fail."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import compare, launch, train

REPOSITORY = Path(__file__).parents[1]
PYTHON = [sys.executable, "-m"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FIELDS_OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in FIELDS_OF_A_RANK}
    return clean | {"OMP_NUM_THREADS": "1"} | more


def run(command: Sequence[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`command` in `folder`, which sees the repository's configs and keeps its own runs."""
    if not (folder / "configs").exists():
        (folder / "configs").symlink_to(REPOSITORY / "configs")
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(PYTHONPATH=str(REPOSITORY), **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def results(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "results.json").read_text())["runs"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A comparison in which PULSELoCo's gate is open; and what it printed."""
    folder = tmp_path_factory.mktemp("compare")
    done = run([*PYTHON, "experiments.compare", "config=smoke", "nproc=2", "gate=open"], folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "compare", done.stdout


def test_compare_writes_its_table_data_config_and_plots(compared: tuple[Path, str]) -> None:
    folder, printed = compared
    assert {path.name for path in folder.iterdir()} == {
        *("config.yaml", "results.json", "results.csv"),
        *("loss_by_steps.png", "loss_by_bytes.png", "rounds.png"),
    }
    names = ("DDP", "DiLoCo", "PULSELoCo")
    rows = [line.split()[0] for line in printed.splitlines() if line.startswith(names)]
    assert rows[:5] == ["DDP", "DiLoCo", "PULSELoCo", "DiLoCo", "PULSELoCo"]
    assert "written to runs/compare/" in printed


def test_with_the_gate_open_every_loss_on_the_way_equals_dilocos(compared: tuple[Path, str]) -> None:
    """One loop, one data order, one start: bit-equal optimizers give equal curves."""
    _, diloco, pulse, diloco_plain, pulse_plain = results(compared[0])
    for dense, open_gate in ((diloco, pulse), (diloco_plain, pulse_plain)):
        curves = [[point["loss"] for point in run["evaluations"]] for run in (dense, open_gate)]
        assert curves[0] == curves[1]
        assert [point["density"] for point in open_gate["rounds"]] == [1.0, 1.0]
    assert diloco["final_loss"] != diloco_plain["final_loss"]


def test_all_methods_start_from_the_same_loss_and_lower_it(compared: tuple[Path, str]) -> None:
    runs = results(compared[0])
    assert len({run["first_loss"] for run in runs}) == 1
    assert all(run["final_loss"] < run["first_loss"] for run in runs)


def test_bytes_agree_with_the_kernels_counters(compared: tuple[Path, str]) -> None:
    for run in results(compared[0]):
        if run["kernel_sent_bytes"] is None:
            pytest.skip("needs TCP_INFO with byte counters (Linux 4.19 or newer)")
        # gloo's own headers and the votes weigh more on a model this small (21,600 parameters).
        assert 1.0 <= run["kernel_sent_bytes"] / run["accounted_bytes"] < 1.05, run["method"]
    ddp, diloco = results(compared[0])[:2]
    assert ddp["sent_bytes"] / diloco["sent_bytes"] == pytest.approx(8, rel=0.03)  # sync_every


def test_train_under_torchrun_equals_the_same_method_in_a_comparison(
    compared: tuple[Path, str], tmp_path: Path
) -> None:
    command = [*TORCHRUN, "-m", "experiments.train", "method=diloco", "config=smoke", "name=alone"]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    (alone,) = results(tmp_path / "runs" / "alone")
    together = results(compared[0])[1]
    assert alone["evaluations"] == together["evaluations"]


def test_two_sites_of_two_ranks_train(tmp_path: Path) -> None:
    command = [*PYTHON, "experiments.train", "nproc=4", "config=smoke", "ranks_per_site=2"]
    done = run([*command, "warm_start.steps=2", "name=sites"], tmp_path)
    assert done.returncode == 0, done.stderr
    (only,) = results(tmp_path / "runs" / "sites")
    assert (only["ranks"], only["sites"]) == (4, 2)
    assert 0 < only["density"] < 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["method=ddp"], "launch with `torchrun --nproc-per-node 4 -m experiments.train method=ddp`"),
        (["nproc=4", "sync_evry=4"], "unknown key 'sync_evry'; did you mean 'sync_every'?"),
        (["nproc=3", "config=two_sites"], "launch a multiple of 2"),
        (["nproc=1"], "at least two sites are needed"),
        (["nproc=2", "data.stdlib=/nowhere"], "/nowhere does not hold it"),
    ],
)
def test_a_mistake_is_told_before_anything_is_launched(
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["experiments.train", *arguments])
    monkeypatch.setattr(launch, "_launch", lambda *_, **__: pytest.fail("launched"))
    for name in FIELDS_OF_A_RANK:
        monkeypatch.delenv(name, raising=False)
    assert launch.main(train.PROGRAM) == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_an_occupied_port_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["experiments.compare", "config=smoke", f"port={port}"])
        for name in FIELDS_OF_A_RANK:
            monkeypatch.delenv(name, raising=False)
        assert launch.main(compare.PROGRAM) == 1
    assert f"error: port {port} cannot be used (Address already in use)" in capsys.readouterr().err


def test_a_rank_that_finds_its_port_occupied_says_so_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        command = [*PYTHON, "experiments.train", "config=smoke"]
        done = run(command, tmp_path, RANK="0", WORLD_SIZE="2", TORCH_CPP_LOG_LEVEL="FATAL", **meeting)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the ranks could not meet at 127.0.0.1:")
    assert done.stderr.count("\n") == 1


def test_under_torchrun_one_rank_says_what_is_wrong(tmp_path: Path) -> None:
    done = run([*TORCHRUN, "-m", "experiments.train", "sync_evry=4"], tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("error: unknown key 'sync_evry'; did you mean 'sync_every'?") == 1
    assert "experiments/config.py" not in done.stderr  # no traceback of a rank


def test_a_killed_rank_is_named_and_the_others_are_stopped(tmp_path: Path) -> None:
    started, ranks = started_training("experiments.train", tmp_path, "DiLoCo", "method=diloco")
    victim = next(pid for pid, rank in ranks.items() if rank == 1)
    os.kill(victim, signal.SIGKILL)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 1
    assert said.splitlines()[-1] == "error: rank 1 was killed by SIGKILL"
    assert "Traceback" not in said
    assert not any(alive(pid) for pid in ranks)


@pytest.mark.parametrize(
    ("module", "method"), [("experiments.train", "PULSELoCo"), ("experiments.compare", "DDP")]
)
def test_ctrl_c_ends_in_one_sentence_and_no_rank_is_left(module: str, method: str, tmp_path: Path) -> None:
    started, ranks = started_training(module, tmp_path, method)
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does: to everyone in the foreground
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130
    assert said.splitlines()[-1] == "interrupted: all ranks were stopped, no results were written"
    assert "Traceback" not in said
    assert "Received" not in said  # nor the agent's own log
    assert not any(alive(pid) for pid in ranks)
    assert not list(tmp_path.glob("runs/*/results.json"))


def started_training(
    module: str, folder: Path, method: str, *more: str
) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """A command whose two ranks are in the middle of training; and {process: rank}."""
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    endless = ["config=smoke", "nproc=2", "steps=400000", "eval_every=400", *more]
    started = subprocess.Popen(
        [*PYTHON, module, *endless],
        cwd=folder,
        env=environment(PYTHONPATH=str(REPOSITORY)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert started.stderr is not None
    for line in started.stderr:
        if line.startswith(method):  # its first step is done
            break
    ranks = {}
    for pid in children(started.pid):
        pairs = (Path("/proc") / str(pid) / "environ").read_text().split("\0")
        variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        ranks[pid] = int(variables["RANK"])
    assert sorted(ranks.values()) == [0, 1]
    return started, ranks


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether the process still runs; the launcher may take a moment to collect it."""
    for _ in range(20):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True
