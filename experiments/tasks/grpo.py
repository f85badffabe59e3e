"""GRPO: the loss of answers whose rewards are compared within their group.

    A_i = (r_i − mean of the group) / (standard deviation of the group + ε)
    ρ_t = π(token t) / π_old(token t)
    loss = −(1 / tokens) · Σ_t min(ρ_t · A, clip(ρ_t, 1 − low, 1 + high) · A)

The sum runs over the tokens of all answers of the step, so that each token weighs the same however long its
answer is; the clip reaches further up than down (0.28 and 0.2), so that rare tokens can grow.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6


def advantages(rewards: Tensor) -> Tensor:
    """[groups, answers] -> the same shape. A group whose answers are all alike teaches nothing: zeros."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    # A mean of equal numbers is rounded, too: what is left then is no advantage.
    alike = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return (centred / (rewards.std(dim=1, keepdim=True, correction=0) + EPSILON)).masked_fill(alike, 0.0)


def token_losses(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """−min(ρ·A, clip(ρ)·A) of every token; the shapes broadcast."""
    ratio = torch.exp(logp - old_logp)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantage, clipped * advantage)
