"""The settings of each task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from experiments.settings.checks import at_least, require


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """What tasks with a verifier share."""

    held_out: int = 2048  # problems that are never trained on
    slips: float = 0.5  # share of the warm start's answers that are a careless pupil's
    prompts: int = 8  # per trainer and step
    group: int = 8  # answers to each prompt
    clip_low: float = 0.2
    clip_high: float = 0.28
    own_problems: bool = False  # each trainer has a share of them, in the order of their prompts' letters

    def recipe(self) -> list[Any]:
        """What decides the problems, and so the warm start's weights."""
        return [self.held_out, self.slips]


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig(GrpoConfig):
    largest: int = 100  # operands lie below

    def __post_init__(self) -> None:
        at_least(1, self, "largest", "prompts", "group", "held_out", part="arithmetic.")
        problems = self.largest * (2 * self.largest + min(self.largest, 10))
        require(
            self.held_out < problems,
            f"arithmetic.held_out must leave some of {problems} problems, got {self.held_out}",
        )

    @property
    def longest(self) -> int:
        """Characters of the longest prompt with its answer and the answer's end."""
        return 3 * len(str(self.largest - 1)) + 3

    def recipe(self) -> list[Any]:
        return [self.largest, *super().recipe()]


@dataclass(frozen=True, kw_only=True)
class GymConfig(GrpoConfig):
    """A task of reasoning_gym; configs/ has some that a small model can begin to solve."""

    name: str = "spell_backward"
    options: dict[str, Any] = field(default_factory=dict)  # of the task itself, e.g. {max_word_len: 8}
    size: int = 16384  # problems that are trained on

    def __post_init__(self) -> None:
        at_least(1, self, "size", "prompts", "group", "held_out", part="gym.")

    def recipe(self) -> list[Any]:
        return [self.name, self.options, self.size, *super().recipe()]


@dataclass(frozen=True, kw_only=True)
class PromptsConfig(GrpoConfig):
    """Prompts from a file, judged by a function: see `experiments.tasks.prompts`."""

    file: str | None = None  # JSONL, or Parquet
    column: str = "prompt"  # of the file: a text, or a list of messages
    reward: str | None = None  # module:function or path/file.py:function
    environment: str | None = None  # instead, for answers of several turns: a class
    turns: int = 4  # of an answer at most
    held_out: int = 256  # rows
    held_out_file: str | None = None  # instead: all rows of this one

    def __post_init__(self) -> None:
        at_least(1, self, "prompts", "group", "held_out", "turns", part="prompts.")
        for name in ("file", "held_out_file"):
            value = getattr(self, name)
            known = value is None or value.endswith((".jsonl", ".parquet"))
            require(known, f"prompts.{name} must end in .jsonl or .parquet, got {value}")
        for name, what in (("reward", "function"), ("environment", "Class")):
            value = getattr(self, name)
            require(
                value is None or (":" in value and value.rpartition(":")[2].isidentifier()),
                f"prompts.{name} is written module:{what} or path/file.py:{what}, got {value}",
            )
        require(
            self.reward is None or self.environment is None,
            "prompts.reward judges answers of one turn, and prompts.environment those of several: give one",
        )

    @property
    def judge(self) -> str | None:
        return self.reward or self.environment


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """How answers are sampled, for every task but text."""

    max_tokens: int | None = None  # None: what the longest right answer needs; task=prompts: 256
    temperature: float = 1.0
    # Texts that end an answer, beside the tokenizer's own end. Each must be a single token.
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least(1, self, "max_tokens", part="answer.")
        require(self.temperature > 0, f"answer.temperature must be > 0, got {self.temperature}")


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    stdlib: str | None = None  # folder of the Python standard library's source; None: this Python's
    adapt_on: tuple[str, ...] = ("pydoc_data",)  # its folders held out from the warm start
    eval_share: float = 0.2  # the last part of the held-out text, never trained on
    eval_sequences: int = 512  # fixed windows spread over it
    batch: int = 4  # sequences per trainer and step

    def __post_init__(self) -> None:
        at_least(1, self, "batch", part="text.")
