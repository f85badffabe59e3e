"""The commands as a person runs them: what they write, and how they fail."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from processes import children, gone, variables
from selection import COMMANDS
from sites import run_ranks

from experiments import compare, train
from experiments.processes import launch
from experiments.reporting.results import Result, read
from experiments.settings.config import TrainConfig
from experiments.settings.merging import load

REPOSITORY = Path(__file__).parents[3]
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
        timeout=600,
        check=False,
    )


def results(folder: Path) -> dict[str, Result]:
    """By key."""
    return {path.stem: read(path) for path in (folder / "runs").glob("*.json")}


# Sums easy enough that some answers are right, so that there is something to learn from.
EASY = ["preset=smoke", "lr=1e-4", "arithmetic.largest=6", "arithmetic.held_out=20", "warm_start.steps=60"]
RUNS = [
    *("runs.DDP.method=ddp", "runs.DiLoCo.method=diloco", "runs.open.gate=open", "runs.PULSELoCo.clip=1"),
    "runs.One trainer.method=single",
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of runs by two trainers and by one."""
    folder = tmp_path_factory.mktemp("compare")
    done = run([*PYTHON, "experiments.compare", *EASY, "nproc=2", *RUNS], folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "compare"


@pytest.mark.check(COMMANDS)
def test_compare_writes_its_config_data_and_report(compared: Path) -> None:
    files = {path.name for path in compared.iterdir()}
    assert files >= {"config.yaml", "results.json", "results.csv", "report.html"}


@pytest.mark.check(COMMANDS)
def test_a_task_of_others_is_learned_by_a_run_of_each_value_that_is_listed(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="needs reasoning_gym")
    (tmp_path / "mine.yaml").write_text(
        "runs: {'DiLoCo α {outer_lr}': {method: diloco, over: {outer_lr: [0.7, 1.4]}}}"
    )
    done = run(
        [
            *PYTHON,
            "experiments.compare",
            "preset=smoke",
            "preset=spell_backward",
            "preset=mine.yaml",
            "nproc=2",
        ],
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = results(tmp_path / "runs" / "compare")
    assert set(found) == {"diloco-alpha-0.7.seed0", "diloco-alpha-1.4.seed0"}
    first, second = ([point.scores for point in one.evaluations] for one in found.values())
    assert first[0] == second[0]
    assert first[-1] != second[-1]
    assert all(0 < reward < 1 for one in found.values() for reward in one.rewards)  # its verifier gives parts


@pytest.mark.check(COMMANDS)
def test_runs_of_one_and_of_two_trainers_are_compared_at_once(compared: Path) -> None:
    found = results(compared)
    assert {key: (one.ranks, one.sites) for key, one in found.items()} == {
        "ddp.seed0": (2, 2),
        "diloco.seed0": (2, 2),
        "open.seed0": (2, 2),
        "pulseloco.seed0": (2, 2),
        "one-trainer.seed0": (1, 1),
    }
    assert found["one-trainer.seed0"].sent_bytes == 0
    assert 0 < (found["pulseloco.seed0"].density or 0) < 1


@pytest.mark.check(COMMANDS)
def test_with_the_gate_open_every_score_on_the_way_equals_dilocos(compared: Path) -> None:
    """One loop, one order of prompts, one start: bit-equal optimizers give equal curves."""
    diloco, opened = (results(compared)[f"{name}.seed0"] for name in ("diloco", "open"))
    scores = [[point.scores for point in one.evaluations] for one in (diloco, opened)]
    assert scores[0] == scores[1]
    assert diloco.rewards == opened.rewards
    assert [one.density for one in opened.rounds] == [1.0, 1.0]
    pulse = results(compared)["pulseloco.seed0"]
    assert [point.scores for point in pulse.evaluations] != scores[0]


@pytest.mark.check(COMMANDS)
def test_all_methods_start_alike_answer_the_same_prompts_and_learn(compared: Path) -> None:
    found = results(compared)
    starts = {key: one.evaluations[0].scores["sampled"] for key, one in found.items()}
    # One trainer sums all of the held-out problems, two sum halves: FP64's order.
    assert starts.pop("one-trainer.seed0") == pytest.approx(starts["ddp.seed0"], rel=1e-6)
    assert len(set(starts.values())) == 1
    together = [one for one in found.values() if one.ranks == 2]
    assert len({one.rewards[0] for one in together}) == 1
    assert all(len(one.rewards) == 2 for one in found.values())
    for one in found.values():
        scores = [point.scores["sampled"] for point in one.evaluations]
        assert len(scores) == 3
        assert len(set(scores)) == 3  # the weights have moved


@pytest.mark.check(COMMANDS)
def test_bytes_agree_with_the_kernels_counters(compared: Path) -> None:
    found = results(compared)
    for one in found.values():
        if one.kernel_sent_bytes is None:
            pytest.skip("needs TCP_INFO with byte counters (Linux 4.19 or newer)")
        # Lengths, votes and, for DDP, gloo's headers weigh more on a model this small (21,600 parameters).
        if one.method in ("ddp", "diloco"):
            assert 1.0 <= one.kernel_sent_bytes / one.accounted_bytes < 1.05, one.method
    ddp, diloco = found["ddp.seed0"], found["diloco.seed0"]
    assert ddp.sent_bytes / diloco.sent_bytes == pytest.approx(8, rel=0.03)  # sync_every


@pytest.mark.check(COMMANDS)
def test_tensorboards_files_hold_the_scores(compared: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for key, one in results(compared).items():
        events = EventAccumulator(str(compared / "tensorboard" / key))
        events.Reload()
        for name in ("pass@1", "sampled"):
            drawn = [(event.step, event.value) for event in events.Scalars(f"score/{name}")]
            assert drawn == [(p.step, pytest.approx(p.scores[name], rel=1e-6)) for p in one.evaluations]
        rewards = [(event.step, event.value) for event in events.Scalars("reward")]
        # A run's file holds six digits of a reward.
        assert rewards == [(8 * k, pytest.approx(reward, rel=1e-5)) for k, reward in enumerate(one.rewards)]
        assert ("round/density" in events.Tags()["scalars"]) == bool(one.rounds)


@pytest.mark.check(COMMANDS)
def test_train_under_torchrun_equals_the_same_method_in_a_comparison(compared: Path, tmp_path: Path) -> None:
    command = [*TORCHRUN, "-m", "experiments.train", "method=diloco", *EASY, "name=alone"]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    (alone,) = results(tmp_path / "runs" / "alone").values()
    together = results(compared)["diloco.seed0"]
    assert alone.evaluations == together.evaluations


@pytest.mark.check(COMMANDS)
def test_torchrun_leaves_runs_of_another_size_to_be_launched_and_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # What torchrun sets for its only rank.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    runs = ["runs.One.method=single", "runs.Two.method=ddp", "runs.Two.nproc=2"]
    command = [*PYTHON, "experiments.compare", "preset=smoke", "warm_start.steps=2", *runs]
    done = run(command, tmp_path, **alone)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "error: 1 runs need 2 trainers, and torchrun launched 1: what was run is kept; let "
        "`python -m experiments.compare` launch the rest"
    )
    assert set(results(tmp_path / "runs/compare")) == {"one.seed0"}


def site_of_two(rank: int, folder: str) -> None:
    os.chdir(folder)
    arguments = [*EASY, "nproc=4", "ranks_per_site=2", "name=sites"]
    train.work(load(TrainConfig, arguments), torch.device("cpu"))


@pytest.mark.check(COMMANDS)
def test_two_sites_of_two_ranks_train(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    run_ranks(4, site_of_two, str(tmp_path))
    (only,) = results(tmp_path / "runs" / "sites").values()
    assert (only.ranks, only.sites) == (4, 2)
    assert only.density is not None
    assert 0 < only.density <= (only.steady("union_density") or 0) < 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["method=ddp"], "launch with `torchrun --nproc-per-node 4 -m experiments.train method=ddp`"),
        (["nproc=4", "sync_evry=4"], "unknown key 'sync_evry'; did you mean 'sync_every'?"),
        (["nproc=3", "preset=two_sites"], "launch a multiple of 2"),
        (["nproc=1"], "at least two sites are needed"),
        (["nproc=2", "task=text", "text.stdlib=/nowhere"], "/nowhere does not hold it"),
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


@pytest.mark.check(COMMANDS)
@pytest.mark.parametrize("package", ["omegaconf", "matplotlib", "tqdm", "tensorboard"])
def test_a_missing_extra_is_one_sentence_that_names_it(package: str, tmp_path: Path) -> None:
    program = (
        f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = ['experiments.train', 'nproc=2']; "
        "runpy.run_module('experiments.train', run_name='__main__')"
    )
    done = run([sys.executable, "-c", program], tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {package} is not installed: pip install 'pulseloco[experiments]' "
        "(in a checkout: pip install '.[experiments]')\n"
    )


def test_an_occupied_port_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["experiments.compare", "preset=smoke", f"port={port}"])
        for name in FIELDS_OF_A_RANK:
            monkeypatch.delenv(name, raising=False)
        assert launch.main(compare.PROGRAM) == 1
    assert f"error: port {port} cannot be used (Address already in use)" in capsys.readouterr().err


@pytest.mark.check(COMMANDS)
def test_a_rank_that_finds_its_port_occupied_says_so_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        command = [*PYTHON, "experiments.train", "preset=smoke"]
        done = run(command, tmp_path, RANK="0", WORLD_SIZE="2", TORCH_CPP_LOG_LEVEL="FATAL", **meeting)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the ranks could not meet at 127.0.0.1:")
    assert done.stderr.count("\n") == 1


@pytest.mark.check(COMMANDS)
def test_under_torchrun_one_rank_says_what_is_wrong(tmp_path: Path) -> None:
    done = run([*TORCHRUN, "-m", "experiments.train", "sync_evry=4"], tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("error: unknown key 'sync_evry'; did you mean 'sync_every'?") == 1
    assert "experiments/settings/config.py" not in done.stderr  # no traceback of a rank


@pytest.mark.check(COMMANDS)
def test_a_killed_rank_is_named_and_the_others_are_stopped(tmp_path: Path) -> None:
    started, ranks = started_training("experiments.train", tmp_path, "DiLoCo", "method=diloco")
    victim = next(pid for pid, rank in ranks.items() if rank == 1)
    os.kill(victim, signal.SIGKILL)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 1
    assert said.splitlines()[-1] == "error: rank 1 was killed by SIGKILL"
    assert "Traceback" not in said
    assert gone(ranks)
    # Where the other one stood, when it lost its peer or was stopped for it, is in its log.
    assert "most recent call" in (tmp_path / "runs/diloco/logs/rank-0.log").read_text()


@pytest.mark.check(COMMANDS)
def test_ctrl_c_ends_in_one_sentence_and_no_rank_is_left(tmp_path: Path) -> None:
    started, ranks = started_training("experiments.train", tmp_path, "PULSELoCo")
    said = interrupted(started, ranks)
    assert said.splitlines()[-1] == "interrupted: all ranks were stopped, no results were written"
    assert [path.name for path in (tmp_path / "runs/pulseloco").iterdir()] == ["logs"]


@pytest.mark.check(COMMANDS)
def test_a_comparison_that_was_interrupted_goes_on_after_its_last_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough to be caught in the middle, short enough to be waited for.
    runs = ["warm_start.steps=2", "steps=16", "runs.A.method=ddp", "runs.B.method=ddp", "runs.B.steps=800"]
    runs += ["runs.B.eval_every=800", "eval_every=8"]
    started, ranks = started_training("experiments.compare", tmp_path, "[2/2", *runs)
    said = interrupted(started, ranks)
    assert said.splitlines()[-1] == (
        "interrupted: all ranks were stopped, finished runs are kept: the same command goes on from there"
    )
    kept = tmp_path / "runs/compare/runs"
    assert [path.name for path in kept.iterdir()] == ["a.seed0.json"]
    written = (kept / "a.seed0.json").stat().st_mtime_ns

    done = run([*PYTHON, "experiments.compare", "preset=smoke", "nproc=2", *runs], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 runs are there already, in runs/compare/" in done.stderr
    assert "] A: " not in done.stderr
    assert sorted(path.name for path in kept.iterdir()) == ["a.seed0.json", "b.seed0.json"]
    assert (kept / "a.seed0.json").stat().st_mtime_ns == written
    assert read(kept / "b.seed0.json").steps == 800


def interrupted(started: subprocess.Popen[str], ranks: dict[int, int]) -> str:
    """Ctrl-C -> what was said, with nothing left and no traceback."""
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does: to everyone in the foreground
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "Traceback" not in said
    assert "Received" not in said  # nor the agent's own log
    assert gone(ranks)
    return said


def started_training(
    module: str, folder: Path, method: str, *more: str
) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """A command whose two ranks are in the middle of training; and {process: rank}."""
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    endless = ["preset=smoke", "nproc=2", "steps=400000", "eval_every=400000", *more]
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
    ranks = {pid: int(variables(pid)["RANK"]) for pid in children(started.pid)}
    assert sorted(ranks.values()) == [0, 1]
    return started, ranks
