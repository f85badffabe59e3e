"""PULSESync: the weights that changed, to inference workers, bit for bit. See docs/sync.md."""

from .errors import DamagedError, LayoutError, NotThisVersionError, NoVersionError, SyncError, TakenOverError
from .publisher import Published, Publisher
from .subscriber import Prepared, Subscriber, Updated
from .weights.fp8 import fp8_checkpoint
from .weights.tensors import Placed

__all__ = [
    "DamagedError",
    "LayoutError",
    "NoVersionError",
    "NotThisVersionError",
    "Placed",
    "Prepared",
    "Published",
    "Publisher",
    "Subscriber",
    "SyncError",
    "TakenOverError",
    "Updated",
    "fp8_checkpoint",
]
