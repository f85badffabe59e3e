"""The world of one site, as if that site were all there is: by it the site's ranks reach each other."""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import AgreementError
from ..net.listening import Endpoint
from ..net.mesh import GroupMesh, Mesh, group_device
from .one_world import ensure_process_group, in_world, link_world


class OwnWorld:
    """`Ranks` of a `FixedSites` of one site: torch's default process group.

    Args:
        patience: seconds to wait for its other ranks.
        site: its name.
        endpoint: where this rank listens.

    Raises:
        ValueError: neither a process group nor a launcher.
    """

    told = b""

    def __init__(self, patience: float, site: str, endpoint: Endpoint) -> None:
        ensure_process_group()
        self.endpoint = in_world(endpoint)
        self.names = (site,)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.ranks_per_site = self.world
        self._patience = patience
        self._all_ranks: Mesh | None = None

    @property
    def store(self) -> Any:
        return dist.distributed_c10d._get_default_store()

    @property
    def site_group(self) -> dist.ProcessGroup:
        world = dist.group.WORLD
        assert world is not None
        return world

    def all_ranks(self) -> Mesh:
        if self._all_ranks is None:
            self._all_ranks = link_world(self._patience, self.endpoint)
        return self._all_ranks

    def group_mesh(self, device: torch.device) -> Mesh | None:
        sends = group_device(self.site_group, device)
        if sends is None:
            return None
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        return GroupMesh(group, sends)

    def close(self) -> None:
        """The group is the caller's."""
        if self._all_ranks is not None:
            self._all_ranks.close()


def own_world(patience: float, site: str, endpoint: Endpoint) -> OwnWorld | None:
    """This site's; None if it is a process outside of torch.distributed, which no launcher started as one of
    several."""
    if not (dist.is_available() and dist.is_initialized()) and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    return OwnWorld(patience, site, endpoint)


def check_one_site(each: Sequence[object], what: str) -> None:
    """
    Args:
        each: what each rank of this world was started with.
        what: that is.

    Raises:
        AgreementError: they differ.
    """
    for rank, theirs in enumerate(each):
        if theirs != each[0]:
            raise AgreementError(
                f"rank 0 of this world was started with {each[0]} ({what}), rank {rank} with {theirs}: every "
                f"site needs a world, so a torchrun, of its own"
            )
