"""loco: an optimizer for trainers that sit in different places.

inner = torch.optim.AdamW(model.parameters(), lr=1e-6)
optimizer = loco.PulseLoCo(inner, sync_every=8)
"""

from .errors import (
    AgreementError,
    LocoError,
    NonFiniteError,
    PeerError,
    ReplicaError,
    TransportError,
    WireError,
)
from .optimizer import DiLoCo, PulseLoCo
from .presets import MATCHING, SAVING
from .report import SyncReport
from .topology import Topology

__all__ = [
    "MATCHING",
    "SAVING",
    "AgreementError",
    "DiLoCo",
    "LocoError",
    "NonFiniteError",
    "PeerError",
    "PulseLoCo",
    "ReplicaError",
    "SyncReport",
    "Topology",
    "TransportError",
    "WireError",
]
__version__ = "0.1.0"
