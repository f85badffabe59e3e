"""Answers sampled from a model, with the probabilities they were sampled with.

No padding comes before a prompt: prompts of one length in tokens are sampled together, and what follows an
answer's end is never looked at. So no model needs an attention mask.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from experiments.errors import ExperimentError
from experiments.settings.tasks import AnswerConfig


class Words(Protocol):
    """Text as tokens."""

    @property
    def end(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...


class LanguageModel(Words, Protocol):
    """What sampling asks of a model: the built-in transformer, or a Hugging Face one."""

    context: int  # tokens of the longest sequence

    def extend(self, tokens: Tensor, past: Any | None) -> tuple[Tensor, Any]: ...
    def select(self, past: Any, rows: Tensor) -> Any: ...  # of the batch, each as often as it is named
    def renewed(self, past: Any) -> Any: ...  # to go on with the weights as they are now
    def __call__(self, tokens: Tensor) -> Tensor: ...


class PublishedModel(LanguageModel, Protocol):
    """One whose weights go to others, under the names that its checkpoint gives them."""

    @property
    def checkpoint(self) -> nn.Module: ...


@dataclass(frozen=True)
class Rollout:
    """Answers to some prompts, `group` to each, in the prompts' order."""

    texts: list[str]  # [prompts · group]
    tokens: list[Tensor]  # prompt and answer, the end included
    logp: list[Tensor]  # of the answer's tokens
    versions: list[Tensor] = field(default_factory=list)  # of the weights, by token, if they change

    @staticmethod
    def joined(parts: Sequence[Rollout]) -> Rollout:
        names = ("texts", "tokens", "logp", "versions")
        return Rollout(*(list(chain.from_iterable(getattr(one, name) for one in parts)) for name in names))


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How an answer is made of a model's probabilities."""

    longest: int  # tokens
    stops: tuple[int, ...]  # tokens that end it
    temperature: float = 1.0  # 0: always the likeliest token

    @staticmethod
    def of(words: Words, config: AnswerConfig, longest: int) -> Decoding:
        stops = [words.end]
        for text in config.stop:
            tokens = words.encode(text)
            if len(tokens) != 1:
                raise ExperimentError(
                    f"answer.stop: {text!r} is {len(tokens)} tokens of this model, and must be a single one"
                )
            stops += tokens
        return Decoding(longest=longest, stops=tuple(stops), temperature=config.temperature)


@dataclass(frozen=True)
class Weights:
    """What a model's weights are by the next token, where they change while it samples."""

    version: int
    recompute_cache: bool  # when they have changed: keys and values of the tokens so far, too


@dataclass(frozen=True, kw_only=True)
class Question:
    """
    group: how many answers are wanted.
    uniforms: [group, longest] in [0, 1), the chance behind every token of each answer.
    """

    key: Hashable
    prompt: list[int]
    group: int
    decoding: Decoding
    uniforms: Tensor

    @property
    def kind(self) -> tuple[int, int, Decoding]:
        """Those of one kind can be answered in one cohort."""
        return len(self.prompt), self.group, self.decoding


class Cohort:
    """Answers to questions of one kind, which began together; each step gives each of them a token.

    questions: that they answer. going_on: answers that have not ended.
    """

    def __init__(
        self,
        model: LanguageModel,
        questions: Sequence[Question],
        device: torch.device,
        before_token: Callable[[], Weights] | None,
    ) -> None:
        """
        Args:
            before_token: called before the model computes the next token; may replace its weights.
        """
        self._model, self.questions, self._before_token = model, questions, before_token
        self._group, self._decoding = questions[0].group, questions[0].decoding
        self._stops = torch.tensor(self._decoding.stops, device=device)
        self._version = before_token().version if before_token else 0
        heads = torch.tensor([question.prompt for question in questions], device=device)
        logits, past = model.extend(heads, None)
        rows = torch.arange(len(questions), device=device).repeat_interleave(self._group)
        self._logits, self._past = logits[rows], model.select(past, rows)
        self._heads = heads[rows]
        self._uniforms = torch.cat([question.uniforms for question in questions]).to(device)
        # All that follows is of all answers, [questions · group] first; `_rows` are those that are computed.
        self._rows = torch.arange(len(rows), device=device)
        self._tokens = torch.zeros(len(rows), self._decoding.longest, dtype=torch.int64, device=device)
        self._logp = torch.zeros(len(rows), self._decoding.longest, device=device)
        self._lengths = torch.zeros(len(rows), dtype=torch.int64, device=device)  # 0: it goes on
        self._versions: list[int] = []  # by token
        self.going_on = len(rows)

    @torch.no_grad()
    def step(self) -> list[tuple[Hashable, Rollout]]:
        """-> what all answers to have now ended, by its key."""
        place, rows, before = len(self._versions), self._rows, self._lengths.view(-1, self._group).all(dim=1)
        token, logp = self._next(place)
        self._tokens[rows, place], self._logp[rows, place] = token, logp
        self._versions.append(self._version)
        ends = torch.isin(token, self._stops)
        ends |= place + 1 == self._decoding.longest
        ended = rows[ends & (self._lengths[rows] == 0)]
        self._lengths[ended] = place + 1
        self.going_on -= len(ended)
        if self.going_on:
            self._extend(token)
        now = self._lengths.view(-1, self._group).all(dim=1)
        answered = (now & ~before).nonzero().flatten().tolist()
        return [(self.questions[k].key, self._answers_to(k)) for k in answered]

    def _answers_to(self, question: int) -> Rollout:
        places = range(question * self._group, (question + 1) * self._group)
        lengths = [int(self._lengths[k]) for k in places]
        answers = [self._tokens[k, :n].cpu() for k, n in zip(places, lengths, strict=True)]
        heads = self._heads.cpu()
        return Rollout(
            texts=[text_of(self._model, answer.tolist(), self._decoding) for answer in answers],
            tokens=[torch.cat([heads[k], answer]) for k, answer in zip(places, answers, strict=True)],
            logp=[self._logp[k, :n].cpu() for k, n in zip(places, lengths, strict=True)],
            versions=[torch.tensor(self._versions[:n]) for n in lengths] if self._before_token else [],
        )

    def _next(self, place: int) -> tuple[Tensor, Tensor]:
        """The token behind each row, and its log-probability."""
        temperature = self._decoding.temperature
        logp = (self._logits / temperature if temperature else self._logits).log_softmax(dim=-1)
        if temperature:
            # The token in whose share of [0, 1) the uniform lies; rounding's rest goes to the last one.
            uniforms = self._uniforms[self._rows, place, None]
            token = (logp.double().exp().cumsum(dim=-1) <= uniforms).sum(dim=-1)
            token = token.clamp(max=logp.shape[-1] - 1)
        else:
            token = logp.argmax(dim=-1)
        return token, logp.gather(1, token[:, None])[:, 0]

    def _extend(self, token: Tensor) -> None:
        """Compute the logits behind `token`, by the weights as they are then."""
        goes_on = self._lengths[self._rows] == 0
        if 2 * int(goes_on.sum()) <= len(goes_on):  # until then, those that have ended are computed, too
            kept = goes_on.nonzero().flatten()
            self._past = self._model.select(self._past, kept)
            token, self._rows = token[kept], self._rows[kept]
        weights = self._before_token() if self._before_token else None
        recompute = False
        if weights is not None and weights.version != self._version:
            self._version, recompute = weights.version, weights.recompute_cache
            self._past = self._model.renewed(self._past)
        if recompute:
            so_far = torch.cat([self._heads, self._tokens[:, : len(self._versions)]], dim=1)
            self._logits, self._past = self._model.extend(so_far[self._rows], None)
        else:
            self._logits, self._past = self._model.extend(token[:, None], self._past)


def by_kind(questions: Sequence[Question]) -> list[list[Question]]:
    """Those that can be answered in one cohort, shorter prompts first."""
    kinds = sorted(dict.fromkeys(one.kind for one in questions), key=lambda kind: kind[0])
    return [[one for one in questions if one.kind == kind] for kind in kinds]


def sample(
    model: LanguageModel,
    prompts: Sequence[list[int]],
    *,
    group: int,
    decoding: Decoding,
    uniforms: Tensor,
    device: torch.device,
    before_token: Callable[[], Weights] | None = None,
) -> Rollout:
    """`group` answers to each prompt.

    Args:
        before_token: called before the model computes the next token; may replace its weights.
        uniforms: [prompts · group, longest] in [0, 1), the chance behind every token. Methods that are given
            the same ones answer alike for as long as their models are alike.
    """
    questions = [
        Question(key=k, prompt=prompt, group=group, decoding=decoding, uniforms=chance)
        for k, (prompt, chance) in enumerate(zip(prompts, uniforms.split(group), strict=True))
    ]
    found: dict[Hashable, Rollout] = {}
    for alike in by_kind(questions):
        cohort = Cohort(model, alike, device, before_token)
        while cohort.going_on:
            found |= dict(cohort.step())
    return Rollout.joined([found[k] for k in range(len(prompts))])


def text_of(words: Words, answer: list[int], decoding: Decoding) -> str:
    """Without the token that ends it."""
    return words.decode(answer if is_cut_off(answer, decoding) else answer[:-1])


def is_cut_off(answer: list[int], decoding: Decoding) -> bool:
    return not answer or answer[-1] not in decoding.stops


def pad(rows: Sequence[Tensor], length: int | None = None) -> Tensor:
    """[rows, length], zeros behind the shorter ones."""
    length = max(len(row) for row in rows) if length is None else length
    out = rows[0].new_zeros(len(rows), length)
    for k, row in enumerate(rows):
        out[k, : len(row)] = row
    return out
