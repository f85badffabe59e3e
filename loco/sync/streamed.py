"""Publishes weights that a trainer hands out one after the other."""

from typing import Any

import torch
from torch import Tensor

from .publisher import Publisher
from .reports import Published


class StreamedPublisher:
    """Each tensor may be there only until the next one comes: all are copied to host memory, in the dtype in
    which they are published, beside the publisher's own copy.

    Args:
        url, options: as of `loco.sync.Publisher`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._url, self._options = url, options
        self._held: dict[str, Tensor] = {}  # what the publisher reads
        self._taken: set[str] = set()
        self._publisher: Publisher | None = None

    def take(self, name: str, tensor: Tensor) -> None:
        dtype = self._options.get("dtype", torch.bfloat16)
        casts = tensor.dtype == torch.float32 and isinstance(dtype, torch.dtype)
        self._held[name] = tensor.detach().to("cpu", dtype if casts else tensor.dtype, copy=True)
        self._taken.add(name)

    def publish(self, version: int | None = None) -> Published:
        """What was taken since the last version, which must be all that receivers hold.

        Raises:
            LocoError, OSError: as of `Publisher.publish`.
        """
        for name in self._held.keys() - self._taken:
            del self._held[name]
        self._taken.clear()
        if self._publisher is None:
            self._publisher = Publisher(self._held, self._url, **self._options)
        return self._publisher.publish(version)

    def close(self) -> None:
        """Let go of the copies of the weights."""
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = None
        self._held.clear()
