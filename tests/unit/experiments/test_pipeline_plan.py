"""What the plan of a pipeline says, from rates that are known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selection import PAGES

from experiments.errors import ExperimentError
from experiments.pipeline.plan.against import held_against
from experiments.pipeline.plan.config import PlanConfig
from experiments.pipeline.plan.measuring import _shared, measured
from experiments.pipeline.plan.planning import plan
from experiments.pipeline.plan.prediction import Layout, predict
from experiments.pipeline.plan.rates import Rates, worked_out
from experiments.pipeline.plan.splits import Row, draw, splits, table
from experiments.settings.merging import load

RATES = Rates(
    answer_tokens=50,
    longest_tokens=100,
    slot_tokens=100,
    token_s=0.01,
    sequence_s=0.001,
    step_s=0.2,
    answer_s=0.05,
    round_s=0.4,
    publish_s=0.2,
    write_s=0.1,
    round_bytes=1e6,
)
# A round learns from 4 · 2 · 8 = 64 answers; training takes 4 · (0.2 + 8 · 0.05) + 0.4 = 2.8 s on each site,
# and 10 answers are sampled in 100 · (0.01 + 10 · 0.001) = 2 s.
LAYOUT = Layout(
    sites=2,
    ranks=1,
    samplers=2,
    batch=10,
    step_answers=8,
    sync_every=4,
    max_staleness=2,
    cores=None,
    link=None,
)

# Rounds are over long before the longest answer is.
LONG = ["sites=1", "sync_every=1", "target={answers: 4, longest_tokens: 100000}"]


def test_the_slower_side_sets_the_pace() -> None:
    found = predict(RATES, LAYOUT)
    assert found.bounds == pytest.approx({"training": 3.0, "sampling": 6.4})
    assert found.bound == "sampling"
    assert found.round_s == pytest.approx(6.4)
    assert found.answers_s == pytest.approx(10)
    more = predict(RATES, replace(LAYOUT, samplers=5))
    assert (more.bound, more.round_s) == ("training", pytest.approx(3.0))


def test_the_longest_answer_is_as_old_as_the_rounds_that_end_meanwhile() -> None:
    assert predict(RATES, LAYOUT).staleness == pytest.approx(2 / 6.4)
    slower = replace(RATES, longest_tokens=1000)
    assert predict(slower, LAYOUT).staleness == pytest.approx(20 / 6.4)


def test_cores_that_are_shared_have_all_the_work() -> None:
    found = predict(RATES, replace(LAYOUT, samplers=5, cores=2))
    assert found.bound == "cores"
    assert found.round_s == pytest.approx((2 * 2.8 + 0.2 + 12.8) / 2)
    plenty = predict(RATES, replace(LAYOUT, samplers=5, cores=64))
    assert plenty.bound == "training"


def test_a_link_adds_to_the_round_and_is_named_when_it_is_the_longest_part() -> None:
    fast = predict(RATES, replace(LAYOUT, samplers=5, link=1e6))
    assert (fast.bound, fast.round_s) == ("training", pytest.approx(4.0))
    slow = predict(RATES, replace(LAYOUT, samplers=5, link=1e5))
    assert (slow.bound, slow.round_s) == ("links", pytest.approx(13.0))


def test_turns_cost_the_first_batch() -> None:
    found = predict(RATES, replace(LAYOUT, samplers=7, max_staleness=0))
    assert (found.bound, found.round_s) == ("turns, training", pytest.approx(5.1))
    assert found.staleness == 0
    few = predict(RATES, replace(LAYOUT, samplers=2, max_staleness=0))
    # 7 batches by 2 samplers, then the last of four steps.
    assert (few.bound, few.round_s) == ("turns, sampling", pytest.approx(4 * 2 + 0.7 + 0.2 + 0.1))


def test_no_more_samplers_work_than_there_are_batches_to_be_had() -> None:
    one = replace(LAYOUT, samplers=100, batch=64, max_staleness=1)
    assert predict(RATES, one).bounds["sampling"] == pytest.approx(RATES.of_batch(64) / 2)


def of(*arguments: str) -> PlanConfig:
    return load(PlanConfig, list(arguments))


def test_what_is_known_of_a_gpu_gives_its_rates() -> None:
    config = of(
        "gpus=8",
        "target={parameters: 1e9, layers: 10, kv_heads: 4, head_dim: 64, prompt_tokens: 100,"
        " answer_tokens: 200, longest_tokens: 1000}",
        "gpu={memory_gb: 10, bandwidth_gb: 1000, tflops: 100, utilisation: 0.5}",
    )
    rates = worked_out(config)
    assert rates.token_s == pytest.approx(2e9 / 1e12)
    kv = 2 * 10 * 4 * 64 * 2
    assert rates.sequence_s == pytest.approx(max(kv * 200 / 1e12, 2e9 / 5e13))
    assert rates.answer_s == pytest.approx(300 * 6e9 / 5e13)
    assert rates.most_answers == pytest.approx((9e9 - 2e9) / (kv * 200))
    given = worked_out(replace(config, target=replace(config.target, token_ms=7.0, trained_tokens_s=1e4)))
    assert (given.token_s, given.answer_s) == (pytest.approx(0.007), pytest.approx(0.03))


def test_every_gpu_trains_or_samples_and_the_best_split_balances_both() -> None:
    config = of("gpus=64")
    rows = splits(config, worked_out(config))
    assert {2 * row.layout.ranks + row.layout.samplers for row in rows} == {64}
    # 193 GB of a site need 4 GPUs, and 512 answers are shared evenly.
    assert [row.layout.ranks for row in rows] == [4, 8, 16]
    best = max(rows, key=lambda row: row.expected.answers_s)
    training, sampling = best.expected.bounds["training"], best.expected.bounds["sampling"]
    assert abs(training - sampling) < 0.1 * training
    assert all(row.expected.staleness <= config.max_staleness for row in rows)


def test_a_batch_is_as_large_as_memory_and_staleness_let_it_be() -> None:
    rates = worked_out(of("gpus=16"))

    def limits(*more: str, **changed: Any) -> set[str]:
        rows = splits(of("gpus=16", "sites=1", "target.answers=480", *more), replace(rates, **changed))
        return {row.limit for row in rows if row.expected.bound == "sampling"}

    assert limits(most_answers=8) == {"memory"}
    assert limits("max_staleness=1", most_answers=1e6) == {"staleness"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gpus=2", "target.parameters=1e8"], "gpus=2 can't be split: a site keeps 2.4 GB in 1 or more GPUs"),
        (
            ["gpus=3"],
            "gpus=3 can't be split: a site keeps 193 GB in 4 or more GPUs of 80 GB, 4 of them share",
        ),
        (
            ["gpus=8", "saving=null", "outer_momentum=0.5", "parameters=bfloat16"],
            "gpus=8 can't be split: a site keeps 161 GB in 3 or more GPUs of 80 GB, 4 of them share",
        ),
        (["gpus=8", "target.state_bytes=2000"], "gpus=8 can't be split: a site keeps 1.61e+04 GB in 251 or"),
        (["gpus=8", "target.answers=2"], "a site keeps 193 GB in 4 or more GPUs of 80 GB, which can't share"),
        (
            ["gpus=8", "target.parameters=4e11"],
            "4e+11 parameters and an answer of target.longest_tokens=8192",
        ),
        (["gpus=9", "target.longest_tokens=1e6"], "8.03e+09 parameters and an answer of target.longest_tok"),
        ([*LONG, "gpus=5"], "no split keeps the longest answer within"),
        (["gpus=4", "gpu.tflops=0"], "gpu.tflops must be > 0, got 0"),
        (["gpus=4", "link_mbit=-1"], "link_mbit must be > 0, got -1"),
        (["gpus=4", "against=runs/x"], "runs on this machine are predicted without gpus"),
        (["against=nowhere"], "against=nowhere: two runs or more are needed there, of `compare`"),
        (["gpus=4", "gpu.tflop=1"], "unknown key 'gpu.tflop'; did you mean"),
    ],
)
def test_a_plan_that_can_not_be_made_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ExperimentError) as raised:
        plan(of(*arguments), tmp_path)
    assert str(raised.value).startswith(sentence)


@pytest.mark.check(PAGES)
def test_what_the_sentence_advises_can_be_planned(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError) as raised:
        plan(of(*LONG, "gpus=5"), tmp_path)
    advice = str(raised.value).split("Set ")[1]
    staleness, every = (part.strip() for part in advice.split(", or "))
    every_steps = int(every.removeprefix("sync_every="))
    assert "best:" in plan(of(*LONG, "gpus=5", staleness), tmp_path)
    steps = [f"steps={2 * every_steps}", f"eval_every={every_steps}"]
    assert "best:" in plan(of(*LONG, "gpus=5", every, *steps), tmp_path)


def run_of(answers: int, *, sampling: float, training: float, seconds: float) -> dict[str, Any]:
    """
    Args:
        seconds: of a step.
    """

    def event(what: str, cpu: float, **about: Any) -> list[dict[str, Any]]:
        first = {"part": "site 0", "what": what, "cpu": 99.0, "from": 0.0, "to": 0.0} | about
        return [first, first] + 3 * [first | {"cpu": cpu}]  # the first ones don't count: everything is new

    waits = [{"part": "site 0", "what": "waiting", "from": 0.0, "to": k / 1000} for k in range(102)]
    batches = [
        {"part": "worker 0", "what": "sampling", "cpu": sampling, "answers": 4 * answers, "longest": 5}
        | {"steps": 5, "at_once": 4 * answers}
        | {"from": 10.0 * k, "to": 10.0 * k + 9.5}
        for k in range(8)
    ]
    return {
        "config": {"task": "gym", "gym": {"group": 4}, "steps": 8, "sync_every": 4, "sites": 2},
        "counts": {"tokens": 480, "groups": 40, "round bytes": 4000},
        "seconds_per_step": seconds,
        "events": [
            *waits,
            *batches,
            *event("training", training, answers=answers),
            *event("exchanging", 0.4),
            *event("publishing", 0.3),
            *event("writing", 0.0, to=0.25),
        ],
    }


def test_two_runs_tell_what_a_batch_costs_and_each_answer_in_it() -> None:
    layout = replace(LAYOUT, samplers=1, cores=2)  # 3 parts
    few, many = replace(layout, batch=8, step_answers=2), replace(layout, batch=32, step_answers=8)
    slow = (
        run_of(2, sampling=1.0, training=0.2, seconds=5.0),
        run_of(8, sampling=2.5, training=0.5, seconds=9.0),
    )
    found = measured([(few, slow[0]), (many, slow[1])])
    assert found.of_batch(8) == pytest.approx(1.0)
    assert found.of_batch(32) == pytest.approx(2.5)
    assert found.step_s + 2 * found.answer_s == pytest.approx(0.2)
    assert found.step_s + 8 * found.answer_s == pytest.approx(0.5)
    assert (found.answer_tokens, found.longest_tokens) == (3, 5)
    assert (found.round_s, found.publish_s, found.write_s, found.round_bytes) == (0.4, 0.3, 0.25, 1000)
    assert found.lease_s == pytest.approx(0.5)
    assert found.take_s == pytest.approx(0.026, abs=0.001)  # of calls that take 2 to 101 ms
    for one, run in ((few, slow[0]), (many, slow[1])):
        assert predict(found, one).bounds["cores"] == pytest.approx(4 * run["seconds_per_step"])
    assert measured([(replace(few, cores=4), slow[0]), (replace(many, cores=4), slow[1])]).shared_s == 1


@pytest.mark.parametrize(
    ("rounds", "second", "call"),
    [
        ([(11.0, 5.0, 10), (20.5, 10.0, 5)], 2.0, 0.1),
        ([(10.0, 5.0, 10), (10.0, 5.0, 10)], 1.0, 0.5),  # alike: the calls could be all of it
        ([(6.0, 5.0, 10), (9.0, 10.0, 5)], 1.0, 0.0),  # less than the work itself
        ([(10.0, 5.0, 10), (20.0, 8.0, 5)], 30 / 13, 0.0),  # more calls take less
    ],
)
def test_sharing_never_makes_work_less(
    rounds: list[tuple[float, float, int]], second: float, call: float
) -> None:
    assert _shared(rounds) == (pytest.approx(second), pytest.approx(call))


def test_calls_take_time_from_each_part_and_from_the_cores() -> None:
    slow = replace(RATES, take_s=0.1, lease_s=0.5)
    training = predict(RATES, replace(LAYOUT, samplers=9))
    assert predict(slow, replace(LAYOUT, samplers=9)).round_s == pytest.approx(training.round_s + 4 * 0.1)
    sampling = predict(RATES, LAYOUT)
    assert predict(slow, LAYOUT).round_s == pytest.approx(sampling.round_s * 2.5 / 2)
    cores = replace(LAYOUT, cores=2)
    busier = replace(RATES, call_s=0.05, shared_s=1.5)
    calls = 4 * 2 + 64 / 10
    alone = predict(RATES, cores).bounds["cores"]
    assert predict(busier, cores).bounds["cores"] == pytest.approx(1.5 * alone + calls * 0.05 / 2)


def test_predictions_are_held_against_what_was_measured() -> None:
    seen = {"a": (100.0, 0.0), "b": (200.0, 1.9), "c": (300.0, 1.5)}
    text = held_against({"a": (120.0, 0.0), "b": (190.0, 2.0), "c": (150.0, 0.75)}, seen)
    assert "| a | 120 | 100 | +20% | 0.0 | 0.0 |" in text
    assert "| c | 150 | 300 | -50% | 0.8 | 1.5 |" in text
    assert "predicted in 2 of 3 pairs" in text
    assert "largest error: 50%, and 0.8 versions" in text


def test_samples_are_as_old_as_they_may_be_where_samplers_are_ahead() -> None:
    assert predict(RATES, replace(LAYOUT, samplers=5)).age == 2
    assert predict(RATES, LAYOUT).age == pytest.approx(0.5 + 2 / 6.4)
    assert predict(RATES, replace(LAYOUT, samplers=5, max_staleness=0)).age == 0


@pytest.mark.check(PAGES)
def test_the_plan_is_drawn_and_kept(tmp_path: Path) -> None:
    text = plan(of("gpus=12", "link_mbit=10"), tmp_path)
    assert "12 GPUs, 2 sites" in text
    assert "A site keeps 193 GB, sharded over its GPUs; a sampler keeps 16 GB of weights and 0.13 MB" in text
    assert "The pipeline can't run this plan yet: its parts compute on CPUs" in text
    assert "links" in text
    assert {path.name for path in tmp_path.iterdir()} == {"plan.png", "rates.json", "table.md"}
    row = Row(LAYOUT, predict(RATES, LAYOUT), "memory")
    assert "| → | 2 × 1 | 2 | 10 | 10.0 | 0.31 | sampling, memory |" in table([row], row)
    draw([row], 2, tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 5000
