"""What is learned: the seam between the training loop and a task.

A task brings its model's warm start, the loss of a trainer's step, and the scores of the weights that all
sites hold after a round. Everything that chance decides is a pure function of (seed, rank, step), so that
every method of a comparison meets the same prompts or the same text in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Seat:
    """Who this process is among the trainers."""

    rank: int
    ranks: int
    device: torch.device


class Task(ABC):
    metric: str  # the name of the score that decides
    higher_is_better: ClassVar[bool]

    @abstractmethod
    def model(self) -> nn.Module:
        """A model that has learned nothing yet."""

    @abstractmethod
    def warm_start_loss(self, model: nn.Module, step: int, *, size: int) -> Tensor:
        """The loss of the warm start's step on a batch of `size`."""

    @abstractmethod
    def recipe(self) -> list[Any]:
        """Whatever of the task decides the warm start's weights, as plain values."""

    def check(self, model: nn.Module) -> None:
        """Called once, before a run.

        Raises:
            ExperimentError: the task and the model do not go together.
        """
        return

    def begin_round(self, model: nn.Module, round: int) -> float | None:
        """Prepare the next `sync_every` steps, from weights that all sites hold; returns the mean reward."""
        return None

    @abstractmethod
    def loss(self, module: nn.Module, step: int) -> Tensor:
        """Of this trainer in the step (1, 2, …). `module` is the model, or DDP around it."""

    @abstractmethod
    def scores(self, model: nn.Module) -> dict[str, Tensor]:
        """By name the sum over this trainer's share of the held-out set and its size, [2] float64."""
