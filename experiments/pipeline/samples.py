"""What goes from workers to trainers, through the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.tasks.grpo import advantages
from experiments.tasks.rollout import Rollout


@dataclass(frozen=True)
class Group:
    """The answers to one prompt, and how each was judged: arrays, which travel at less cost than tensors."""

    head: np.ndarray  # the prompt's tokens
    lengths: np.ndarray  # of the answers, which follow each other in the three below
    answers: np.ndarray
    logp: np.ndarray  # of their tokens, by the weights that gave them
    versions: np.ndarray  # of those weights
    advantage: np.ndarray  # [answers]

    @property
    def tokens(self) -> int:
        return len(self.answers)

    def rows(self) -> list[Tensor]:
        """Prompt and answer, of each."""
        head = torch.from_numpy(self.head)
        return [torch.cat([head, answer]) for answer in self.split(self.answers)]

    def split(self, values: np.ndarray) -> list[Tensor]:
        """By answer."""
        return list(torch.from_numpy(values).split(self.lengths.tolist()))


def groups_of(rollout: Rollout, rewards: Tensor, group: int) -> list[Group]:
    found = []
    for k, advantage in enumerate(advantages(rewards.view(-1, group))):
        own = slice(k * group, (k + 1) * group)
        logp, rows = rollout.logp[own], rollout.tokens[own]
        head = len(rows[0]) - len(logp[0])
        found.append(
            Group(
                head=rows[0][:head].numpy(),
                lengths=np.array([len(one) for one in logp]),
                answers=_joined([row[head:] for row in rows]),
                logp=_joined(logp),
                versions=_joined(rollout.versions[own]),
                advantage=advantage.numpy(),
            )
        )
    return found


def _joined(parts: Sequence[Tensor]) -> np.ndarray:
    return torch.cat(list(parts)).numpy()


@dataclass(frozen=True)
class Lease:
    """Prompts that a worker is to answer. A number for each decides what is asked and by what chance."""

    number: int
    tickets: list[int]
    version: int  # answers by older weights would be too old when they are used


@dataclass(frozen=True)
class Parcel:
    """A group as it travels, and what the controller, who does not open it, knows of it."""

    ticket: int
    oldest: int  # version of the weights that gave its oldest token
    tokens: int
    reward: float
    group: bytes  # pickled
