"""verl's rollout workers take what changed in the actor's weights: the checkpoint engine "loco".

    actor_rollout_ref.rollout.checkpoint_engine.backend=loco
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=loco.integrations.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.loco.url=/shared/weights

The actor's rank 0 publishes each version below that URL, in a folder of the run's own, which can be removed
after it; every rollout worker reads what changed, and hands all weights to its engine, as verl wants it.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from loco.sync import Subscriber
from loco.sync.archive import Archive
from loco.sync.streamed import StreamedPublisher


@CheckpointEngineRegistry.register("loco")  # pyright: ignore[reportAttributeAccessIssue]  its self has another name
class LocoCheckpointEngine(CheckpointEngine):
    """One end of it: the actor's, or a rollout worker's, which holds a copy of the weights in host memory.

    Args:
        bucket_size, is_master: given by verl.
        url: as of `loco.sync.Publisher`; every node must reach it. The other arguments by
            `engine_kwargs.loco`, too.
        key_file: with the key that seals the versions, on every node.
        timeout: seconds that a rollout worker waits for a version.
        options: as of `loco.sync.Publisher`.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        url: str,
        key_file: str | None = None,
        timeout: float = 1800.0,
        **options: Any,
    ) -> None:
        self._url, self._timeout, self._options = url.rstrip("/"), timeout, options
        self._key = Path(key_file).read_bytes() if key_file else None
        self._is_master, self._folder = is_master, uuid.uuid4().hex if is_master else ""
        self._version = 0
        self._publisher: StreamedPublisher | None = None
        self._held: dict[str, Tensor] = {}
        self._subscriber: Subscriber | None = None

    def prepare(self) -> dict[str, Any]:
        """-> of rank 0, what is published next, and where"""
        return {"folder": self._folder, "version": self._version + 1} if self._is_master else {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """All are told what rank 0 publishes."""
        (told,) = filter(None, metadata)
        actors, rollouts = (
            {name: [value] * size for name, value in told.items()}
            for size in (actor_wg_world_size, rollout_world_size)
        )
        return actors, rollouts

    def init_process_group(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, folder: str, version: int
    ) -> None:
        if folder != self._folder:  # an actor that was started again
            self._folder, self._subscriber = folder, None
        self._version = version

    def finalize(self) -> None:
        """Nothing is left to do: both ends go on from what they hold."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish a version. All ranks take part, as they gather each tensor together."""
        if self._is_master and self._publisher is None:
            self._publisher = StreamedPublisher(self._where, key=self._key, **self._options)
        async for name, tensor in ensure_async_iterator(weights):
            if self._publisher is not None:
                self._publisher.take(name, tensor)
        if self._publisher is None:
            return {}
        report = await asyncio.to_thread(self._publisher.publish, self._version)
        return {
            "loco/bytes": float(report.patch_bytes),
            "loco/changed": report.entries / max(1, report.numel),
        }

    async def receive_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """All weights, of the version that is being published."""
        await asyncio.to_thread(self._update)
        for one in self._held.items():
            yield one

    @property
    def _where(self) -> str:
        return f"{self._url}/{self._folder}"

    def _update(self) -> None:
        """Hold the version that this is about, once it is there."""
        if self._subscriber is None:
            _, self._held = Archive(self._where, key=self._key).tensors(self._version, wait=self._timeout)
            self._subscriber = Subscriber(self._held, self._where, key=self._key)
        self._subscriber.update(self._version, wait=self._timeout)
