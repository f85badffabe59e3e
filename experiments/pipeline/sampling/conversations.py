"""Answers of several turns: an environment replies to what the model says, until it has heard enough.

A conversation is one sequence of tokens. Those of the environment's replies were given, not sampled: their
version is GIVEN, and nothing is learned from them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.pipeline.samples import GIVEN
from experiments.settings.tasks import PromptsConfig
from experiments.tasks.problems import Problem
from experiments.tasks.prompts import Chat, Reply, between_turns
from experiments.tasks.rollout import Question, Rollout, Words, is_cut_off


class Place(NamedTuple):
    """Of one answer: of the question with this key, this one."""

    key: Hashable
    which: int


@dataclass
class Conversation:
    """The model's turns so far, what came between them, and the rewards that they had in sum."""

    problem: Problem
    question: Question  # of one answer: the next turn
    tokens: list[int]  # all so far: the prompt's first
    turns: list[str] = field(default_factory=list)
    reward: float = 0.0
    logp: list[Tensor] = field(default_factory=list)  # of all tokens behind the prompt
    versions: list[Tensor] = field(default_factory=list)

    def hear(self, rollout: Rollout) -> None:
        """The model's turn. It has been given all tokens so far, so it returns them."""
        (tokens,), (text,) = rollout.tokens, rollout.texts
        self.tokens = tokens.tolist()
        self.turns.append(text)
        self.logp += rollout.logp
        self.versions += rollout.versions


class Conversations:
    """
    Args:
        room: tokens of the longest sequence.
        uniforms: of a question's key, an answer and a turn: the chance behind that turn's tokens.
    """

    def __init__(
        self, config: PromptsConfig, words: Words, room: int, uniforms: Callable[[Place, int], Tensor]
    ) -> None:
        self._config, self._words, self._room, self._uniforms = config, words, room, uniforms
        self._going_on: dict[Place, Conversation] = {}
        self._over: dict[Hashable, dict[int, Conversation]] = {}

    def __len__(self) -> int:
        """Answers that are not over."""
        return len(self._going_on)

    def begin(self, question: Question, problem: Problem) -> list[Question]:
        """-> a question for each answer's first turn."""
        self._over[question.key] = {}
        return [self._first(Place(question.key, which), question, problem) for which in range(question.group)]

    def _first(self, place: Place, question: Question, problem: Problem) -> Question:
        first = replace(question, key=place, group=1, uniforms=self._uniforms(place, 0))
        self._going_on[place] = Conversation(problem, first, question.prompt)
        return first

    def hear(self, place: Place, rollout: Rollout) -> tuple[Problem, list[str]]:
        """-> what the environment is to judge."""
        conversation = self._going_on[place]
        conversation.hear(rollout)
        return conversation.problem, list(conversation.turns)

    def reply(self, place: Place, reply: Reply) -> Question | tuple[Rollout, list[float]] | None:
        """-> the next turn; or, if that was the last answer to a question, all of them and their rewards."""
        one = self._going_on[place]
        one.reward += reply.reward
        if reply.observation is not None and len(one.turns) < self._config.turns:
            question = self._next(place, one, reply)
            if len(question.prompt) + question.decoding.longest <= self._room:
                given = len(question.prompt) - len(one.tokens)
                one.logp.append(torch.zeros(given))
                one.versions.append(torch.full((given,), GIVEN))
                one.question = question
                return question
        del self._going_on[place]
        over = self._over[place.key]
        over[place.which] = one
        if any(other.key == place.key for other in self._going_on):
            return None
        del self._over[place.key]
        answers = [over[which] for which in sorted(over)]
        return _joined(answers), [answer.reward for answer in answers]

    def _next(self, place: Place, one: Conversation, reply: Reply) -> Question:
        chat: Chat = self._words  # type: ignore[assignment]  # prompts are for models that have one
        text = between_turns(one.problem.row[self._config.column], reply.observation, chat)
        if not is_cut_off(one.tokens[-1:], one.question.decoding):
            text = text.removeprefix(
                self._words.decode(one.tokens[-1:])
            )  # the model has ended its turn itself
        return replace(
            one.question,
            prompt=[*one.tokens, *self._words.encode(text)],
            uniforms=self._uniforms(place, len(one.turns)),
        )


def _joined(answers: list[Conversation]) -> Rollout:
    """As those to one prompt."""
    return Rollout(
        texts=[answer.turns[-1] for answer in answers],
        tokens=[torch.tensor(answer.tokens) for answer in answers],
        logp=[torch.cat(answer.logp) for answer in answers],
        versions=[torch.cat(answer.versions) for answer in answers],
    )
