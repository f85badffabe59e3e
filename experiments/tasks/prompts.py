"""Prompts from a file of the user's, judged by a function of the user's.

    task=prompts prompts.file=train.jsonl prompts.reward=rewards.py:exact model=hf path=models/mine

A row of the file has the prompt, a text or a list of messages ({"role": …, "content": …}, which go through
the tokenizer's chat template), and whatever else the function reads. The function is called as
`function(prompt, completion, row)`, with the prompt as it is in the row, and returns a number.

With prompts.environment=tools.py:Class an answer has several turns. Of each answer's Class() the methods are
called `reset(row)` and, after each turn, `step(completion)`, which returns an observation (None: it is over)
and a reward; the answer's reward is their sum.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from experiments.errors import ExperimentError
from experiments.settings.checks import nearest
from experiments.settings.tasks import PromptsConfig
from experiments.tasks.problems import Problem, Problems

Row = dict[str, Any]
_LARGEST = 1e15  # of a reward: sums of squares are numbers, too


class Chat(Protocol):
    def chat(self, messages: list[dict[str, Any]]) -> str: ...


def prompts_of(config: PromptsConfig, words: Chat) -> Problems:
    """The same whatever the run's seed.

    Raises:
        ExperimentError: the file or the function can't be read, or a row has no prompt.
    """
    assert config.file is not None
    judge = judge_of(config)
    train = _problems(config.file, config.column, words)
    if config.held_out_file is not None:
        held_out = _problems(config.held_out_file, config.column, words)
        prompts = {problem.prompt for problem in held_out}
        if both := sum(problem.prompt in prompts for problem in train):
            raise ExperimentError(f"{both} rows of {config.file} have prompts of {config.held_out_file}, too")
    else:
        train, held_out = _split(train, config)

    def reward(problem: Problem, text: str) -> float:
        assert isinstance(judge, Reward)
        try:
            return judge(problem.row, text)
        except Exception as error:  # whatever the user's function raises
            raise ExperimentError(f"{config.reward} failed: {type(error).__name__}: {error}") from error

    return Problems(train, held_out, reward, answers_known=False)


def _split(problems: list[Problem], config: PromptsConfig) -> tuple[list[Problem], list[Problem]]:
    """To train on, and held out: rows with the same prompt are on one side."""
    by_prompt: dict[str, list[Problem]] = {}
    for problem in problems:
        by_prompt.setdefault(problem.prompt, []).append(problem)
    prompts = list(by_prompt)
    random.Random(0).shuffle(prompts)
    held_out: list[Problem] = []
    while prompts and len(held_out) < config.held_out:
        held_out += by_prompt[prompts.pop()]
    if not prompts:
        raise ExperimentError(
            f"{config.file} has {len(problems)} rows of {len(by_prompt)} prompts, and {config.held_out} are "
            "to be held out: set prompts.held_out lower, or prompts.held_out_file"
        )
    return [one for prompt in prompts for one in by_prompt[prompt]], held_out


class Reward:
    """A function of the user's, by its name."""

    def __init__(self, name: str, column: str) -> None:
        self._function, self._column = _named(name, "prompts.reward"), column

    def __call__(self, row: Row, text: str) -> float:
        return _number(self._function(row[self._column], text, row))


@dataclass(frozen=True)
class Reply:
    """What an environment answers to the model.

    observation: a text, or messages. None: there is no further turn.
    """

    reward: float = 0.0
    observation: Any = None


class Environment:
    """A class of the user's, by its name. An environment is made anew for each reply, and told all turns so
    far: none is lost with its process, as long as it decides by what it is told."""

    def __init__(self, name: str) -> None:
        self._kind = _named(name, "prompts.environment")

    def __call__(self, row: Row, said: Sequence[str]) -> Reply:
        one: Any = self._kind()
        one.reset(row)
        for text in said[:-1]:
            one.step(text)
        observation, reward = one.step(said[-1])
        if not isinstance(observation, str | list | None):
            raise TypeError(f"an observation is a text, messages or None, got {type(observation).__name__}")
        return Reply(_number(reward), observation)


def judge_of(config: PromptsConfig) -> Reward | Environment:
    if config.environment is not None:
        return Environment(config.environment)
    assert config.reward is not None
    return Reward(config.reward, config.column)


def between_turns(prompt: Any, observation: Any, words: Chat) -> str:
    """The text from the end of a model's turn to the beginning of its next one."""
    if isinstance(prompt, str):
        if not isinstance(observation, str):
            raise ExperimentError("prompts.environment: prompts are texts, so its observations must be, too")
        return observation
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    turn = secrets.token_hex(16)  # stands for the model's, and occurs nowhere else
    whole = words.chat([*prompt, {"role": "assistant", "content": turn}, *observation])
    _, found, tail = whole.rpartition(turn)
    if not found:
        raise ExperimentError(
            "the chat template leaves out what the assistant has said, so no turn can follow"
        )
    return tail


def _number(value: Any) -> float:
    reward = float(value)
    if not abs(reward) <= _LARGEST:
        raise ValueError(f"the reward is {reward}")
    return reward


@cache  # a file is not run again
def _named(name: str, setting: str) -> Callable[..., Any]:
    source, _, attribute = name.rpartition(":")
    try:
        if source.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"own_{Path(source).stem}", source)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
    except FileNotFoundError as error:
        raise ExperimentError(f"{setting}: there is no file {source}") from error
    except Exception as error:  # whatever the user's file raises
        raise ExperimentError(
            f"{setting}: {source} can't be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        what = "function" if setting == "prompts.reward" else "class"
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ExperimentError(f"{setting}: {source} has no {what} '{attribute}'{nearest(attribute, known)}")
    return function


def _problems(file: str, column: str, words: Chat) -> list[Problem]:
    found = [Problem(_prompt(row, column, where, words), row=row) for where, row in _rows(Path(file))]
    if not found:
        raise ExperimentError(f"{file} has no rows")
    return found


def _prompt(row: Row, column: str, where: str, words: Chat) -> str:
    if column not in row:
        raise ExperimentError(f"{where} has no column '{column}'{nearest(column, row)}: set prompts.column")
    value = row[column]
    if isinstance(value, str):
        return value
    messages = isinstance(value, list) and value
    if not messages or not all(isinstance(one, dict) and "role" in one for one in value):
        raise ExperimentError(f"{where}: {column} must be a text or a list of messages, each with a role")
    try:
        return words.chat(value)
    except ExperimentError:
        raise
    except Exception as error:  # templates raise errors of their own
        raise ExperimentError(f"{where}: the chat template refuses it: {error}") from error


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Each with where it is, for messages."""
    if not path.is_file():
        raise ExperimentError(f"there is no file {path}")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line.encode("utf-8", "surrogateescape"))
            except ValueError as error:
                raise ExperimentError(f"{where} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ExperimentError(f"{where} is not an object with columns")
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ExperimentError(f"{path} needs pyarrow ({error}): pip install pyarrow, or use JSONL") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise ExperimentError(f"{path} is not Parquet: {str(error).splitlines()[0]}") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row
