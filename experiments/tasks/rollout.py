"""Answers sampled from a model, with the probabilities they were sampled with.

No padding comes before a prompt: prompts of one length in tokens are sampled together, and what follows an
answer's end is never looked at. So no model needs an attention mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    def repeat(self, past: Any, times: int) -> Any: ...
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
    cache_is_stale: bool  # what they made of the tokens so far is to be made anew


@torch.no_grad()
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
    count = len(prompts) * group
    tokens: list[Tensor] = [torch.empty(0)] * count
    logp: list[Tensor] = [torch.empty(0)] * count
    versions: list[Tensor] = [torch.empty(0)] * count if before_token else []
    texts = [""] * count
    for length in sorted({len(prompt) for prompt in prompts}):
        chosen = [k for k, prompt in enumerate(prompts) if len(prompt) == length]
        places = [k * group + i for k in chosen for i in range(group)]
        heads = torch.tensor([prompts[k] for k in chosen], device=device)
        answers, found, given = _sample_alike(
            model, heads, group, decoding, uniforms[places].to(device), before_token
        )
        heads, answers, found = heads.repeat_interleave(group, dim=0).cpu(), answers.cpu(), found.cpu()
        is_end = _among(answers, decoding.stops).int()
        lengths = ((is_end.cumsum(dim=1) - is_end) == 0).sum(dim=1).tolist()
        for row, (place, n) in enumerate(zip(places, lengths, strict=True)):
            answer = answers[row, :n]
            tokens[place] = torch.cat([heads[row], answer])
            logp[place] = found[row, :n]
            if before_token:
                versions[place] = torch.tensor(given[:n])
            texts[place] = text_of(model, answer.tolist(), decoding)
    return Rollout(texts, tokens, logp, versions)


def text_of(words: Words, answer: list[int], decoding: Decoding) -> str:
    """Without the token that ends it."""
    return words.decode(answer if is_cut_off(answer, decoding) else answer[:-1])


def is_cut_off(answer: list[int], decoding: Decoding) -> bool:
    return not answer or answer[-1] not in decoding.stops


def _among(tokens: Tensor, stops: tuple[int, ...]) -> Tensor:
    return torch.isin(tokens, torch.tensor(stops, device=tokens.device))


def _sample_alike(
    model: LanguageModel,
    heads: Tensor,
    group: int,
    decoding: Decoding,
    uniforms: Tensor,
    before_token: Callable[[], Weights] | None,
) -> tuple[Tensor, Tensor, list[int]]:
    """Answers and their tokens' log-probabilities, [prompts · group, longest of them] both, also behind the
    ends; and the weights' version at each place."""
    longest, temperature = decoding.longest, decoding.temperature
    versions = [before_token().version] if before_token else []
    logits, past = model.extend(heads, None)
    logits, past = logits.repeat_interleave(group, dim=0), model.repeat(past, group)
    answers, logps = [], []
    ended = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    for place in range(longest):
        logp = (logits / temperature if temperature else logits).log_softmax(dim=-1)
        if temperature:
            # The token in whose share of [0, 1) the uniform lies; rounding's rest goes to the last one.
            token = (logp.double().exp().cumsum(dim=-1) <= uniforms[:, place, None]).sum(dim=-1)
            token = token.clamp(max=logp.shape[-1] - 1)
        else:
            token = logp.argmax(dim=-1)
        answers.append(token)
        logps.append(logp.gather(1, token[:, None])[:, 0])
        ended |= _among(token, decoding.stops)
        if place + 1 == longest or bool(ended.all()):
            break
        weights = before_token() if before_token else None
        if weights is not None:
            if weights.version != versions[-1]:
                past = model.renewed(past)
            versions.append(weights.version)
        if weights is not None and weights.cache_is_stale:
            so_far = torch.stack(answers, dim=1)
            logits, past = model.extend(torch.cat([heads.repeat_interleave(group, dim=0), so_far], 1), None)
        else:
            logits, past = model.extend(token[:, None], past)
    return torch.stack(answers, dim=1), torch.stack(logps, dim=1), versions


def pad(rows: Sequence[Tensor], length: int | None = None) -> Tensor:
    """[rows, length], zeros behind the shorter ones."""
    length = max(len(row) for row in rows) if length is None else length
    out = rows[0].new_zeros(len(rows), length)
    for k, row in enumerate(rows):
        out[k, : len(row)] = row
    return out
