"""Publishes a site's weights as versions, written to the store while training goes on."""

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
from experiments.pipeline.sampling.engine import whole

_logger = logging.getLogger(__name__)
_PAUSE = 1.0  # seconds, before a store that failed is tried again


class Publishing:
    """Call `begin` after each round. If a version can't be written, the next one or `until_there` makes up
    for it. The controller is told of a version once it is in the store.

    Args:
        part: of each version that this rank publishes, and how many there are.
    """

    def __init__(
        self,
        checkpoint: nn.Module,
        url: str,
        config: PipelineConfig,
        controller: Any,
        diary: Diary,
        *,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self._part = part
        self._checkpoint, self._url, self._config = checkpoint, url, config
        self._controller, self._diary = controller, diary.beside("store")
        self._publisher: loco.sync.Publisher | None = None
        self._thread = ThreadPoolExecutor(1, "publish")
        self._writing: Future[None] | None = None
        self._failed = False
        self._newest = 0  # version of which this rank's part is there

    def begin(self, version: int) -> None:
        """Find and code what changed. The weights may change again when this returns; a thread writes it."""
        self.finish()
        try:
            try:
                publisher = self._begun(version)
            except loco.sync.TakenOverError:  # another site has published since, perhaps an earlier version
                self._publisher = None
                publisher = self._begun(version)
        except ValueError as error:  # the store has this version
            self._is_there_already(version, error)
        except (loco.sync.SyncError, OSError) as error:
            self._can_not_be_there(version, error)
        else:
            self._writing = self._thread.submit(self._write, publisher, version)

    def finish(self) -> None:
        """Wait until the version that was begun is written, or has failed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        self.finish()
        self._thread.shutdown()
        answer_of(self._diary.send())

    def until_there(self, version: int) -> None:
        """Publish this version, as often as it takes: without it no more samples may be begun."""
        self.finish()
        while answer_of(self._controller.newer.remote(version - 1, 0.0)) < version:
            if not self.has(version):
                self.begin(version)
                self.finish()
            if self._newest < version or self._part[1] > 1:
                time.sleep(_PAUSE)

    def has(self, version: int) -> bool:
        """Whether this rank's part of it is in the store, once what is being written is. The controller is
        told again, since one that was lost does not know it."""
        self.finish()
        if self._newest < version:
            return False
        answer_of(self._controller.published.remote(version, *self._part))
        return True

    def _begun(self, version: int) -> loco.sync.Publisher:
        url = self._url if self._config.patches else whole(self._url, version)
        publisher = self._publisher = self._publisher or loco.sync.Publisher(
            self._checkpoint, url, stream=self._part
        )
        publisher.publish(version, wait=False)
        return publisher

    def _write(self, publisher: loco.sync.Publisher, version: int) -> None:
        begun = time.time()
        try:
            published = publisher.flush()
        except (loco.sync.SyncError, OSError) as error:
            if isinstance(error, loco.sync.TakenOverError):
                self._publisher = None
            self._can_not_be_there(version, error)
            return
        assert published is not None
        self._diary.notes.counts["published bytes"] += published.bytes
        self._diary.did("writing", begun, version=version, bytes=published.bytes)
        if not self._config.patches:
            self._publisher = None  # the next version has a folder of its own
        self._is_there(version)

    def _is_there(self, version: int) -> None:
        if self._failed:
            self._diary.say(f"version {version} is published")
        self._failed, self._newest = False, version
        answer_of(self._controller.published.remote(version, *self._part))

    def _is_there_already(self, version: int, error: Exception) -> None:
        """Another site has published it, because one of the two was thought to be lost."""
        _logger.warning("version %d is there already: %s", version, error)
        self._publisher = None
        self._is_there(version)

    def _can_not_be_there(self, version: int, error: Exception) -> None:
        if not self._failed:
            self._diary.say(f"version {version} can't be published yet: {error}")
        self._failed = True
