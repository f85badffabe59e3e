"""A worker: takes prompts from the controller, samples and judges answers, and takes new weights."""

from __future__ import annotations

import numpy as np
import torch

from experiments.pipeline import cluster
from experiments.pipeline.cluster import answer_of
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.pipeline.samples import Lease, Parcel, groups_of
from experiments.pipeline.sampling.engine import POLL, Engine, Newer, TorchEngine
from experiments.pipeline.sampling.judging import Judges
from experiments.tasks.task import Seat
from experiments.tasks.verified import Verified

_TICKETS = 2  # a random stream, beside those of `experiments.tasks.verified`


class Worker:
    """An actor. `run` is its only task; Ray restarts a lost process and calls it again."""

    def __init__(self, number: int, config: PipelineConfig, url: str) -> None:
        torch.set_num_threads(1)
        self._name, self._config, self._url = f"worker {number}", config, url
        self._controller = cluster.controller()
        self._task = Verified(config, Seat(0, 1, torch.device("cpu")))
        self._diary = Diary(self._name, self._controller)
        self._judge = Judges(config, self._diary) if config.task == "prompts" else None

    def run(self) -> None:
        """Answer prompts until there are no more."""
        ask = self._controller
        self._engine = engine_of(
            self._config, self._url, self._diary, lambda version: answer_of(ask.newer.remote(version, POLL))
        )
        while True:
            with self._diary.doing("waiting"):
                lease = answer_of(ask.lease.remote(self._name))
                if lease is not None:
                    self._engine.wait_for(lease.version)
            if lease is None:
                break
            with self._diary.doing("sampling", answers=len(lease.tickets) * self._config.grpo.group) as found:
                parcels = self._answer(lease)
                found["tokens"] = sum(one.tokens for one in parcels)
                found["longest"] = max(one.longest for one in parcels)
            answer_of(ask.give.remote(self._name, lease, parcels))
        self._engine.close()
        answer_of(self._diary.send())

    @torch.no_grad()
    def _answer(self, lease: Lease) -> list[Parcel]:
        config, engine, chosen, uniforms = self._config, self._engine, [], []
        group, decoding = config.grpo.group, self._task.decoding(engine.words)
        for ticket in lease.tickets:
            chance = np.random.default_rng([_TICKETS, config.seed, ticket])
            chosen.append(self._task.of_ticket(ticket))
            uniforms.append(chance.random((group, decoding.longest)))
        rollout = engine.sample(
            self._task.prompts(engine.words, chosen),
            group=group,
            decoding=decoding,
            uniforms=torch.from_numpy(np.concatenate(uniforms)),
        )
        rewards = self._task.rewards(chosen, rollout, decoding, self._judge)
        groups = groups_of(rollout, rewards, group)
        judged = rewards.view(-1, group).mean(dim=1).tolist()
        return [
            Parcel(
                ticket=ticket,
                oldest=int(one.versions.min()),
                tokens=one.tokens,
                longest=int(one.lengths.max()),
                reward=reward,
                group=one.packed(),
            )
            for ticket, one, reward in zip(lease.tickets, groups, judged, strict=True)
        ]


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
