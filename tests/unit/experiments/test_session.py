"""A comparison is kept run by run: what is there and unchanged is not trained again."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import COMMANDS
from sites import run_ranks

from experiments import compare
from experiments.reporting.results import Evaluation, Result, Round, read, store
from experiments.reporting.tracking import tensorboard
from experiments.settings.config import CompareConfig
from experiments.settings.merging import load
from experiments.settings.plan import Run, runs_of
from experiments.training import session

CONFIGS = Path(__file__).parents[3] / "configs"
SMOKE = [f"preset={CONFIGS / 'smoke.yaml'}", "nproc=2", "name=mine", "warm_start.steps=2"]


def work(rank: int, folders: list[str], arguments: list[str]) -> None:
    os.chdir(folders[rank])
    compare.work(load(CompareConfig, arguments), torch.device("cpu"))


def trained(folder: Path, *arguments: str, also: Path | None = None) -> dict[str, int]:
    """Train what is missing with two ranks -> when each run's file was written."""
    run_ranks(2, work, [str(folder), str(also or folder)], [*SMOKE, *arguments])
    return {path.name: path.stat().st_mtime_ns for path in (folder / "runs/mine/runs").iterdir()}


A, B = ["runs.A.method=ddp"], ["runs.B.method=diloco"]


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    folder = tmp_path_factory.mktemp("kept")
    return folder, trained(folder, *A)


@pytest.fixture
def kept(trained_once: tuple[Path, dict[str, int]], tmp_path: Path) -> tuple[Path, dict[str, int]]:
    """A copy for each test, with the same times: they change it, and run in any order."""
    folder, times = trained_once
    shutil.copytree(folder, tmp_path / "kept")
    return tmp_path / "kept", times


@pytest.mark.check(COMMANDS)
def test_what_is_there_is_kept_and_what_is_missing_trained(
    kept: tuple[Path, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first = kept
    monkeypatch.chdir(folder)
    both = load(CompareConfig, [*SMOKE, *A, *B])
    assert [run.label for run in compare.missing(both)] == ["B"]
    then = trained(folder, *A, *B)
    assert set(then) == {"a.seed0.json", "b.seed0.json"}  # and nothing unfinished
    assert then["a.seed0.json"] == first["a.seed0.json"]
    assert compare.missing(both) == []
    assert [result.label for result in session.results_of(runs_of(both), folder / "runs/mine")] == ["A", "B"]
    again = trained(folder, *A, *B, "timeout_s=200", "port=29777")  # which decide nothing
    assert again == then


@pytest.mark.check(COMMANDS)
def test_a_changed_setting_or_a_damaged_file_is_trained_anew(
    kept: tuple[Path, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = kept
    monkeypatch.chdir(folder)
    first = trained(folder, *A, *B)
    changed = trained(folder, *A, *B, "runs.B.lr=1e-5")
    assert changed["a.seed0.json"] == first["a.seed0.json"]
    assert changed["b.seed0.json"] > first["b.seed0.json"]
    path = folder / "runs/mine/runs/a.seed0.json"
    whole = path.read_text()
    for damage in (whole[:200], "", "[]", '"text"', json.dumps({**json.loads(whole), "config": 3})):
        path.write_text(damage)
        assert [run.label for run in compare.missing(load(CompareConfig, [*SMOKE, *A]))] == ["A"]
    mended = trained(folder, *A, *B, "runs.B.lr=1e-5")
    assert mended["b.seed0.json"] == changed["b.seed0.json"]
    path.with_name("whole.json").write_text(whole)
    assert read(path).evaluations == read(path.with_name("whole.json")).evaluations


@pytest.mark.check(COMMANDS)
def test_only_rank_0_has_to_have_the_files(kept: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    """The others may be on other machines: they must neither train alone nor stay away."""
    folder, _ = kept
    first = trained(folder, *A)
    assert trained(folder, *A, also=tmp_path) == first


def result(config: dict[str, Any] | None = None) -> Result:
    run = Run("A", replace(load(CompareConfig, []), nproc=2))  # pyright: ignore[reportArgumentType]
    one: dict[str, Any] = {
        "density": 0.1,
        "residual_norm": 0.2,
        "payload_bytes": 3.0,
        "sent_bytes": 4.0,
        "exchange": "gather",
    }
    return Result(
        label="A",
        config=config or run.stored(),
        metric="pass@1",
        higher_is_better=True,
        ranks=2,
        sites=2,
        parameters=10,
        evaluations=(
            Evaluation(step=0, scores={"pass@1": 1 / 3, "sampled": 0.1}, sent_bytes=0.0),
            Evaluation(step=16, scores={"pass@1": 2 / 3, "sampled": 0.2}, sent_bytes=50.0),
        ),
        rewards=(0.25, 0.5),
        rounds=(
            Round(round=1, step=8, union_density=0.15, visible=0.05, age=1.5, **one),
            Round(round=2, step=16, **one),
        ),
        one_step_density=0.01,
        sent_bytes=1 / 3,
        received_bytes=1.0,
        bytes_source="counted",
        accounted_bytes=1.0,
        kernel_sent_bytes=None,
        exchange_seconds=1.0,
        round_seconds=1.0,
        step_seconds=1.0,
        rollout_seconds=1.0,
        seconds=1.0,
        machine={"cpus": 2},
    )


def test_scores_and_settings_come_back_from_their_file_to_the_last_digit(tmp_path: Path) -> None:
    run = Run("A", load(CompareConfig, ["nproc=2", "lr=1.2345678901234e-6"]))  # pyright: ignore
    sent = result(run.stored())
    store(sent, tmp_path / "a.json")
    got = read(tmp_path / "a.json")
    assert got == sent
    assert run.same_as(got.config)


def test_files_of_rounds_with_columns_that_are_no_longer_kept_can_be_read(tmp_path: Path) -> None:
    store(result(), tmp_path / "a.json")
    fields = json.loads((tmp_path / "a.json").read_text())
    count = len(fields["rounds"]["round"])
    whole = {k: v if isinstance(v, list) else [v] * count for k, v in fields["rounds"].items()}
    assert whole != fields["rounds"]  # some are the same in all rounds, and stand there once
    fields["rounds"] = whole | {"received_bytes": [1.0] * count}
    (tmp_path / "old.json").write_text(json.dumps(fields))
    assert read(tmp_path / "old.json") == result()


def test_a_gain_is_positive_where_it_is_an_improvement() -> None:
    found = result()
    assert found.gain == pytest.approx(1 / 3)
    assert found.gained("sampled") == pytest.approx(0.1)
    assert replace(found, higher_is_better=False).gain == pytest.approx(-1 / 3)


def test_steady_figures_are_of_the_second_half_of_the_rounds() -> None:
    rounds = [replace(result().rounds[0], density=d) for d in (0.1, 0.2, 0.3, 0.5)]
    found = replace(result(), rounds=tuple(rounds))
    assert found.density == pytest.approx(0.4)
    assert found.steady("age") == 1.5
    assert replace(found, rounds=()).density is None
    assert result().steady("age") is None  # not watched in the last round
    assert found.payload_per_parameter == pytest.approx(0.3)


def test_tensorboard_shows_the_last_training_of_a_run_only(tmp_path: Path) -> None:
    """Two event files in one folder would be drawn as one curve, forth and back."""
    first = result()
    later = replace(first, evaluations=(replace(first.evaluations[0], step=3),), rewards=(), rounds=())
    tensorboard(first, tmp_path / "board")
    assert [(e.step, e.value) for e in scalars(tmp_path / "board", "reward")] == [(0, 0.25), (8, 0.5)]
    assert [(e.step, e.value) for e in scalars(tmp_path / "board", "round/age of the withheld")] == [(8, 1.5)]
    assert len(scalars(tmp_path / "board", "round/density")) == 2
    tensorboard(later, tmp_path / "board")
    assert [e.step for e in scalars(tmp_path / "board", "score/pass@1")] == [3]


def scalars(folder: Path, name: str) -> list[Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events.Scalars(name)
