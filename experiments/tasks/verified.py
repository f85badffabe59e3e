"""Post-training by GRPO on problems: a verifier judges answers, and nothing else is known.

At the start of every round each trainer samples answers to its prompts of the next `sync_every` steps from
the weights that all sites hold, then learns from them step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from experiments.errors import ExperimentError
from experiments.models.registry import language_model
from experiments.settings.config import RunConfig
from experiments.settings.tasks import GrpoConfig
from experiments.tasks.grpo import advantages, token_losses
from experiments.tasks.problems import Problem, Problems, arithmetic
from experiments.tasks.prompts import prompts_of
from experiments.tasks.rollout import Decoding, LanguageModel, Rollout, Words, is_cut_off, pad, sample
from experiments.tasks.task import Seat, Task

_ROLLOUTS, _WARM_START, _EPOCHS = 0, 1, 3  # kinds of chance: a seed of its own for each
_MAX_TOKENS = 256  # of an answer, where no right one tells how long it may be


class Verified(Task):
    higher_is_better: ClassVar[bool] = True

    def __init__(self, config: RunConfig, seat: Seat) -> None:
        self._config, self._seat = config, seat
        self._grpo: GrpoConfig = getattr(config, config.task)
        self._problems = problems_of(config)
        self.answers_known = self._problems.answers_known
        self.metric = "pass@1" if self.answers_known else "reward"
        self._own = self._problems.train
        if self._grpo.own_problems:
            in_order = sorted(self._own, key=lambda problem: problem.prompt)
            share = len(in_order) // seat.ranks
            self._own = in_order[seat.rank * share :][:share]
        self._answers = {problem.answer for problem in self._problems.train}
        self._batches: list[_Batch] = []
        self._first_step = 0  # of the round
        self._order: tuple[int, np.ndarray] | None = None  # of an epoch
        self._known: dict[str, list[int]] = {}  # texts as tokens

    def model(self) -> nn.Module:
        return language_model(self._config)

    def recipe(self) -> list[Any]:
        return [self._config.task, *self._grpo.recipe()]

    def check(self, model: nn.Module) -> None:
        lm = cast(LanguageModel, model)
        most = self.decoding(lm).longest
        problems = self._problems.train + self._problems.held_out
        lengths = [len(lm.encode(text)) for text in dict.fromkeys(problem.prompt for problem in problems)]
        if empty := lengths.count(0):
            raise ExperimentError(f"{empty} of {len(lengths)} prompts have no tokens: take them out")
        if too_long := sum(length + most > lm.context for length in lengths):
            raise ExperimentError(
                f"{too_long} of {len(lengths)} prompts are too long: the longest has {max(lengths)} tokens, "
                f"an answer may have {most}, and the model reads {lm.context}. Take them out, or set "
                "answer.max_tokens lower"
            )

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
        decoding = self.decoding(lm)
        rollout = sample(
            lm,
            self.prompts(lm, chosen),
            group=config.group,
            decoding=decoding,
            uniforms=torch.from_numpy(chance.random((answers, decoding.longest))),
            device=seat.device,
        )
        rewards = torch.tensor(self.rewards(self.answers(chosen, rollout, decoding)))
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

    @property
    def held_out(self) -> list[Problem]:
        return self._problems.held_out

    def of_ticket(self, ticket: int) -> Problem:
        """Tickets 0, 1, … pass through all problems in an order that chance decides, and again in another."""
        epoch, place = divmod(ticket, len(self._own))
        if self._order is None or self._order[0] != epoch:
            chance = np.random.default_rng([_EPOCHS, self._config.seed, epoch])
            self._order = epoch, chance.permutation(len(self._own))
        return self._own[self._order[1][place]]

    def decoding(self, words: Words) -> Decoding:
        longest = self._config.answer.max_tokens
        if longest is None and self.answers_known:
            # With its end; longer answers are wrong.
            longest = 1 + max(len(self._tokens(words, answer)) for answer in self._answers)
        return Decoding.of(words, self._config.answer, longest or _MAX_TOKENS)

    def prompts(self, words: Words, chosen: Sequence[Problem]) -> list[list[int]]:
        return [self._tokens(words, problem.prompt) for problem in chosen]

    def answers(
        self, chosen: Sequence[Problem], rollout: Rollout, decoding: Decoding
    ) -> list[tuple[Problem, str]]:
        """What is to be judged: equally many answers to each problem."""
        each = len(rollout.texts) // len(chosen)
        found = []
        for k, (text, tokens) in enumerate(zip(rollout.texts, rollout.tokens, strict=True)):
            if self.answers_known and is_cut_off(tokens[-1:].tolist(), decoding):
                text += "…"  # whatever it would have become, it is no answer
            found.append((chosen[k // each], text))
        return found

    def rewards(self, answers: Sequence[tuple[Problem, str]]) -> list[float]:
        return [float(self._problems.reward(problem, text)) for problem, text in answers]

    def loss(self, module: nn.Module, step: int) -> Tensor:
        batch, config = self._batches[step - self._first_step], self._grpo
        device = self._seat.device
        logp, counts, _ = answer_log_probabilities(
            module, batch.rows, batch.heads, device, temperature=self._config.answer.temperature
        )
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
        """pass@1 of greedy decoding, and of a sample at temperature 1. Where right answers are not known, the
        mean reward of greedy decoding.

        The first two are exact, without decoding: greedy decoding gives the right answer if and only if each
        of its tokens is the likeliest one after those before it; a sample does with the product of their
        probabilities.
        """
        mine = self._problems.held_out[self._seat.rank :: self._seat.ranks]
        if not self.answers_known:
            return {self.metric: self._reward_of_greedy(cast(LanguageModel, model), mine)}
        greedy = torch.zeros((), dtype=torch.float64, device=self._seat.device)
        sampled = greedy.clone()
        for first in range(0, len(mine), 256):
            chosen = mine[first : first + 256]
            logp, counts, likeliest = self._of_answers(model, chosen, [p.answer for p in chosen])
            greedy += (likeliest | ~counts).all(dim=1).sum()
            sampled += (logp * counts).double().sum(dim=1).exp().sum()
        size = torch.tensor(float(len(mine)), dtype=torch.float64, device=self._seat.device)
        return {"pass@1": torch.stack([greedy, size]), "sampled": torch.stack([sampled, size])}

    def _reward_of_greedy(self, lm: LanguageModel, problems: Sequence[Problem]) -> Tensor:
        """[sum, how many]."""
        decoding = replace(self.decoding(lm), temperature=0.0)
        total, count = 0.0, self._grpo.prompts * self._grpo.group  # as many at once as in a training step
        for first in range(0, len(problems), count):
            chosen = problems[first : first + count]
            prompts = self.prompts(lm, chosen)
            none, device = torch.empty(len(chosen), 0), self._seat.device
            rollout = sample(lm, prompts, group=1, decoding=decoding, uniforms=none, device=device)
            total += sum(self.rewards(self.answers(chosen, rollout, decoding)))
        return torch.tensor([total, float(len(problems))], dtype=torch.float64, device=self._seat.device)

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
    if config.task == "prompts":
        # An optional dependency, slow to import.
        from experiments.models.huggingface import HuggingFaceWords

        assert config.path is not None
        return prompts_of(config.prompts, HuggingFaceWords(Path(config.path)))
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
    module: nn.Module,
    rows: Sequence[Tensor],
    heads: Sequence[int],
    device: torch.device,
    *,
    temperature: float = 1.0,
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
    logp = (logits / temperature).log_softmax(dim=-1).gather(2, targets[..., None])[..., 0]
    return logp, counts, logits.argmax(dim=-1) == targets
