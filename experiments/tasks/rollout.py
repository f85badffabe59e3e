"""Answers sampled from a model, with the probabilities they were sampled with.

No padding comes before a prompt: prompts of one length in tokens are sampled together, and what follows an
answer's end is never looked at. So no model needs an attention mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Cohort:
    """Answers that began together, to prompts of one length; each step gives each of them a token."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[list[int]],
        *,
        group: int,
        decoding: Decoding,
        uniforms: Tensor,
        device: torch.device,
        before_token: Callable[[], Weights] | None = None,
    ) -> None:
        """As `sample`."""
        self._model, self._group, self._decoding = model, group, decoding
        self._before_token = before_token
        self._version = before_token().version if before_token else 0
        heads = torch.tensor(prompts, device=device)
        logits, past = model.extend(heads, None)
        rows = torch.arange(len(prompts), device=device).repeat_interleave(group)
        self._logits, self._past = logits[rows], model.select(past, rows)
        self._heads, self._uniforms = heads[rows], uniforms.to(device)
        # All that follows is of all answers, [prompts · group] first; `_rows` are those that are computed.
        self._rows = torch.arange(len(rows), device=device)
        self._tokens = torch.zeros(len(rows), decoding.longest, dtype=torch.int64, device=device)
        self._logp = torch.zeros(len(rows), decoding.longest, device=device)
        self._lengths = torch.zeros(len(rows), dtype=torch.int64, device=device)  # 0: it goes on
        self._versions: list[int] = []  # by token

    @property
    def is_done(self) -> bool:
        return bool(self._lengths.all())

    @property
    def going_on(self) -> int:
        """Answers that have not ended."""
        return int((self._lengths == 0).sum())

    @torch.no_grad()
    def step(self) -> list[int]:
        """-> the prompts all answers to which have now ended."""
        place, rows, before = len(self._versions), self._rows, self._lengths.view(-1, self._group).all(dim=1)
        token, logp = self._next(place)
        self._tokens[rows, place], self._logp[rows, place] = token, logp
        self._versions.append(self._version)
        ends = torch.isin(token, torch.tensor(self._decoding.stops, device=token.device))
        ends |= place + 1 == self._decoding.longest
        ended = rows[ends & (self._lengths[rows] == 0)]
        self._lengths[ended] = place + 1
        if not self.is_done:
            self._extend(token)
        now = self._lengths.view(-1, self._group).all(dim=1)
        return (now & ~before).nonzero().flatten().tolist()

    def answers_to(self, prompt: int) -> Rollout:
        places = range(prompt * self._group, (prompt + 1) * self._group)
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
            self._past, token, self._rows = (
                self._model.select(self._past, kept),
                token[kept],
                self._rows[kept],
            )
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
    found: dict[int, Rollout] = {}  # by prompt
    for length in sorted({len(prompt) for prompt in prompts}):
        chosen = [k for k, prompt in enumerate(prompts) if len(prompt) == length]
        places = [k * group + i for k in chosen for i in range(group)]
        cohort = Cohort(
            model,
            [prompts[k] for k in chosen],
            group=group,
            decoding=decoding,
            uniforms=uniforms[places],
            device=device,
            before_token=before_token,
        )
        while not cohort.is_done:
            for k in cohort.step():
                found[chosen[k]] = cohort.answers_to(k)
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
