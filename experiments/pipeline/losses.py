"""Losses of answers that other weights gave than those that now learn from them.

ρ_t = π(token t) / μ(token t), where μ gave the token

aipo   −(1 / tokens) · Σ_t min(ρ_t, limit) · A · log π(token t), the first factor without a gradient:
       tokens that have become likelier count for more, up to a limit, and unlikely ones for less
grpo   the two-sided clip of `experiments.tasks.grpo`
none   −(1 / tokens) · Σ_t A · log π(token t), as if the weights had not changed
"""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.tasks.grpo import token_losses

CORRECTIONS = ("aipo", "grpo", "none")


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
    """Of every token; the shapes broadcast."""
    if correction == "grpo":
        return token_losses(logp, old_logp, advantage, clip_low=clip_low, clip_high=clip_high)
    if correction == "none":
        return -advantage * logp
    weight = torch.exp(logp.detach() - old_logp).clamp(max=ratio_limit)
    return -weight * advantage * logp
