"""What a worker samples with, and how it takes the weights of a new version between two tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

import loco
from experiments.model import language_model
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.tasks.rollout import PublishedModel, Rollout, Weights, Words, sample

POLL = 0.5  # seconds


class Engine(Protocol):
    @property
    def words(self) -> Words: ...

    def wait_for(self, version: int) -> None:
        """Until the weights are this version's or a later one's."""
        ...

    def sample(self, prompts: Sequence[list[int]], *, group: int, longest: int, uniforms: Tensor) -> Rollout:
        """As `experiments.tasks.rollout.sample`; the versions by token are there, too."""
        ...

    def close(self) -> None: ...


def engine_of(config: PipelineConfig, url: str, diary: Diary, newest: Callable[[], int]) -> Engine:
    """
    Args:
        url: where versions are published.
        newest: tells the newest version that is published.
    """
    if config.engine == "vllm":
        from experiments.pipeline.engine_vllm import VllmEngine  # an optional dependency, slow to import

        return VllmEngine(config, url, diary, newest)
    return TorchEngine(config, url, diary, newest)


def whole(url: str, version: int) -> str:
    """Where a version lies that nobody can read as what changed since another."""
    return f"{url}/whole-{version}"


class TorchEngine:
    """The model that trains, sampled from here. A thread fetches the newest version meanwhile."""

    def __init__(self, config: PipelineConfig, url: str, diary: Diary, newest: Callable[[], int]) -> None:
        self._config, self._url, self._diary, self._newest = config, url, diary, newest
        self.model = cast(PublishedModel, language_model(config))
        parameters = self.model.checkpoint.named_parameters()
        self._held = {name: parameter.detach().bfloat16() for name, parameter in parameters}
        self._subscriber = loco.sync.Subscriber(self._held, url)
        self._version = 0
        self._prepared: Any = None
        self._failed: Exception | None = None  # what the thread met last
        self._wanted, self._ended = threading.Event(), False
        self._wanted.set()
        self._there = threading.Event()
        self._thread = threading.Thread(target=self._fetch, name="fetch", daemon=True)
        self._thread.start()

    @property
    def words(self) -> Words:
        return self.model

    def sample(self, prompts: Sequence[list[int]], *, group: int, longest: int, uniforms: Tensor) -> Rollout:
        config, version = self._config, self._take()

        def before_token() -> Weights:
            nonlocal version
            before = version
            if config.in_flight:
                version = self._take()
            return Weights(version, config.recompute_cache and version != before)

        return sample(
            self.model,
            prompts,
            group=group,
            longest=longest,
            uniforms=uniforms,
            device=torch.device("cpu"),
            before_token=before_token,
        )

    def wait_for(self, version: int) -> None:
        told = False
        while self._version < version:
            self._there.wait(POLL)
            self._take()
            if self._failed is not None and not told:
                told = True
                self._diary.say(f"no newer weights for now: {self._failed}")

    def close(self) -> None:
        self._ended = True
        self._wanted.set()
        self._thread.join()

    def _take(self) -> int:
        """Make the weights those of the version that is there, if it is a newer one -> their version."""
        if self._there.is_set():
            updated = self._subscriber.apply(self._prepared)
            self._version = updated.version
            self._there.clear()
            self._wanted.set()
            with torch.no_grad():
                for name, parameter in self.model.checkpoint.named_parameters():
                    parameter.copy_(self._held[name])
            self._diary.notes.counts["patch bytes"] += updated.bytes
            self._diary.notes.counts["updates"] += 1
        return self._version

    def _prepare(self) -> loco.sync.Prepared:
        if self._config.patches:
            return self._subscriber.prepare(wait=POLL)
        version = self._newest()
        if version <= self._version:
            time.sleep(POLL / 10)
            raise loco.sync.NoVersionError(f"version {version} is the newest")
        self._subscriber = loco.sync.Subscriber(self._held, whole(self._url, version))
        return self._subscriber.prepare()

    def _fetch(self) -> None:
        while not self._ended:
            self._wanted.wait()
            try:
                prepared = self._prepare()
            except (loco.sync.SyncError, OSError) as error:
                # A version that nobody has published yet is no failure.
                if not isinstance(error, loco.sync.NoVersionError) or self._newest() > self._version:
                    self._failed = error
                time.sleep(POLL / 10)
                continue
            self._failed = None
            if prepared.version > self._version:
                self._prepared = prepared
                self._wanted.clear()
                self._there.set()
