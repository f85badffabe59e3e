"""Losses for answers that were sampled from older weights than those that learn from them.

ρ_t = π(token t) / μ(token t), where μ gave the token

aipo   −(1 / tokens) · Σ_t min(ρ_t, limit) · A · log π(token t), the first factor without a gradient:
       tokens that have become more likely count for more, up to a limit, and the others for less
grpo   the two-sided clip of `experiments.tasks.grpo`
none   −(1 / tokens) · Σ_t A · log π(token t), as if the weights had not changed

With `kl` above 0, kl · (1 / tokens) · Σ_t (r − log r − 1) is added, r = π_ref(token t) / π(token t): the
distance from the model that the run began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.samples import GIVEN, Group
from experiments.tasks.grpo import token_losses
from experiments.tasks.rollout import pad
from experiments.tasks.verified import answer_log_probabilities
from experiments.training.gathering import most


def losses_of(
    correction: str,
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    *,
    ratio_limit: float,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """The loss of each token; the shapes broadcast."""
    if correction == "grpo":
        return token_losses(logp, old_logp, advantage, clip_low=clip_low, clip_high=clip_high)
    if correction == "none":
        return -advantage * logp
    weight = torch.exp(logp.detach() - old_logp).clamp(max=ratio_limit)
    return -weight * advantage * logp


@dataclass(frozen=True)
class _Answer:
    row: Tensor  # its prompt, and then its tokens
    head: int  # the prompt's length
    logp: Tensor  # of its tokens, when they were sampled
    sampled: Tensor  # which of them were, and not given by an environment
    advantage: float


def learn(
    module: nn.Module, groups: Sequence[Group], config: PipelineConfig, reference: nn.Module | None = None
) -> None:
    """Add the gradient of a step's loss, `config.micro_batch` answers at a time.

    Args:
        module: the model, or DDP around it.
        reference: the model that `config.kl` holds it to.
    """
    answers = [
        _Answer(row, len(group.head), logp, versions != GIVEN, float(advantage))
        for group in groups
        for row, logp, versions, advantage in zip(
            group.rows(),
            group.split(group.logp),
            group.split(group.versions),
            group.advantage,
            strict=True,
        )
    ]
    if reference is None:  # those without an advantage have no gradient
        # One stays in any case: each of DDP's ranks must run the model.
        answers = [one for one in answers if one.advantage] or answers[:1]
    tokens = sum(group.tokens for group in groups)
    size = config.micro_batch or len(answers)
    parts = [answers[first : first + size] for first in range(0, len(answers), size)]
    idle = most(len(parts)) - len(parts) if config.shard else 0
    for k, part in enumerate(parts, 1):
        # Gradients of DDP's ranks are averaged once.
        is_ddp = isinstance(module, DistributedDataParallel)
        with module.no_sync() if is_ddp and k < len(parts) else nullcontext():
            (_sum_of_losses(module, part, config, reference) / tokens).backward()
    for _ in range(idle):  # a shard's weights are gathered by all ranks together
        (0.0 * _sum_of_losses(module, answers[:1], config, reference)).backward()


def _sum_of_losses(
    module: nn.Module, answers: Sequence[_Answer], config: PipelineConfig, reference: nn.Module | None
) -> Tensor:
    arguments: Any = ([one.row for one in answers], [one.head for one in answers], torch.device("cpu"))
    temperature = config.answer.temperature
    logp, counts, _ = answer_log_probabilities(module, *arguments, temperature=temperature)
    losses = losses_of(
        config.correction,
        logp,
        pad([one.logp for one in answers]),
        torch.tensor([one.advantage for one in answers])[:, None],
        ratio_limit=config.ratio_limit,
        clip_low=config.grpo.clip_low,
        clip_high=config.grpo.clip_high,
    )
    if reference is not None:
        with torch.no_grad():
            wanted, _, _ = answer_log_probabilities(reference, *arguments, temperature=temperature)
        losses = losses + config.kl * (torch.exp(wanted - logp) - (wanted - logp) - 1)
    return losses[counts & pad([one.sampled for one in answers])].sum()
