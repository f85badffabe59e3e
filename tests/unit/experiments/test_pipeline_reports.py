"""Settings, comparisons, reports and curves of pipelines."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from pipeline_parts import SMALL, config_of

from experiments.errors import ExperimentError
from experiments.pipeline.compare import COLUMNS, PipelineCompareConfig, runs_of, table
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Notes
from experiments.pipeline.figures import figures
from experiments.pipeline.report import Curves, draw, page
from experiments.settings.merging import load


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["workers=0"], "workers must be at least 1, got 0"),
        (["max_staleness=-1"], "max_staleness must be at least 0, got -1"),
        (["correction=apio"], "unknown correction 'apio'; did you mean 'aipo'?"),
        (["task=text"], "task=text has no verifier, which a pipeline needs: use prompts, gym or arithmetic"),
        (["method=single"], "sites train by method=pulseloco, diloco or ddp, got method=single"),
        (
            ["method=ddp", "saving=null"],
            "method=ddp is there to compare with, all trainers as one site",
        ),
        (["checkpoint_activations=true"], "checkpoint_activations is for models that are sharded"),
        (["overlap=1", "max_staleness=0"], "where all take turns, nothing overlaps"),
        (["ranks_per_site=2"], "sites of several ranks stay the same"),
        (["ratio_limit=0.5"], "ratio_limit must be at least 1, got 0.5"),
        (["stalenes=1"], "unknown key 'stalenes'; did you mean"),
        (["engine=vlm"], "unknown engine 'vlm'; did you mean 'vllm'?"),
        (["engine=vllm"], "vLLM loads models of Hugging Face's format: engine=vllm needs model=hf"),
        (["vllm.max_model_len=9"], "vllm.* are options of vLLM: set engine=vllm, too"),
        (["address=10.0.0.1:6379"], "the parts of a cluster may not see this machine's folders"),
        (["weights=reference::memory://x"], "weights: the URL of a store must be a path or begin with"),
        (["sites_on=[a]"], "sites_on and workers_on are nodes of a cluster, which address=HOST:PORT joins"),
        (["device=cuda"], "device=cuda is not built for pipelines, whose parts compute on CPUs"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ExperimentError) as raised:
        config_of(*arguments)
    assert str(raised.value).startswith(sentence)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["address=127.0.0.1:{port}"], "no Ray cluster answers at 127.0.0.1:{port} (.*): start one with "),
        (["address=somewhere"], "address must be HOST:PORT of a Ray cluster, got somewhere"),
        (["engine=vllm", "model=hf", "path=x"], "engine=vllm needs vllm in this environment"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_sentence_at_once(arguments: list[str], sentence: str) -> None:
    pytest.importorskip("ray", reason="needs ray")
    from experiments.pipeline import cluster

    port = free_port()
    config = config_of("weights=/shared", *(text.format(port=port) for text in arguments))
    begun = time.monotonic()
    with pytest.raises(ExperimentError, match=sentence.format(port=port)), cluster.started(config, 3):
        pass
    assert time.monotonic() - begun < 60  # Ray itself would give up after two minutes


def test_shares_are_of_the_time_between_the_first_version_and_the_last_round() -> None:
    notes = Notes()

    def noted(part: str, what: str, begun: float, ended: float, **about: Any) -> None:
        notes.events.append({"part": part, "what": what, "from": begun, "to": ended} | about)

    noted("worker 0", "waiting", 0, 12)
    noted("worker 0", "sampling", 12, 17)
    noted("worker 0", "waiting", 17, 30)
    noted("site 0, store", "writing", 9, 10, version=1)
    noted("worker 1", "evaluating", 12, 14, at=12, step=8, scores={"pass@1": 0.5})
    noted("worker 1", "evaluating", 10, 10, at=10, step=0, scores={"pass@1": 0.25})
    noted("site 0", "exchanging", 19, 20)
    notes.counts.update({"groups": 4, "reward of groups, in thousandths": 3000})
    notes.staleness.update({1: 10, 0: 30})
    found = figures(config_of(), [1], notes)
    assert found["shares"]["worker 0"] == {"waiting": 0.5, "sampling": 0.5}
    assert found["seconds_per_step"] == 1.25
    assert [one["scores"]["pass@1"] for one in found["evaluations"]] == [0.25, 0.5]
    assert found["reward"] == 0.75
    assert found["mean_staleness"] == 0.25


def compared(*more: str) -> PipelineCompareConfig:
    return load(PipelineCompareConfig, [*SMALL, *more])


def test_a_comparison_has_a_run_for_each_choice_and_seed() -> None:
    runs = runs_of(
        compared("seeds=2", "seed=5", 'runs={"staleness {max_staleness}": {over: {max_staleness: [0, 2]}}}')
    )
    assert [(one.label, one.config.seed, one.config.max_staleness) for one in runs] == [
        ("staleness 0", 5, 0),
        ("staleness 2", 5, 2),
        ("staleness 0", 6, 0),
        ("staleness 2", 6, 2),
    ]
    with pytest.raises(ExperimentError, match=r"unknown key 'runs\.a\.stalenes'; did you mean"):
        runs_of(compared("runs={a: {stalenes: 0}}"))
    with pytest.raises(ExperimentError, match="two runs would be kept in one file"):
        runs_of(compared("runs={a: {}, A: {}}"))
    with pytest.raises(ExperimentError, match="a comparison needs runs"):
        compared()


def test_a_run_that_is_stored_counts_as_long_as_its_settings_are_the_same(tmp_path: Path) -> None:
    (one,) = runs_of(compared("runs={a: {workers: 3}}"))
    assert one.stored(tmp_path) is None
    one.path(tmp_path).parent.mkdir()
    one.path(tmp_path).write_text(json.dumps(found_by(one.config)))
    assert one.stored(tmp_path) is not None
    (elsewhere,) = runs_of(compared("runs={a: {workers: 3}}", "weights=/elsewhere"))
    assert elsewhere.stored(tmp_path) is not None
    (other,) = runs_of(compared("runs={a: {workers: 4}}"))
    assert other.stored(tmp_path) is None


def found_by(config: PipelineConfig, score: float = 0.5) -> dict[str, Any]:
    notes = Notes()
    for part, what, begun, ended in (
        ("site 0, store", "writing", 9, 10),
        ("site 0", "training", 10, 15),
        ("site 0", "exchanging", 19, 20),
        ("site 0", "evaluating", 20, 21),
        ("site 1", "training", 10, 11),
        ("worker 0", "sampling", 10, 20),
    ):
        about = {"step": config.steps, "at": 20, "scores": {"pass@1": score}} if what == "evaluating" else {}
        notes.events.append({"part": part, "what": what, "from": begun, "to": ended} | about)
    notes.counts.update({"groups": 8, "tokens": 200, "round bytes": 3_000_000})
    notes.staleness.update({0: 100, 2: 50})
    notes.said.append("worker 0: <lost>")
    return figures(config, [1, 1], notes)


def test_the_table_of_a_comparison() -> None:
    config = config_of()
    text = table({"a": [found_by(config, 0.5), found_by(config, 0.5)], "b": [found_by(config, 0.25)]})
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines()]
    seconds = f"{10 / config.steps:.3f}"
    assert rows[0] == list(COLUMNS)
    assert rows[2] == [
        "a",
        "0.500 ± 0.000",
        f"{seconds} ± 0.000",
        "0.67 ± 0.00",
        "25.0% ± 0.0",
        "30% ± 0",
        "3.00 ± 0.00",
    ]
    assert rows[3] == ["b", "0.250", seconds, "0.67", "25.0%", "30%", "3.00"]


def test_the_report_of_a_run_has_its_flows_and_what_went_wrong(tmp_path: Path) -> None:
    found = found_by(config_of())
    draw(found, tmp_path / "pipeline.png")
    text = page(found, tmp_path / "pipeline.png")
    assert "<td>between the sites: their rounds, as sent by all of them</td><td>3,000,000</td>" in text
    assert "worker 0: &lt;lost&gt;" in text
    assert "<td>site 1</td><td>10%</td><td></td>" in text
    assert "data:image/png;base64," in text


def test_a_line_says_what_bounds_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="needs ray")
    from experiments.pipeline.run import Screen

    notes = Notes()
    for part, what, seconds in (
        ("site 0", "training", 2),
        ("site 1", "waiting", 6),
        ("site 1", "exchanging", 2),
        ("worker 0", "sampling", 9),
        ("worker 0, store", "receiving", 9),
    ):
        notes.events.append({"part": part, "what": what, "from": 0.0, "to": float(seconds)})
    status = {"notes": notes, "taken": 0, "version": 1, "out": 3, "ready": 2}
    Screen(config_of()).show(status)
    line = capsys.readouterr().err
    assert line.startswith("  0%, version 1 of 5, ")
    assert line.endswith("; sites: waiting 60%, training 20%; workers: sampling 100%\n")


def test_curves_are_there_while_the_run_goes_on(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def noted(part: str, what: str, **about: Any) -> dict[str, Any]:
        return {"part": part, "what": what, "from": 5.0, "to": 7.0} | about

    (tmp_path / "older").write_text("of an earlier run")
    with Curves(tmp_path) as curves:
        notes = Notes()
        notes.events += [
            noted("site 0", "training", step=3),
            noted("site 0", "evaluating", step=8, scores={"pass@1": 0.5}),
            noted("site 0, store", "writing", version=2, bytes=100),
            noted("worker 0", "sampling", tokens=50),
            noted("worker 0", "waiting"),
        ]
        notes.staleness.update({0: 3, 2: 1})
        curves.add(notes, 2)
        curves.add(Notes(), 2)
        found = EventAccumulator(str(tmp_path)).Reload()
        values = {
            tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]
        }
    assert not (tmp_path / "older").exists()
    assert values == {
        "seconds of training/site 0": [(3, 2.0)],
        "score/pass@1": [(8, 0.5)],
        "bytes/of a version": [(2, 100.0)],
        "tokens per second/worker 0": [(1, 25.0)],
        "staleness of tokens": [(2, 0.5)],
    }
