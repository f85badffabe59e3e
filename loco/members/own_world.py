"""The world of one site, as if that site were all there is: by it the site's ranks reach each other."""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import AgreementError
from ..net.mesh import GroupMesh, Mesh, any_device, group_device
from .one_world import ensure_process_group


class OwnWorld:
    """`Ranks` of a `FixedSites` of one site: torch's default process group.

    Raises:
        ValueError: neither a process group nor a launcher.
    """

    address = ""
    told = b""

    def __init__(self) -> None:
        ensure_process_group()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.ranks_per_site = self.world

    @property
    def store(self) -> Any:
        return dist.distributed_c10d._get_default_store()

    @property
    def site_group(self) -> dist.ProcessGroup:
        world = dist.group.WORLD
        assert world is not None
        return world

    def everyone(self) -> Mesh:
        return GroupMesh(self.site_group, any_device(self.site_group), owned=False)

    def mesh(self, device: torch.device, *, inside: bool) -> Mesh | None:
        sends = group_device(self.site_group, device)
        if not inside or sends is None:
            return None
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        return GroupMesh(group, sends, owned=True)

    def close(self) -> None:
        pass  # the group is the caller's


def own_world() -> OwnWorld | None:
    """This site's; None if it is a process outside of torch.distributed, which no launcher started as one of
    several."""
    if not (dist.is_available() and dist.is_initialized()) and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    return OwnWorld()


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
