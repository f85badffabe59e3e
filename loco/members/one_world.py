"""All sites in one world: torch's default process group, whose ranks form them."""

import os
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..net.mesh import GroupMesh, Mesh, any_device, only_gloo, wire_device

_SET_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ensure_process_group() -> None:
    """Initialise the default process group as the launcher describes it, unless the caller has done so.

    Raises:
        ValueError: there is none, and no launcher has said which ranks there are.
    """
    if not dist.is_available():
        raise ValueError("loco needs torch.distributed, which this build of torch was made without")
    if dist.is_initialized():
        return
    missing = [name for name in _SET_BY_LAUNCHERS if name not in os.environ]
    if missing:
        script = Path(sys.argv[0]).name
        if not script.endswith(".py") or script == "__main__.py":  # an interactive session, or `python -m`
            script = "your_script.py"
        raise ValueError(
            f"nobody says who the sites are: give this one a name, their number and where they meet "
            f"(LOCO_SITE=berlin LOCO_SITES=2 LOCO_AT=10.0.0.1:29510 python {script}, see loco.Sites), or let "
            f"every rank of one world be a site (torchrun --nproc-per-node 4 {script}; {missing[0]} is not "
            f"set, so no launcher has started this process)"
        )
    # torchrun's store outlives its workers, and gloo would read in it where those before a restart listened.
    store, rank, world = next(rendezvous("env://"))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(store=PrefixStore(f"start {start}", store), rank=rank, world_size=world)


class OneWorld:
    """Sites of `ranks_per_site` consecutive ranks of the default process group. `Ranks` of a `FixedSites`.

    Args:
        timeout: seconds, of the groups that torch builds.

    Raises:
        ValueError: neither a process group nor a launcher, or a world that can't be divided so.
    """

    address = ""

    def __init__(self, ranks_per_site: int, timeout: float) -> None:
        ensure_process_group()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if ranks_per_site < 1:
            raise ValueError(f"ranks_per_site must be >= 1, got {ranks_per_site}")
        if self.world % ranks_per_site:
            raise ValueError(
                f"the world's {self.world} ranks can't be divided into sites of {ranks_per_site}: "
                f"ranks_per_site must divide the world size"
            )
        self.ranks_per_site = ranks_per_site
        self._timeout = timedelta(seconds=timeout)
        self._site_group: dist.ProcessGroup | None = None

    @property
    def store(self) -> Any:
        return dist.distributed_c10d._get_default_store()

    @property
    def site_group(self) -> dist.ProcessGroup:
        """The ranks of this site; all ranks build it together, at the first look."""
        if self._site_group is None:
            self._site_group = self._new_group(inside=True)
        return self._site_group

    def everyone(self) -> Mesh:
        world = dist.group.WORLD
        assert world is not None
        return GroupMesh(world, any_device(world), owned=False)

    def mesh(self, device: torch.device, *, inside: bool) -> Mesh | None:
        world = dist.group.WORLD
        assert world is not None
        if only_gloo():
            return None
        sends = wire_device(world, device)
        # NCCL connects later, and then still needs torch's store.
        return GroupMesh(self._new_group(inside=inside), sends, owned=True)

    def close(self) -> None:
        if self._site_group is not None:
            with suppress(ValueError, RuntimeError):  # the process group was destroyed before
                dist.destroy_process_group(self._site_group)
            self._site_group = None

    def _new_group(self, *, inside: bool) -> dist.ProcessGroup:
        """torch has all ranks build all groups in one order."""
        each = self.ranks_per_site
        at = [[first + k for k in range(each)] for first in range(0, self.world, each)]
        members = at if inside else [list(column) for column in zip(*at, strict=True)]
        group, _ = dist.new_subgroups_by_enumeration(members, timeout=self._timeout)
        assert isinstance(group, dist.ProcessGroup)  # this rank is in one of them
        return group
