"""A site's weights as versions in the store, written while training goes on."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import nn

import loco
from experiments.pipeline.cluster import answer_of
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.pipeline.engine import whole

_logger = logging.getLogger(__name__)
_PAUSE = 1.0  # seconds, before a store that failed is tried again


class Publishing:
    """`begin` after each round. A version that could not be written is left to the next one, or to
    `until_there`; the controller is told of a version when it is there."""

    def __init__(
        self, checkpoint: nn.Module, url: str, config: PipelineConfig, controller: Any, part: str
    ) -> None:
        self._checkpoint, self._url, self._config = checkpoint, url, config
        self._controller = controller
        self._diary = Diary(f"{part}, store", controller)  # of the thread
        self._publisher: loco.sync.Publisher | None = None
        self._thread = ThreadPoolExecutor(1, "publish")
        self._writing: Future[None] | None = None
        self._failed = False

    def begin(self, version: int) -> None:
        """The weights may change when this returns; a thread writes the version."""
        self.finish()
        try:
            publisher = self._publisher = self._publisher or self._opened(version)
            try:
                publisher.publish(version, wait=False)
            except (loco.sync.TakenOverError, ValueError) as error:  # no version, or not this one, can follow
                self._is_there_already(version, error)
                return
        except (loco.sync.SyncError, OSError) as error:
            self._can_not_be_there(version, error)
            return
        self._writing = self._thread.submit(self._write, publisher, version)

    def finish(self) -> None:
        """Wait until what was begun is written, or could not be."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        self.finish()
        self._thread.shutdown()
        answer_of(self._diary.send())

    def until_there(self, version: int) -> None:
        """Publish as often as it takes: without new weights nobody samples for long."""
        self.finish()
        while answer_of(self._controller.newer.remote(version - 1, 0.0)) < version:
            self.begin(version)
            self.finish()
            if self._failed:
                time.sleep(_PAUSE)

    def _opened(self, version: int) -> loco.sync.Publisher:
        url = self._url if self._config.patches else whole(self._url, version)
        return loco.sync.Publisher(self._checkpoint, url)

    def _write(self, publisher: loco.sync.Publisher, version: int) -> None:
        with self._diary.doing("writing", version=version) as found:
            try:
                published = publisher.flush()
            except loco.sync.TakenOverError as error:
                self._is_there_already(version, error)
                return
            except (loco.sync.SyncError, OSError) as error:
                self._can_not_be_there(version, error)
                return
            assert published is not None
            found["bytes"] = published.bytes
            self._diary.notes.counts["published bytes"] += published.bytes
        if not self._config.patches:
            self._publisher = None  # the next version has a folder of its own
        self._is_there(version)

    def _is_there(self, version: int) -> None:
        if self._failed:
            self._diary.say(f"version {version} is published")
        self._failed = False
        answer_of(self._controller.published.remote(version))

    def _is_there_already(self, version: int, error: Exception) -> None:
        """By another site: one of the two was thought to be lost."""
        _logger.warning("version %d is there already: %s", version, error)
        self._publisher = None
        self._is_there(version)

    def _can_not_be_there(self, version: int, error: Exception) -> None:
        if not self._failed:
            self._diary.say(f"version {version} can't be published yet: {error}")
        self._failed = True
