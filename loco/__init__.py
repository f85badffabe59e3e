"""loco: a low-communication optimizer for trainers in different places.

    inner = torch.optim.AdamW(model.parameters(), lr=1e-6)
    optimizer = loco.PulseLoCo(inner, sync_every=8)

`help(loco.PulseLoCo)` has a whole training loop.
"""

from typing import TYPE_CHECKING, Any

from .attach import Attached, attach
from .checkpoints.checkpoints import Checkpoints
from .checkpoints.protocol import Saveable
from .checkpoints.restore import Resumed
from .errors import (
    AgreementError,
    AuthenticationError,
    CheckpointError,
    LocoError,
    NonFiniteError,
    PeerError,
    ReplicaError,
    TransportError,
    WireError,
)
from .members.sites import Sites
from .members.topology import Topology
from .members.view import SiteTopology
from .optimizer import DiLoCo, LowCommunicationOptimizer, PulseLoCo
from .presets import MATCHING, PAPER, SAVING, SMALLEST, holding_back
from .report import SyncReport
from .round.hooks import RoundProgress
from .version import VERSION

__all__ = [
    "MATCHING",
    "PAPER",
    "SAVING",
    "SMALLEST",
    "AgreementError",
    "Attached",
    "AuthenticationError",
    "CheckpointError",
    "Checkpoints",
    "DiLoCo",
    "LocoError",
    "LowCommunicationOptimizer",
    "NonFiniteError",
    "PeerError",
    "PulseLoCo",
    "ReplicaError",
    "Resumed",
    "RoundProgress",
    "Saveable",
    "SiteTopology",
    "Sites",
    "SyncReport",
    "Topology",
    "TransportError",
    "WireError",
    "attach",
    "holding_back",
    "sync",
]
__version__ = VERSION

if TYPE_CHECKING:
    from . import sync


def __getattr__(name: str) -> Any:
    """`loco.sync` is imported when it is first used: most trainers need it not."""
    if name == "sync":
        import importlib

        return importlib.import_module("loco.sync")
    raise AttributeError(f"module 'loco' has no attribute {name!r}")
