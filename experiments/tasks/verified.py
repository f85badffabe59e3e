"""Post-training by GRPO on problems: a verifier judges answers, and nothing else is known.

At the start of every round each trainer samples answers to its prompts of the next `sync_every` steps from
the weights that all sites hold, then learns from them step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from experiments.models.registry import language_model
from experiments.settings.config import ArithmeticConfig, GymConfig, RunConfig
from experiments.tasks.grpo import advantages, token_losses
from experiments.tasks.problems import Problem, Problems, arithmetic
from experiments.tasks.rollout import LanguageModel, Rollout, Words, pad, sample
from experiments.tasks.task import Seat, Task

_ROLLOUTS, _WARM_START = 0, 1  # kinds of chance: a seed of its own for each


class Verified(Task):
    metric: ClassVar[str] = "pass@1"
    higher_is_better: ClassVar[bool] = True

    def __init__(self, config: RunConfig, seat: Seat) -> None:
        self._config, self._seat = config, seat
        self._grpo: ArithmeticConfig | GymConfig = getattr(config, config.task)
        self._problems = problems_of(config)
        self._own = self._problems.train
        if self._grpo.own_problems:
            in_order = sorted(self._own, key=lambda problem: problem.prompt)
            share = len(in_order) // seat.ranks
            self._own = in_order[seat.rank * share :][:share]
        self._answers = {problem.answer for problem in self._problems.train}
        self._batches: list[_Batch] = []
        self._first_step = 0  # of the round
        self._known: dict[str, list[int]] = {}  # texts as tokens

    def model(self) -> nn.Module:
        return language_model(self._config)

    def recipe(self) -> list[Any]:
        return [self._config.task, *self._grpo.recipe()]

    def warm_start_loss(self, model: nn.Module, step: int, *, size: int) -> Tensor:
        """Supervised, on text with mistakes in it."""
        chance = np.random.default_rng([_WARM_START, step])
        chosen = [self._problems.train[k] for k in chance.integers(len(self._problems.train), size=size)]
        slips = chance.random(size) < self._grpo.slips
        answers = [p.slip if slip else p.answer for p, slip in zip(chosen, slips, strict=True)]
        logp, counts, _ = self._of_answers(model, chosen, answers)
        return -logp[counts].mean()

    def begin_round(self, model: nn.Module, round: int) -> float:
        config, lm = self._grpo, cast(LanguageModel, model)
        every, seat = self._config.sync_every, self._seat
        chance = np.random.default_rng([_ROLLOUTS, self._config.seed, seat.rank, round])
        count = every * config.prompts
        chosen = self.pick(chance, count)
        answers = count * config.group
        longest = self.longest(lm)
        rollout = sample(
            lm,
            self.prompts(lm, chosen),
            group=config.group,
            longest=longest,
            uniforms=torch.from_numpy(chance.random((answers, longest))),
            device=seat.device,
        )
        rewards = self.rewards(chosen, rollout.texts)
        advantage = advantages(rewards.view(count, config.group)).flatten()
        size = config.prompts * config.group
        self._batches = [
            _Batch.of(rollout, advantage, range(first, first + size)) for first in range(0, answers, size)
        ]
        self._first_step = round * every + 1
        return float(rewards.mean())

    def pick(self, chance: np.random.Generator, count: int) -> list[Problem]:
        """Problems to train on."""
        return [self._own[k] for k in chance.integers(len(self._own), size=count)]

    def longest(self, words: Words) -> int:
        """Tokens of the longest right answer, its end included: who needs more is wrong."""
        return 1 + max(len(self._tokens(words, answer)) for answer in self._answers)

    def prompts(self, words: Words, chosen: Sequence[Problem]) -> list[list[int]]:
        return [self._tokens(words, problem.prompt) for problem in chosen]

    def rewards(self, chosen: Sequence[Problem], texts: Sequence[str]) -> Tensor:
        """Of a group of answers to each problem."""
        group = self._grpo.group
        judged = [self._problems.reward(chosen[k // group], text) for k, text in enumerate(texts)]
        return torch.tensor([float(reward) for reward in judged])

    def loss(self, module: nn.Module, step: int) -> Tensor:
        batch, config = self._batches[step - self._first_step], self._grpo
        device = self._seat.device
        logp, counts = answer_log_probabilities(module, batch.rows, batch.heads, device)[:2]
        losses = token_losses(
            logp,
            pad(batch.logp).to(device),
            batch.advantage[:, None].to(device),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
        return losses[counts].sum() / batch.tokens

    @torch.no_grad()
    def scores(self, model: nn.Module) -> dict[str, Tensor]:
        """pass@1 of greedy decoding, and of a sample at temperature 1.

        Both are exact, without decoding: greedy decoding gives the right answer if and only if each of its
        tokens is the likeliest one after those before it; a sample does with the product of their
        probabilities.
        """
        mine = self._problems.held_out[self._seat.rank :: self._seat.ranks]
        greedy = torch.zeros((), dtype=torch.float64, device=self._seat.device)
        sampled = greedy.clone()
        for first in range(0, len(mine), 256):
            chosen = mine[first : first + 256]
            logp, counts, likeliest = self._of_answers(model, chosen, [p.answer for p in chosen])
            greedy += (likeliest | ~counts).all(dim=1).sum()
            sampled += (logp * counts).double().sum(dim=1).exp().sum()
        size = torch.tensor(float(len(mine)), dtype=torch.float64, device=self._seat.device)
        return {"pass@1": torch.stack([greedy, size]), "sampled": torch.stack([sampled, size])}

    def _of_answers(
        self, model: nn.Module, problems: Sequence[Problem], answers: Sequence[str]
    ) -> tuple[Tensor, Tensor, Tensor]:
        lm = cast(LanguageModel, model)
        heads = [self._tokens(lm, problem.prompt) for problem in problems]
        tails = [[*self._tokens(lm, answer), lm.end] for answer in answers]
        rows = [torch.tensor(head + tail) for head, tail in zip(heads, tails, strict=True)]
        return answer_log_probabilities(model, rows, [len(head) for head in heads], self._seat.device)

    def _tokens(self, words: Words, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = words.encode(text)
        return self._known[text]


def problems_of(config: RunConfig) -> Problems:
    if config.task == "gym":
        from experiments.tasks.gym import gym_problems  # an optional dependency, slow to import

        return gym_problems(config.gym, longest=None if config.model == "hf" else config.transformer.context)
    return arithmetic(largest=config.arithmetic.largest, held_out=config.arithmetic.held_out)


@dataclass(frozen=True)
class _Batch:
    """A trainer's answers of one step, but for those without a gradient, whose groups are of one mind."""

    rows: list[Tensor]  # prompt and answer
    heads: list[int]  # the prompts' lengths
    logp: list[Tensor]  # of the answers' tokens, when they were sampled
    advantage: Tensor
    tokens: int  # of all answers, also of those left out: what the loss is divided by

    @staticmethod
    def of(rollout: Rollout, advantage: Tensor, chosen: range) -> _Batch:
        # One stays in any case: DDP's ranks must all pass through the model.
        kept = [k for k in chosen if advantage[k]] or [chosen.start]
        return _Batch(
            rows=[rollout.tokens[k] for k in kept],
            heads=[len(rollout.tokens[k]) - len(rollout.logp[k]) for k in kept],
            logp=[rollout.logp[k] for k in kept],
            advantage=advantage[kept],
            tokens=sum(len(rollout.logp[k]) for k in chosen),
        )


def answer_log_probabilities(
    module: nn.Module, rows: Sequence[Tensor], heads: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the tokens behind each row's head, all [rows, longest answer]: log-probabilities, which of them
    count (answers are of different lengths), and whether the token is the likeliest one."""
    tokens = pad(rows).to(device)
    lengths = torch.tensor([len(row) - head for row, head in zip(rows, heads, strict=True)], device=device)
    within = torch.arange(int(lengths.max()), device=device)
    places = torch.tensor(heads, device=device)[:, None] + within
    counts = within < lengths[:, None]
    places = places.clamp(max=tokens.shape[1] - 1)
    logits = module(tokens[:, :-1])
    row = torch.arange(len(rows), device=device)[:, None]
    logits = logits[row, places - 1].float()
    targets = tokens[row, places]
    logp = logits.log_softmax(dim=-1).gather(2, targets[..., None])[..., 0]
    return logp, counts, logits.argmax(dim=-1) == targets
