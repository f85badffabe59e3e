"""What a worker does without Ray: answers that begin and end at their own times, and their judges."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_parts import NobodysController, config_of
from selection import COMMANDS

from experiments.errors import ExperimentError
from experiments.models.model import ByteTransformer
from experiments.pipeline.diary import Diary
from experiments.pipeline.sampling.engine import TorchEngine
from experiments.settings.config import TransformerConfig
from experiments.tasks.problems import Problem
from experiments.tasks.rollout import Decoding, Question, Rollout, Weights, sample

CPU = torch.device("cpu")
DECODING = Decoding(longest=30, stops=(10, *range(128, 256)))  # most answers are short, and some are not


def model_of(seed: int) -> ByteTransformer:
    return ByteTransformer(TransformerConfig(dim=16, layers=2, heads=2, context=40), seed=seed)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchEngine]:
    monkeypatch.setattr("experiments.pipeline.sampling.engine.language_model", lambda config: model_of(0))
    monkeypatch.setattr("experiments.pipeline.sampling.engine.POLL", 0.02)
    found = TorchEngine(config_of(), str(tmp_path), Diary("worker", NobodysController()), lambda version: 0)
    yield found
    found.close()


def question(k: int, **more: Any) -> Question:
    uniforms = torch.rand(2, 30, generator=torch.Generator().manual_seed(k))
    prompt = list(range(1, 2 + k % 3))
    return Question(
        **{"key": k, "prompt": prompt, "group": 2, "decoding": DECODING, "uniforms": uniforms} | more
    )


def alone(one: Question, before_token: Any = None) -> Rollout:
    return sample(
        model_of(0),
        [one.prompt],
        group=one.group,
        decoding=one.decoding,
        uniforms=one.uniforms,
        device=CPU,
        before_token=before_token,
    )


def test_answers_that_begin_while_others_go_on_are_those_that_each_prompt_would_have_alone(
    engine: TorchEngine,
) -> None:
    questions, found, ended_at = [question(k) for k in range(12)], dict[Any, Rollout](), []
    waiting = list(questions)
    for step in range(200):
        while waiting and engine.active < 10:
            engine.add(waiting.pop(0))
        for key, rollout in engine.step():
            found[key] = rollout
            ended_at.append(step)
        if len(found) == len(questions):
            break
    assert engine.active == 0
    assert len(set(ended_at)) > 3  # none waited for all others
    for one in questions:
        wanted = alone(one)
        assert found[one.key].texts == wanted.texts
        for mine, its in zip(found[one.key].logp, wanted.logp, strict=True):
            # A batch sums in another order: FP32's rounding of logits of about 10.
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=2e-5)


def test_held_weights_stay_until_they_are_let_go(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def take() -> None:
        taken.append(engine.version)
        engine.version += 1

    monkeypatch.setattr(engine, "_take", take)
    engine.hold = True
    engine.add(question(0, decoding=Decoding(longest=4, stops=())))
    for _ in range(2):
        engine.step()
    assert taken == []
    engine.hold = False
    ended = [one for _ in range(2) for one in engine.step()]
    assert [one.tolist() for one in ended[0][1].versions] == [[0, 0, 0, 1]] * 2


def test_in_a_cohort_those_that_ended_are_computed_no_longer() -> None:
    """Whatever weights come meanwhile, and whether caches are made anew."""
    for recompute in (False, True):
        counts: list[int] = []
        model = model_of(0)
        extend = model.extend

        def counted(tokens: torch.Tensor, past: Any, extend: Any = extend, counts: Any = counts) -> Any:
            counts.append(len(tokens))
            return extend(tokens, past)

        model.extend = counted  # type: ignore[method-assign]
        version = 0

        def next_weights(recompute: bool = recompute) -> Weights:
            nonlocal version
            version += 1
            return Weights(version, recompute)

        uniforms = torch.rand(64, 30, generator=torch.Generator().manual_seed(3))
        options: dict[str, Any] = {"uniforms": uniforms, "device": CPU, "before_token": next_weights}
        rollout = sample(model, [[1], [2]], group=32, decoding=DECODING, **options)
        assert counts[1:] == sorted(counts[1:], reverse=True)
        assert sum(counts[1:]) <= 2 * sum(len(logp) for logp in rollout.logp)
        for logp, versions in zip(rollout.logp, rollout.versions, strict=True):
            assert versions.tolist() == list(range(1, 1 + len(logp)))


# ---- judges, which are processes ----

REWARDS = """
import os, time

time.sleep(1.5)  # as where a model is loaded: longer than an answer may take

def reward(prompt, completion, row):
    if completion == "slow":
        time.sleep(600)
    if completion == "dead":
        os._exit(3)
    if completion == "once" and not os.path.exists(row["mark"]):
        open(row["mark"], "w").close()
        raise OSError("for the first time")
    if completion == "wrong":
        raise ValueError("no number in it")
    return len(completion) + row["more"]
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="needs ray")
    ray.init(include_dashboard=False, num_cpus=2, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.mark.check(COMMANDS)
def test_answers_are_judged_though_the_function_is_slow_fails_or_ends_its_process(
    tmp_path: Path, ray: Any
) -> None:
    from experiments.pipeline.sampling.judging import Judges

    (tmp_path / "rewards.py").write_text(REWARDS)
    controller, row = NobodysController(), {"prompt": "x", "more": 1, "mark": str(tmp_path / "mark")}
    more = [f"prompts.reward={tmp_path}/rewards.py:reward", "prompts.file=x.jsonl", "reward_timeout_s=1"]
    config = config_of("task=prompts", "model=hf", "path=x", "reward_processes=2", *more)
    diary = Diary("worker 0", controller)
    judges = Judges(config, diary)

    def judged(texts: list[str]) -> list[list[float]]:
        for k, text in enumerate(texts):
            judges.judge(k, [(Problem("x", row=row), text), (Problem("x", row=row), "and")])
        found: dict[Any, list[float]] = {}
        until = time.monotonic() + 600
        while judges.are_busy and time.monotonic() < until:
            found |= dict(judges.judged(0.1))
        return [found[k] for k in range(len(texts))]

    assert judged(["a", "slow", "once", "dead", "abc"]) == [[2, 4], [0, 4], [5, 4], [0, 4], [4, 4]]
    assert judged(["wrong"]) == [[0, 4]]  # and the judges still work
    assert len(controller.said) == 1  # once is enough
    name = f"{tmp_path}/rewards.py:reward"
    assert controller.said[0].startswith(f"worker 0: {name} failed on 1 of 2 answers, whose reward is 0: ")
    assert diary.notes.counts["rewards given up, counted as 0"] >= 1
    judges.judge("all", [(Problem("x", row=row), "wrong")] * 8)

    def all_of_them() -> None:
        while judges.are_busy:
            judges.judged(0.1)

    with pytest.raises(ExperimentError, match="failed on 8 answers in a row: ValueError: no number in it"):
        all_of_them()
