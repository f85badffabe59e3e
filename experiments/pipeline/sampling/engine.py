"""What a worker samples with, and how it switches to a new version between two tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

import loco
from experiments.models.registry import language_model
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.tasks.rollout import Decoding, PublishedModel, Rollout, Weights, Words, sample

POLL = 0.5  # seconds that the controller may take to report a newer version
Newer = Callable[[int], int]  # -> the newest published version; returns at once if it is newer


class Engine(Protocol):
    @property
    def words(self) -> Words: ...

    def wait_for(self, version: int) -> None:
        """Wait until the weights are of this version or a later one."""
        ...

    def sample(
        self, prompts: Sequence[list[int]], *, group: int, decoding: Decoding, uniforms: Tensor
    ) -> Rollout:
        """As `experiments.tasks.rollout.sample`, with the version of each token."""
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
        parameters = self.model.checkpoint.named_parameters()
        self._held = {name: parameter.detach().bfloat16() for name, parameter in parameters}
        self._subscriber = loco.sync.Subscriber(self._held, url)
        self._version = 0
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

    def sample(
        self, prompts: Sequence[list[int]], *, group: int, decoding: Decoding, uniforms: Tensor
    ) -> Rollout:
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
            decoding=decoding,
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
        self._received.send()

    def _take(self) -> int:
        """Switch to the version that has been fetched, if any -> the version of the weights."""
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

    def _prepare(self, published: int) -> loco.sync.Prepared:
        if not self._config.patches:
            if published <= self._version:
                raise loco.sync.NoVersionError(f"version {published} is the newest")
            self._subscriber = loco.sync.Subscriber(self._held, whole(self._url, published))
        return self._subscriber.prepare()

    def _fetch(self) -> None:
        while not self._ended:
            self._wanted.wait()
            # A restarted controller does not know what is published, so the store is asked in any case.
            published = self._newer(self._version)
            begun = time.time()
            try:
                prepared = self._prepare(published)
            except (loco.sync.SyncError, OSError) as error:
                if not isinstance(error, loco.sync.NoVersionError) or published > self._version:
                    self._failed = error
                time.sleep(POLL / 10)
                continue
            self._failed = None
            if prepared.version > self._version:
                self._received.did("receiving", begun, version=prepared.version)
                self._prepared = prepared
                self._wanted.clear()
                self._there.set()
