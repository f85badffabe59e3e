"""Learning text byte by byte: a supervised task, for what RL does not show, such as pre-training."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn

from experiments.models.registry import language_model
from experiments.settings.config import RunConfig
from experiments.tasks.corpus import batch, evaluation_batches, load_corpus
from experiments.tasks.task import Seat, Task


class Text(Task):
    metric = "loss"
    higher_is_better: ClassVar[bool] = False

    def __init__(self, config: RunConfig, seat: Seat) -> None:
        self._config, self._seat = config, seat
        self._corpus = load_corpus(config.text)
        self._context = config.transformer.context

    def model(self) -> nn.Module:
        return language_model(self._config)

    def recipe(self) -> list[Any]:
        return ["text", hashlib.sha256(self._corpus.warm.numpy().tobytes()).hexdigest()]

    def warm_start_loss(self, model: nn.Module, step: int, *, size: int) -> Tensor:
        sequences = batch(
            self._corpus.warm, size=size, context=self._context, seed=0, rank=0, ranks=1, step=step
        )
        return self._cross_entropy(model, sequences)

    def loss(self, module: nn.Module, step: int) -> Tensor:
        sequences = batch(
            self._corpus.adapt,
            size=self._config.text.batch,
            context=self._context,
            seed=self._config.seed,
            rank=self._seat.rank,
            ranks=self._seat.ranks,
            step=step,
        )
        return self._cross_entropy(module, sequences)

    @torch.no_grad()
    def scores(self, model: nn.Module) -> dict[str, Tensor]:
        """Nats per byte."""
        total = torch.zeros(2, dtype=torch.float64, device=self._seat.device)
        windows = evaluation_batches(
            self._corpus.held_out, sequences=self._config.text.eval_sequences, context=self._context
        )
        for sequences in windows[self._seat.rank :: self._seat.ranks]:
            total[0] += self._cross_entropy(model, sequences).double() * len(sequences)
            total[1] += len(sequences)
        return {"loss": total}

    def _cross_entropy(self, module: nn.Module, sequences: Tensor) -> Tensor:
        """The mean over [sequences, context + 1] bytes of what each costs after those before it."""
        tokens = sequences.long().to(self._seat.device)
        return F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
