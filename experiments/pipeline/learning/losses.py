"""Losses for answers that were sampled from older weights than those that learn from them.

ρ_t = π(token t) / μ(token t), where μ gave the token

aipo   −(1 / tokens) · Σ_t min(ρ_t, limit) · A · log π(token t), the first factor without a gradient:
       tokens that have become more likely count for more, up to a limit, and the others for less
grpo   the two-sided clip of `experiments.tasks.grpo`
none   −(1 / tokens) · Σ_t A · log π(token t), as if the weights had not changed
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.samples import Group
from experiments.tasks.grpo import token_losses
from experiments.tasks.rollout import pad
from experiments.tasks.verified import answer_log_probabilities


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


def loss_of(module: nn.Module, groups: Sequence[Group], config: PipelineConfig) -> Tensor:
    """The loss of a step's answers under the weights of `module`."""
    rows, heads, old, advantage = [], [], [], []
    for group in groups:
        for row, logp, gain in zip(group.rows(), group.split(group.logp), group.advantage, strict=True):
            if gain or not rows:  # keep one in any case: each of DDP's ranks must run the model
                rows.append(row)
                heads.append(len(group.head))
                old.append(logp)
                advantage.append(float(gain))
    logp, counts, _ = answer_log_probabilities(
        module, rows, heads, torch.device("cpu"), temperature=config.answer.temperature
    )
    losses = losses_of(
        config.correction,
        logp,
        pad(old),
        torch.tensor(advantage)[:, None],
        ratio_limit=config.ratio_limit,
        clip_low=config.grpo.clip_low,
        clip_high=config.grpo.clip_high,
    )
    return losses[counts].sum() / sum(group.tokens for group in groups)
