"""How entries travel: gathered, or added up by slices and sent back; frame by frame.

An exchange takes this site's entries and returns contributions that, added up in order, are the sum over all
sites in site order. Which exchange, and in which code, changes no bit of the sum.
"""

from collections.abc import Callable

from loco.kernels import Entries

from .enclosed import open_enclosed
from .gather import gather
from .owner_reduce import owner_reduce
from .transfer import Transfer

Exchange = Callable[[Transfer, Entries, int], list[Entries]]

# By name. Dense is the owner's exchange with every element: the transfer's code says which.
EXCHANGES: dict[str, Exchange] = {"gather": gather, "owner": owner_reduce, "dense": owner_reduce}

__all__ = ["EXCHANGES", "Exchange", "Transfer", "open_enclosed"]
