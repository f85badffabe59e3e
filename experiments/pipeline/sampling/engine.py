"""What a worker samples with, and how it switches to a new version between two tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Protocol, cast

import torch

import loco
from experiments.models.huggingface import HuggingFaceModel
from experiments.models.registry import language_model
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.tasks.rollout import Cohort, PublishedModel, Question, Rollout, Weights, Words, by_kind

POLL = 0.5  # seconds that the controller may take to report a newer version
Newer = Callable[[int], int]  # -> the newest published version; returns at once if it is newer


class Engine(Protocol):
    """
    version: of the weights, 0 before the first.
    hold: do not take newer weights for now.
    """

    version: int
    hold: bool

    @property
    def words(self) -> Words: ...

    @property
    def model(self) -> PublishedModel | None:
        """The model, if this engine has the one that trains."""
        ...

    @property
    def room(self) -> int:
        """Tokens of the longest sequence."""
        ...

    @property
    def active(self) -> int:
        """Answers that are asked for and have not ended."""
        ...

    def wait_for(self, version: int) -> None:
        """Wait until the weights are of this version or a later one."""
        ...

    def add(self, question: Question) -> None:
        """Answer it, too, from the next step on."""
        ...

    def step(self) -> list[tuple[Hashable, Rollout]]:
        """A token more of each answer -> those whose whole group has ended, by their keys."""
        ...

    def close(self) -> None: ...


def whole(url: str, version: int) -> str:
    """The URL of a version that is published whole, not as a patch."""
    return f"{url}/whole-{version}"


class TorchEngine:
    """Samples from a copy of the training model. A thread fetches the newest version meanwhile."""

    def __init__(self, config: PipelineConfig, url: str, diary: Diary, newer: Newer) -> None:
        self._config, self._url, self._diary, self._newer = config, url, diary, newer
        self._received = diary.beside("store")
        self.model = cast(PublishedModel, language_model(config))
        if isinstance(self.model, HuggingFaceModel):
            self.model.is_rounded = True  # each cohort would have a copy of the weights
        parameters = self.model.checkpoint.named_parameters()
        self._held = {name: parameter.detach().bfloat16() for name, parameter in parameters}
        self._subscriber = loco.sync.Subscriber(self._held, url)
        self.version, self.hold = 0, False
        self._new: list[Question] = []
        self._cohorts: list[Cohort] = []
        self._prepared: Any = None
        self._failed: Exception | None = None  # the thread's last error
        self._wanted, self._ended = threading.Event(), False
        self._wanted.set()
        self._there = threading.Event()
        self._thread = threading.Thread(target=self._fetch, name="fetch", daemon=True)
        self._thread.start()

    @property
    def words(self) -> Words:
        return self.model

    @property
    def room(self) -> int:
        return self.model.context

    @property
    def active(self) -> int:
        new = sum(question.group for question in self._new)
        return new + sum(cohort.going_on for cohort in self._cohorts)

    def add(self, question: Question) -> None:
        self._new.append(question)

    def step(self) -> list[tuple[Hashable, Rollout]]:
        if not self._cohorts and not self.hold:
            self._take()
        new, self._new = self._new, []
        cpu = torch.device("cpu")
        self._cohorts += [Cohort(self.model, alike, cpu, self._before_token) for alike in by_kind(new)]
        ended = [one for cohort in self._cohorts for one in cohort.step()]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.going_on]
        return ended

    def _before_token(self) -> Weights:
        if self._config.in_flight and not self.hold:
            self._take()
        return Weights(self.version, self._config.recompute_cache)

    def wait_for(self, version: int) -> None:
        told = False
        while self.version < version:
            self._there.wait(POLL)
            self._take()
            if self._failed is not None and not told:
                told = True
                self._diary.say(f"no newer weights for now: {self._failed}")

    def close(self) -> None:
        self._ended = True
        self._wanted.set()
        self._thread.join()
        self._received.send()

    def _take(self) -> None:
        """Switch to the version that has been fetched, if any."""
        if self._there.is_set():
            updated = self._subscriber.apply(self._prepared)
            self.version = updated.version
            self._there.clear()
            self._wanted.set()
            with torch.no_grad():
                for name, parameter in self.model.checkpoint.named_parameters():
                    parameter.copy_(self._held[name])
            self._diary.notes.counts["patch bytes"] += updated.bytes
            self._diary.notes.counts["updates"] += 1

    def _prepare(self, published: int) -> loco.sync.Prepared:
        if not self._config.patches:
            if published <= self.version:
                raise loco.sync.NoVersionError(f"version {published} is the newest")
            self._subscriber = loco.sync.Subscriber(self._held, whole(self._url, published))
        return self._subscriber.prepare()

    def _fetch(self) -> None:
        while not self._ended:
            self._wanted.wait()
            # A restarted controller does not know what is published, so the store is asked in any case.
            published = self._newer(self.version)
            begun = time.time()
            try:
                prepared = self._prepare(published)
            except (loco.sync.SyncError, OSError) as error:
                if not isinstance(error, loco.sync.NoVersionError) or published > self.version:
                    self._failed = error
                time.sleep(POLL / 10)
                continue
            self._failed = None
            if prepared.version > self.version:
                self._received.did("receiving", begun, version=prepared.version)
                self._prepared = prepared
                self._wanted.clear()
                self._there.set()
