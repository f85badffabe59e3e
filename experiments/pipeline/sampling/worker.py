"""A worker: takes prompts from the controller, samples and judges answers, and takes new weights.

It never waits for its longest answer: as soon as a part of its answers have ended, it asks for more prompts.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from experiments.pipeline import cluster
from experiments.pipeline.cluster import answer_of, ray
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.pipeline.samples import Lease, Parcel, groups_of
from experiments.pipeline.sampling.conversations import Conversations, Place
from experiments.pipeline.sampling.engine import POLL, Engine, Newer, TorchEngine
from experiments.pipeline.sampling.judging import Judges
from experiments.tasks.problems import Problem
from experiments.tasks.prompts import Reply
from experiments.tasks.rollout import Question, Rollout
from experiments.tasks.task import Seat
from experiments.tasks.verified import Verified
from experiments.training.loop import evaluate

_TICKETS = 2  # a random stream, beside those of `experiments.tasks.verified`
_ALONE = Seat(0, 1, torch.device("cpu"))
_NOTED = 0.5  # seconds of sampling that are noted together
_FREE = 4  # more prompts are asked for when a fourth of the answers have ended


class Key(NamedTuple):
    """Of a question. A controller that was restarted may hand out tickets that this worker has already."""

    unique: int
    number: int  # a ticket, or the place of a held-out problem
    is_ticket: bool


class Worker:
    """An actor. `run` is its only task; Ray restarts a lost process and calls it again."""

    def __init__(self, number: int, config: PipelineConfig, url: str) -> None:
        torch.set_num_threads(1)
        self._name, self._config, self._url = f"worker {number}", config, url
        self._life = secrets.token_hex(8)  # tells the controller that this process is a new one
        self._controller = cluster.controller()
        self._task = Verified(config, _ALONE)
        self._diary = Diary(self._name, self._controller)
        self._judges = Judges(config, self._diary) if config.task == "prompts" else None
        self._conversations: Conversations | None = None  # where answers have several turns
        self._asked: Any = None  # the call that will bring more prompts
        self._held: deque[Lease] = deque()  # for which the weights are still too old
        self._asked_for = count()
        self._sampled: dict[Key, Rollout] = {}  # and not judged yet
        self._evaluation: Evaluation | None = None
        self._is_evaluating = False  # sampling for it, by weights that stay

    def run(self) -> None:
        """Answer prompts until there are no more."""
        ask = self._controller
        self._engine = engine_of(
            self._config, self._url, self._diary, lambda version: answer_of(ask.newer.remote(version, POLL))
        )
        self._decoding = self._task.decoding(self._engine.words)
        if self._config.prompts.environment is not None:
            self._conversations = Conversations(
                self._config.prompts, self._engine.words, self._engine.room, self._uniforms_of_turn
            )
        self._sampling = Sampling(self._diary)
        while self._take_leases():
            self._begin()
            # An answer of several turns is one answer.
            goes_on = self._conversations is not None and len(self._conversations) > 0
            self._engine.hold = self._is_evaluating or (goes_on and not self._config.in_flight)
            if self._engine.active:
                with self._sampling:
                    active = self._engine.active
                    ended = self._engine.step()
                    self._sampling.count(ended, active)
                for key, rollout in ended:
                    self._judge(key, rollout)
            self._give()
        self._sampling.note()
        self._engine.close()
        answer_of(self._diary.send())

    # ---- prompts ----

    def _take_leases(self) -> bool:
        """Ask for prompts if there is room for them, and take what has come. False: there are no more."""
        most, group = self._config.lease, self._config.grpo.group
        answers = self._engine.active if self._conversations is None else len(self._conversations)
        free = most - -(-answers // group) - sum(len(one.tickets) for one in self._held)
        free -= max(0, len(self._sampled) - most)  # rewards may be slower than sampling
        # Where weights may not change in flight, all answers end before new ones begin.
        enough = most / _FREE if self._config.in_flight else most
        if self._asked is None and free >= max(1, enough):
            self._asked = self._controller.lease.remote(self._name, self._life, free)
        if self._asked is None:
            return True
        is_idle = not self._engine.active and not self._held and not self._is_judging
        if is_idle:
            self._sampling.note()
            with self._diary.doing("waiting"):
                lease = answer_of(self._asked)
        else:
            if not ray.wait([self._asked], timeout=0)[0]:
                return True
            lease = answer_of(self._asked)
        self._asked = None
        if lease is not None:
            self._held.append(lease)
        return lease is not None

    def _begin(self) -> None:
        """Add the prompts for which the weights are new enough to those that are answered."""
        while self._held:
            lease = self._held[0]
            wanted = lease.version if lease.evaluate is None else lease.evaluate
            if self._engine.version < wanted:
                if self._engine.active or self._is_judging:
                    return
                with self._diary.doing("waiting"):
                    self._engine.wait_for(wanted)
            self._held.popleft()
            if lease.evaluate is not None:
                self._evaluate()
                continue
            for ticket in lease.tickets:
                self._ask_engine(self._question(ticket))
            version = self._engine.version
            self._controller.began.remote(self._name, self._life, lease.tickets, version)

    def _question(self, ticket: int) -> Question:
        config, decoding = self._config, self._decoding
        chance = np.random.default_rng([_TICKETS, config.seed, ticket])
        (prompt,) = self._task.prompts(self._engine.words, [self._task.of_ticket(ticket)])
        group = config.grpo.group
        uniforms = torch.from_numpy(chance.random((group, decoding.longest)))
        key = Key(next(self._asked_for), ticket, is_ticket=True)
        return Question(key=key, prompt=prompt, group=group, decoding=decoding, uniforms=uniforms)

    def _ask_engine(self, question: Question) -> None:
        if self._conversations is None:
            self._engine.add(question)
            return
        for turn in self._conversations.begin(question, self._problem_of(cast(Key, question.key))):
            self._engine.add(turn)

    def _uniforms_of_turn(self, place: Place, turn: int) -> torch.Tensor:
        key = cast(Key, place.key)
        if not key.is_ticket:
            return torch.empty(1, 0)  # scores are of the likeliest tokens
        chance = np.random.default_rng([_TICKETS, self._config.seed, key.number, place.which, turn])
        return torch.from_numpy(chance.random((1, self._decoding.longest)))

    def _problem_of(self, key: Key) -> Problem:
        return self._task.of_ticket(key.number) if key.is_ticket else self._task.held_out[key.number]

    # ---- answers ----

    @property
    def _is_judging(self) -> bool:
        return self._judges is not None and self._judges.are_busy

    def _judge(self, key: Any, rollout: Rollout) -> None:
        if self._conversations is not None:
            assert self._judges is not None
            said = self._conversations.hear(key, rollout)
            self._judges.judge(key, [said], is_urgent=key.key.is_ticket)
            return
        self._has_sampled(key, rollout)
        answers = self._task.answers([self._problem_of(key)], rollout, self._decoding)
        if self._judges is not None:
            self._judges.judge(key, answers, is_urgent=key.is_ticket)
        else:
            self._judged(key, self._task.rewards(answers))

    def _has_sampled(self, key: Key, rollout: Rollout) -> None:
        if key.is_ticket:
            self._sampled[key] = rollout
        elif self._evaluation is not None and self._evaluation.has_sampled_all():
            self._is_evaluating = self._engine.hold = False

    def _give(self) -> None:
        if self._judges is None:
            return
        wait = 0.0 if self._engine.active else _NOTED / 10
        for key, found in self._judges.judged(wait):
            if self._conversations is None:
                self._judged(key, found)
            else:
                self._go_on(self._conversations, cast(Place, key), found[0])

    def _go_on(self, conversations: Conversations, place: Place, reply: Reply) -> None:
        then = conversations.reply(place, reply)
        if isinstance(then, Question):
            self._engine.add(then)
        elif then is not None:
            rollout, rewards = then
            self._has_sampled(cast(Key, place.key), rollout)
            self._judged(place.key, rewards)

    def _judged(self, key: Any, rewards: list[float]) -> None:
        if not key.is_ticket:
            assert self._evaluation is not None
            if self._evaluation.add(rewards):
                self._end_evaluation(self._evaluation)
            return
        rollout = self._sampled.pop(key)
        (group,) = groups_of(rollout, torch.tensor(rewards), self._config.grpo.group)
        parcel = Parcel(
            ticket=key.number,
            oldest=int(group.sampled_versions.min()),
            tokens=group.tokens,
            reward=sum(rewards) / len(rewards),
            group=group.packed(),
        )
        self._controller.give.remote(self._name, self._life, [parcel])

    # ---- scores ----

    def _evaluate(self) -> None:
        """Score the weights as they are now: exactly, if the model is at hand and right answers are known,
        else by answers to held-out prompts, which are sampled beside the others with weights that stay."""
        evaluation = Evaluation(self._engine.version, len(self._task.held_out))
        if self._task.answers_known and self._engine.model is not None:
            self._sampling.note()
            evaluation.scores = evaluate(self._task, cast(nn.Module, self._engine.model), _ALONE)
            self._end_evaluation(evaluation)
            return
        self._evaluation, self._is_evaluating = evaluation, True
        self._engine.hold = True
        greedy = replace(self._decoding, temperature=0.0)
        none, prompts = torch.empty(1, 0), self._task.prompts(self._engine.words, self._task.held_out)
        for k, prompt in enumerate(prompts):
            key = Key(next(self._asked_for), k, is_ticket=False)
            self._ask_engine(Question(key=key, prompt=prompt, group=1, decoding=greedy, uniforms=none))

    def _end_evaluation(self, evaluation: Evaluation) -> None:
        self._evaluation = None
        scores = evaluation.scores or {self._task.metric: evaluation.total / evaluation.count}
        step = (evaluation.version - 1) * self._config.sync_every
        self._diary.did("evaluating", evaluation.begun, step=step, at=evaluation.begun, scores=scores)
        answer_of(self._diary.send())
        answer_of(self._controller.scored.remote(self._name, self._life, evaluation.version))


class Evaluation:
    """Of one version, by the rewards of the answers to held-out prompts as they come."""

    def __init__(self, version: int, count: int) -> None:
        self.version, self.count = version, count
        self.begun, self.scores = time.time(), dict[str, float]()
        self.total, self._seen, self._sampled = 0.0, 0, 0

    def has_sampled_all(self) -> bool:
        """Another held-out prompt has been answered -> whether it was the last."""
        self._sampled += 1
        return self._sampled == self.count

    def add(self, rewards: list[float]) -> bool:
        """-> whether they are the last."""
        self.total, self._seen = self.total + sum(rewards), self._seen + len(rewards)
        return self._seen == self.count


class Sampling:
    """Notes what is sampled, half a second at a time."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary
        self._clear()

    def _clear(self) -> None:
        self._begun: float | None = None
        self._cpu = 0.0
        self._steps = self._active = self._answers = self._tokens = self._longest = 0

    def __enter__(self) -> None:
        if self._begun is None:
            self._begun, self._cpu = time.time(), time.process_time()

    def __exit__(self, *error: object) -> None:
        assert self._begun is not None
        if time.time() - self._begun > _NOTED:
            self.note()

    def count(self, ended: list[tuple[Any, Rollout]], active: int) -> None:
        """
        Args:
            active: answers that went on in this step.
        """
        lengths = [len(logp) for _, rollout in ended for logp in rollout.logp]
        self._steps += 1
        self._active += active
        self._answers += len(lengths)
        self._tokens += sum(lengths)
        self._longest = max([self._longest, *lengths])

    def note(self) -> None:
        if self._begun is not None:
            self._diary.did(
                "sampling",
                self._begun,
                cpu=time.process_time() - self._cpu,
                steps=self._steps,
                at_once=self._active / self._steps,  # answers, the mean
                answers=self._answers,
                tokens=self._tokens,
                longest=self._longest,
            )
        self._clear()


def engine_of(config: PipelineConfig, url: str, diary: Diary, newer: Newer) -> Engine:
    """
    Args:
        url: where versions are published.
    """
    if config.engine == "vllm":
        # An optional dependency, slow to import.
        from experiments.pipeline.sampling.engine_vllm import VllmEngine

        return VllmEngine(config, url, diary, newer)
    return TorchEngine(config, url, diary, newer)
