"""PULSESync: the weights that changed, to inference workers, bit for bit. See docs/sync.md."""

from .errors import (
    DamagedError,
    LayoutError,
    MixedVersionError,
    NotThisVersionError,
    NoVersionError,
    OtherTrainingError,
    StaleStoreError,
    SyncError,
    TakenOverError,
)
from .prepared import Prepared
from .publisher import Publisher
from .reports import Published, Updated
from .subscriber import Subscriber
from .weights.adapter import lora_adapter
from .weights.fp8 import fp8_checkpoint
from .weights.tensors import EngineSlice

__all__ = [
    "DamagedError",
    "EngineSlice",
    "LayoutError",
    "MixedVersionError",
    "NoVersionError",
    "NotThisVersionError",
    "OtherTrainingError",
    "Prepared",
    "Published",
    "Publisher",
    "StaleStoreError",
    "Subscriber",
    "SyncError",
    "TakenOverError",
    "Updated",
    "fp8_checkpoint",
    "lora_adapter",
]
