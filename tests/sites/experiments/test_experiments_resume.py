"""A training that was resumed ends as if it had never stopped; its ranks leave logs, and no orphans."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import children, gone, variables
from selection import COMMANDS
from sites import run_ranks
from test_experiments_runs import PYTHON, environment, run, started_training

from experiments import compare, train
from experiments.errors import ExperimentError
from experiments.reporting.results import Result, read
from experiments.settings.config import CompareConfig, TrainConfig
from experiments.settings.merging import load

REPOSITORY = Path(__file__).parents[3]
TIMINGS = ("exchange_seconds", "round_seconds", "step_seconds", "rollout_seconds", "seconds", "machine")
SMALL = [
    "preset=smoke",
    "lr=1e-4",
    "save_every=1",
    "steps=32",
    "arithmetic.largest=6",
    "arithmetic.held_out=20",
]


def trained(rank: int, folder: str, arguments: list[str]) -> str:
    os.chdir(folder)
    try:
        train.work(load(TrainConfig, arguments), torch.device("cpu"))
    except ExperimentError as error:
        return str(error)
    return ""


def fresh(folder: Path) -> Path:
    folder.mkdir()
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    return folder


def comparable(result: Result) -> dict[str, Any]:
    """All but timings, and what only the kernel counts."""
    fields = dataclasses.asdict(result)
    for name in (*TIMINGS, "kernel_sent_bytes"):
        del fields[name]
    if result.bytes_source == "kernel":
        for name in ("sent_bytes", "received_bytes"):
            del fields[name]
        for evaluation in fields["evaluations"]:
            del evaluation["sent_bytes"]
    del fields["config"]["resume"]
    return fields


def only(folder: Path) -> Result:
    (path,) = (folder / "runs/mine/runs").glob("*.json")
    return read(path)


def final_weights(folder: Path, step: int) -> list[torch.Tensor]:
    """Of all ranks, as the last checkpoint has them."""
    kept = folder / "runs/mine/checkpoints"
    files = sorted(kept.glob(f"step-{step:08d}.*.pt")) or sorted(
        kept.glob(f"round-{step // 8:08d}/*/state.pt")
    )
    found = []
    for path in sorted(files):
        state = torch.load(path, weights_only=True)
        values = state["model"].values() if "model" in state else state["optimizer"]["loco"]["weights"]
        found.append(torch.cat([w.reshape(-1) for w in values]))
    return found


def forget_newest(folder: Path, keep: str) -> None:
    """As if the run had been stopped after that."""
    for path in (folder / "runs/mine/checkpoints").iterdir():
        if not path.name.startswith(keep):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.check(COMMANDS)
@pytest.mark.parametrize(
    ("ranks", "keep", "arguments"),
    [
        (2, "round-00000003", ["method=pulseloco"]),
        (2, "round-00000003", ["method=pulseloco", "value_steps=16"]),
        (2, "round-00000003", ["method=pulseloco", "whole_ulps=true"]),
        (2, "round-00000003", ["method=diloco"]),
        (2, "step-00000024", ["method=ddp"]),
        (1, "step-00000024", ["method=single"]),
    ],
)
def test_a_resumed_runs_weights_and_result_equal_an_uninterrupted_ones(
    tmp_path: Path, ranks: int, keep: str, arguments: list[str]
) -> None:
    arguments = [*SMALL, f"nproc={ranks}", "name=mine", *arguments]
    whole, pieced = fresh(tmp_path / "whole"), fresh(tmp_path / "pieced")
    for folder in (whole, pieced):
        assert run_ranks(ranks, trained, str(folder), arguments) == [""] * ranks
    forget_newest(pieced, keep)
    (pieced / "runs/mine/runs").rename(tmp_path / "gone")
    assert run_ranks(ranks, trained, str(pieced), [*arguments, "resume=true"]) == [""] * ranks
    assert comparable(only(pieced)) == comparable(only(whole))
    assert only(pieced).seconds > 0
    one, other = final_weights(pieced, 32), final_weights(whole, 32)
    assert len(one) == ranks
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.check(COMMANDS)
def test_another_configuration_is_not_gone_on_with_and_without_resume_it_starts_anew(tmp_path: Path) -> None:
    folder = fresh(tmp_path / "x")
    arguments = [*SMALL, "steps=16", "nproc=2", "name=mine"]
    run_ranks(2, trained, str(folder), arguments)
    for change, sentence in (
        ("lr=2e-4", "otherwise (lr: 0.0001 then, 0.0002 now)"),
        ("outer_lr=0.5", "= 0.7"),
    ):
        for error in run_ranks(2, trained, str(folder), [*arguments, change, "resume=true"]):
            assert sentence in error
    assert run_ranks(2, trained, str(folder), [*arguments, "lr=2e-4"]) == ["", ""]
    assert only(folder).config["lr"] == 2e-4


def compared(rank: int, folder: str, arguments: list[str]) -> None:
    os.chdir(folder)
    compare.work(load(CompareConfig, arguments), torch.device("cpu"))


@pytest.mark.check(COMMANDS)
def test_the_runs_of_a_comparison_keep_checkpoints_of_their_own(tmp_path: Path) -> None:
    folder = fresh(tmp_path / "x")
    shared = [argument for argument in SMALL if argument != "save_every=1"]
    runs = [f"runs.{label}.{change}" for label in "AB" for change in ("save_every=1", "resume=true")]
    arguments = [*shared, "steps=16", "nproc=2", "name=mine", *runs, "runs.B.method=ddp"]
    run_ranks(2, compared, str(folder), arguments)
    kept = folder / "runs/mine/checkpoints"
    assert {path.name for path in kept.iterdir()} == {"a.seed0", "b.seed0"}
    assert (kept / "a.seed0/round-00000002").is_dir()
    assert len(list((kept / "b.seed0").glob("step-00000016.*.pt"))) == 2
    # Each goes on from its own.
    files = {path: read(path) for path in (folder / "runs/mine/runs").iterdir()}
    for path in files:
        path.unlink()
    shutil.rmtree(kept / "a.seed0/round-00000002")
    for path in (kept / "b.seed0").glob("step-00000016.*.pt"):
        path.unlink()
    run_ranks(2, compared, str(folder), arguments)
    assert {path: comparable(read(path)) for path in files} == {p: comparable(r) for p, r in files.items()}


@pytest.mark.check(COMMANDS)
@pytest.mark.parametrize(
    ("method", "sentence"), [("pulseloco", "nproc: 2 then, 3 now"), ("ddp", "no checkpoints of rank 2")]
)
def test_another_number_of_ranks_is_not_gone_on_with(tmp_path: Path, method: str, sentence: str) -> None:
    folder = fresh(tmp_path / "x")
    arguments = [*SMALL, f"method={method}", "steps=16", "name=mine"]
    assert run_ranks(2, trained, str(folder), [*arguments, "nproc=2"]) == [""] * 2
    for error in run_ranks(3, trained, str(folder), [*arguments, "nproc=3", "resume=true"]):
        assert sentence in error


@pytest.mark.check(COMMANDS)
def test_checkpoints_are_not_removed_unasked_and_it_is_said_where_a_run_begins(tmp_path: Path) -> None:
    command = [*PYTHON, "experiments.train", *SMALL, "steps=16", "nproc=2", "name=mine"]
    first = run([*command, "resume=true"], tmp_path)
    assert first.returncode == 0, first.stderr
    assert "PULSELoCo: no checkpoints in runs/mine/checkpoints: starts anew\n" in first.stderr
    refused = run(command, tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        "error: runs/mine/checkpoints holds round 2 of a run, which starting anew"
    )
    assert refused.stderr.count("\n") == 1
    forget_newest(tmp_path, "round-00000001")
    again = run([*command, "resume=true"], tmp_path)
    assert again.returncode == 0, again.stderr
    assert "PULSELoCo: goes on from round 1\n" in again.stderr


def test_ctrl_c_says_that_there_are_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(TrainConfig, ["save_every=1", "name=mine"])
    monkeypatch.chdir(tmp_path)
    assert train.interrupted(config) == "no results were written"
    (tmp_path / "runs/mine/checkpoints/round-00000003").mkdir(parents=True)
    assert train.interrupted(config) == (
        "no results were written; resume=true goes on from runs/mine/checkpoints"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["save_every=-1"], "save_every must be at least 0, got -1"),
        (["save_every=1", "method=sparseloco"], "SparseLoCo's residual"),
        (["resume=true"], "save_every=0 writes none"),
    ],
)
def test_what_cannot_be_saved_is_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ExperimentError, match=sentence):
        load(TrainConfig, arguments)


@pytest.mark.check(COMMANDS)
def test_under_torchrun_a_killed_rank_costs_nothing_but_time(tmp_path: Path) -> None:
    """SIGKILL in the middle of the training; torchrun restarts all ranks, and they go on by themselves."""
    long = [*SMALL, "steps=240", "eval_every=120", "name=mine"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    whole, broken = fresh(tmp_path / "whole"), fresh(tmp_path / "broken")
    done = run([*torchrun, "-m", "experiments.train", *long], whole)
    assert done.returncode == 0, done.stderr

    with (tmp_path / "said").open("w") as said:
        started = subprocess.Popen(
            [*torchrun, "--max-restarts", "1", "-m", "experiments.train", *long],
            cwd=broken,
            env=environment(PYTHONPATH=str(REPOSITORY)),
            stdout=said,
            stderr=said,
        )
        until(lambda: (broken / "runs/mine/checkpoints/round-00000010").exists(), started)
        victim = next(pid for pid in children(started.pid) if variables(pid).get("RANK") == "1")
        os.kill(victim, signal.SIGKILL)
        try:
            assert started.wait(180) == 0, (tmp_path / "said").read_text()
        finally:
            started.kill()
            started.wait()
    assert comparable(only(broken)) == comparable(only(whole))
    one, other = final_weights(broken, 240), final_weights(whole, 240)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    log = (broken / "runs/mine/logs/rank-0.log").read_text()
    assert "restart 0" in log
    assert "restart 1\n" in log
    assert "resumed at round" in log
    assert "most recent call" in log  # where it stood when it lost its peer, or was stopped for it


def until(holds: Callable[[], bool], started: "subprocess.Popen[Any]") -> None:
    for _ in range(4800):
        if holds():
            return
        assert started.poll() is None, "ended before that"
        time.sleep(0.05)
    raise TimeoutError


@pytest.mark.check(COMMANDS)
def test_a_killed_launcher_leaves_no_rank_behind(tmp_path: Path) -> None:
    started, ranks = started_training("experiments.train", tmp_path, "PULSELoCo")
    os.kill(started.pid, signal.SIGKILL)
    started.communicate(timeout=240)
    assert gone(ranks)


@pytest.mark.check(COMMANDS)
def test_a_killed_torchrun_leaves_no_rank_behind(tmp_path: Path) -> None:
    endless = ["preset=smoke", "steps=400000", "eval_every=400000", "name=mine"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    folder = fresh(tmp_path / "x")
    with (tmp_path / "said").open("w") as said:
        started = subprocess.Popen(
            [*torchrun, "-m", "experiments.train", *endless],
            cwd=folder,
            env=environment(PYTHONPATH=str(REPOSITORY)),
            stdout=said,
            stderr=said,
        )
        until(lambda: "PULSELoCo: 1/" in (tmp_path / "said").read_text(), started)
        ranks = children(started.pid)
        assert len(ranks) == 2
        os.kill(started.pid, signal.SIGKILL)
        started.wait(60)
    assert gone(ranks)


def test_what_is_started_through_orphans_ends_with_its_parent() -> None:
    """Such as the store of `experiments.elastic`: a program that can't ask for it itself."""
    parent = "import subprocess\nfrom experiments.processes.orphans import through\n" + (
        "child = subprocess.Popen(through(['sleep', '600']))\nprint(child.pid, flush=True)\nchild.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        env=environment(PYTHONPATH=str(REPOSITORY)),
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout is not None
        child = int(started.stdout.readline())
        until(lambda: Path(f"/proc/{child}/cmdline").read_bytes() == b"sleep\x00600\x00", started)
        started.kill()
    assert gone([child])


@pytest.mark.check(COMMANDS)
def test_a_failed_rank_exits_with_1_and_its_traceback_is_in_its_log(tmp_path: Path) -> None:
    folder = fresh(tmp_path / "x")
    (folder / "runs").mkdir()
    (folder / "runs/warm_start").write_text("a file where a folder has to be")
    done = run([*PYTHON, "experiments.train", "preset=smoke", "nproc=2", "name=mine"], folder)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("rank 0: FileExistsError")
    assert "Traceback" in (folder / "runs/mine/logs/rank-0.log").read_text()
