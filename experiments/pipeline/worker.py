"""Who samples: prompts from the controller, weights from who trains, between two tokens if they are new."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

import loco
from experiments.pipeline import cluster
from experiments.pipeline.cluster import answer_of
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.pipeline.samples import Lease, Parcel, groups_of
from experiments.tasks import Seat
from experiments.tasks.rollout import LanguageModel, Weights
from experiments.tasks.verified import Verified

_POLL = 0.5  # seconds
_TICKETS = 2  # a kind of chance, beside those of `experiments.tasks.verified`


class Worker:
    """An actor. `run` is all that it is asked; where the process is lost, Ray starts it and asks again."""

    def __init__(self, number: int, config: PipelineConfig, url: str) -> None:
        torch.set_num_threads(1)
        self._name, self._config, self._controller = f"worker {number}", config, cluster.controller()
        self._task = Verified(config, Seat(0, 1, torch.device("cpu")))
        self._model = self._task.model()
        self._lm = cast(LanguageModel, self._model)
        self._weights = Newest(self._model, url)
        self._diary = Diary(self._name, self._controller)

    def run(self) -> None:
        """Answer prompts until there are no more."""
        ask = self._controller
        while True:
            with self._diary.doing("waiting"):
                lease = answer_of(ask.lease.remote(self._name))
                if lease is not None:
                    self._weights.wait_for(lease.version, self._diary.say)
            if lease is None:
                break
            with self._diary.doing("sampling", answers=len(lease.tickets) * self._config.grpo.group) as found:
                parcels = self._answer(lease)
                found["tokens"] = sum(one.tokens for one in parcels)
                found["longest"] = max(one.longest for one in parcels)
            answer_of(ask.give.remote(self._name, lease, parcels))
        self._weights.close()
        answer_of(self._diary.send())

    @torch.no_grad()
    def _answer(self, lease: Lease) -> list[Parcel]:
        config, chosen, uniforms = self._config, [], []
        for ticket in lease.tickets:
            chance = np.random.default_rng([_TICKETS, config.seed, ticket])
            chosen += self._task.pick(chance, 1)
            uniforms.append(chance.random((config.grpo.group, self._task.longest(self._lm))))
        version = self._take_newest()

        def before_token() -> Weights:
            nonlocal version
            before = version
            if config.in_flight:
                version = self._take_newest()
            return Weights(version, config.recompute_cache and version != before)

        drawn = torch.from_numpy(np.concatenate(uniforms))
        rollout, rewards = self._task.answers(self._lm, chosen, drawn, before_token)
        groups = groups_of(rollout, rewards, config.grpo.group)
        judged = rewards.view(-1, config.grpo.group).mean(dim=1).tolist()
        return [
            Parcel(
                ticket=ticket,
                oldest=int(group.versions.min()),
                tokens=group.tokens,
                longest=int(group.lengths.max()),
                reward=reward,
                group=group.packed(),
            )
            for ticket, group, reward in zip(lease.tickets, groups, judged, strict=True)
        ]

    def _take_newest(self) -> int:
        """-> the version of the weights from now on."""
        updated = self._weights.take()
        if updated is not None:
            self._diary.notes.counts["patch bytes"] += updated.bytes
            self._diary.notes.counts["updates"] += 1
        return self._weights.version


class Newest:
    """A model's weights, and the newest version of them, which a thread fetches meanwhile."""

    def __init__(self, model: torch.nn.Module, url: str) -> None:
        self._model = model
        self._held = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
        self._subscriber = loco.sync.Subscriber(self._held, url)
        self._prepared: Any = None
        self._failed: Exception | None = None  # what the thread met last
        self._wanted, self._ended = threading.Event(), False
        self._wanted.set()
        self._there = threading.Event()
        self._thread = threading.Thread(target=self._fetch, name="fetch", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        held = self._subscriber.version
        return 0 if held is None else held

    def take(self) -> loco.sync.Updated | None:
        """Make the weights those of the version that is there, if it is a newer one."""
        if not self._there.is_set():
            return None
        updated = self._subscriber.apply(self._prepared)
        self._there.clear()
        self._wanted.set()
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(self._held[name])
        return updated

    def wait_for(self, version: int, say: Callable[[str], None]) -> None:
        """Weights that are older are of no use."""
        told = False
        while self.version < version:
            self._there.wait(_POLL)
            self.take()
            if self._failed is not None and not told:
                told = True
                say(f"no newer weights for now: {self._failed}")

    def close(self) -> None:
        self._ended = True
        self._wanted.set()
        self._thread.join()

    def _fetch(self) -> None:
        while not self._ended:
            self._wanted.wait()
            try:
                prepared = self._subscriber.prepare(wait=_POLL)
            except loco.sync.NoVersionError:  # the trainers have not begun
                continue
            except (loco.sync.SyncError, OSError) as error:
                self._failed = error
                time.sleep(_POLL)
                continue
            self._failed = None
            if prepared.version > self.version:
                self._prepared = prepared
                self._wanted.clear()
                self._there.set()
