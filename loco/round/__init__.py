"""One round over some parameters among some members, and the state that it changes."""

from torch.optim import Optimizer

from ..config import Settings
from ..exchange.conversation import WireConfig
from ..members.fixed import Topology
from .elastic_loop import ElasticLoop
from .loop import OuterLoop


def outer_loop(
    inner: Optimizer, settings: Settings, topology: Topology, wire: WireConfig, *, offload: bool
) -> OuterLoop:
    """The rounds among a topology's sites, which tells whether these can change between two rounds."""
    loop = ElasticLoop if topology.members_change else OuterLoop
    return loop(inner, settings, topology, wire, offload=offload)  # pyright: ignore[reportArgumentType]
