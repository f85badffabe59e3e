"""loco: a low-communication optimizer for trainers in different places.

    inner = torch.optim.AdamW(model.parameters(), lr=1e-6)
    optimizer = loco.PulseLoCo(inner, sync_every=8)

`help(loco.PulseLoCo)` has a whole training loop.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import VERSION

if TYPE_CHECKING:
    from . import sync
    from .attached import Attached, attach
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
    from .presets import PAPER
    from .report import SyncReport
    from .round.hooks import RoundProgress

__all__ = [
    "PAPER",
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
    "sync",
]
__version__ = VERSION
# Where the public names are. A module is imported when a name of it is first used, so that whoever receives
# weights by `loco.sync` loads nothing of the rounds.
_HOMES = {
    "attached": "Attached attach",
    "checkpoints.checkpoints": "Checkpoints",
    "checkpoints.protocol": "Saveable",
    "checkpoints.restore": "Resumed",
    "errors": "AgreementError AuthenticationError CheckpointError LocoError NonFiniteError PeerError "
    "ReplicaError TransportError WireError",
    "members.sites": "Sites",
    "members.topology": "Topology",
    "members.view": "SiteTopology",
    "optimizer": "DiLoCo LowCommunicationOptimizer PulseLoCo",
    "presets": "PAPER",
    "report": "SyncReport",
    "round.hooks": "RoundProgress",
}


def __getattr__(name: str) -> Any:
    if name == "sync":
        return import_module("loco.sync")
    for module, names in _HOMES.items():
        if name in names.split():
            value = globals()[name] = getattr(import_module(f"loco.{module}"), name)
            return value
    raise AttributeError(f"module 'loco' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
