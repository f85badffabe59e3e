"""What `Subscriber.prepare` has found and `Subscriber.apply` writes."""

from dataclasses import dataclass

import torch

from loco.kernels import Changes

from .versions.manifest import Manifest
from .versions.reader import Download
from .weights.publisher_memory import PublisherMemory


@dataclass(frozen=True)
class Part:
    """What is to be written for one publisher."""

    memory: PublisherMemory
    manifest: Manifest  # of the version that it leads to
    downloads: list[Download]
    changes: list[tuple[torch.dtype, Changes]] | None  # None: all elements are written


@dataclass(frozen=True)
class Prepared:
    """An update that is downloaded, checked and decoded, for `Subscriber.apply`."""

    version: int
    state: int
    parts: list[Part]
    seconds: float
