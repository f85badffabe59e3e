"""Problems of `reasoning_gym`, a collection of procedural tasks with verifiers that others wrote.

    spell_backward             "  canroyer:" -> "reyornac"
    gcd                        "  28, 54:" -> "2"
    fraction_simplification    " 92/524:" -> "23/131"

What all questions of a task have in common at either end is left out, since a model of bytes that never sees
another task learns nothing from it. The verifier is reasoning_gym's, and may give a part of the reward.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

from experiments.errors import ExperimentError
from experiments.settings.checks import nearest
from experiments.settings.tasks import GymConfig
from experiments.tasks.problems import Problem, Problems


def gym_problems(config: GymConfig, *, longest: int | None) -> Problems:
    """The same whatever the run's seed.

    Args:
        longest: bytes of a prompt and its answer that the model can read; None: it is asked the questions
            as they are, in whatever tokens it has.

    Raises:
        ExperimentError: reasoning_gym is not installed, or has no such task, or its problems are too long.
    """
    options = tuple(sorted((name, _hashable(value)) for name, value in config.options.items()))
    problems = _made(config.name, options, config.size, config.held_out, longest is not None)
    needed = max(len(f"{p.prompt}{p.answer}\n".encode()) for p in problems.train + problems.held_out)
    if longest is not None and needed > longest:
        raise ExperimentError(
            f"{config.name}'s longest problem and its answer have {needed} bytes, and the model reads "
            f"{longest}: use transformer.context={needed}, or gym.options that make shorter ones"
        )
    return problems


@cache  # every run of a comparison asks for them
def _made(name: str, options: tuple[tuple[str, Any], ...], size: int, held_out: int, bare: bool) -> Problems:
    dataset = _dataset(name, dict(options), 2 * (held_out + size))
    entries = _entries(name, dataset, held_out + size)
    prompts = _bare(list(entries)) if bare else [f"{question}\n" for question in entries]
    judged = {
        Problem(prompt, entry["answer"], _slip(entry["answer"])): entry
        for prompt, entry in zip(prompts, entries.values(), strict=True)
    }
    problems = list(judged)

    def reward(problem: Problem, text: str) -> float:
        return float(dataset.score_answer(text, judged[problem]))

    return Problems(problems[held_out:], problems[:held_out], reward)


def _bare(questions: list[str]) -> list[str]:
    """Without what they have in common at either end, and as wide as the longest."""
    head = _in_common(questions)
    tail = _in_common([question[head:][::-1] for question in questions])
    bare = [question[head : len(question) - tail] for question in questions]
    width = max(map(len, bare))
    return [f"{question.rjust(width)}:" for question in bare]


def _in_common(texts: list[str]) -> int:
    """Letters at the beginning of all."""
    places = zip(*texts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda letters: len(set(letters)) == 1, places))


def _entries(name: str, dataset: Any, count: int) -> dict[str, dict[str, Any]]:
    """`count` of the task's problems, by their questions: what is asked twice is there once."""
    entries: dict[str, dict[str, Any]] = {}
    for k in range(len(dataset)):
        entry = dataset[k]
        entries.setdefault(entry["question"], entry | {"answer": str(entry["answer"])})
        if len(entries) == count:
            return entries
    raise ExperimentError(
        f"{name} has only {len(entries)} different problems among {len(dataset)}: make gym.size and "
        f"gym.held_out smaller, or choose gym.options with more"
    )


def _dataset(name: str, options: dict[str, Any], size: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ExperimentError(
            f"task=gym needs reasoning_gym, loco's extra `gym` ({error}): pip install '.[gym]'"
        ) from error
    if name not in DATASETS:
        raise ExperimentError(f"reasoning_gym has no task '{name}'{nearest(name, sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=0, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise ExperimentError(f"gym.options do not fit {name}: {error}") from error


def _slip(answer: str) -> str:
    """Its last two letters have changed places."""
    return answer[:-2] + answer[:-3:-1]


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
