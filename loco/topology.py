"""Which ranks form a site: two process groups, one inside a site (fast), one across the sites (slow)."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .errors import AgreementError, TransportError
from .meeting import meet
from .transport import Transport, any_device


class Topology:
    """Sites of `ranks_per_site` consecutive ranks; by default every rank is a site.

    Build it on every rank, after `init_process_group`. With several ranks per site, let DDP average the
    gradients inside the site, and hand the same topology to the optimizer:

        topology = loco.Topology(ranks_per_site=8)
        model = DistributedDataParallel(model, process_group=topology.site_group)
        optimizer = loco.PulseLoCo(inner, topology=topology)

    Across the sites each rank exchanges its own slice of the flat state with the ranks of the same place
    in the other sites, so that the ranks of a site share the work, the memory and the link.

    Args:
        ranks_per_site: must divide the world size.
        timeout: seconds a rank waits for a message of another one, from the moment it is ready for it until
            the last byte is there, before the round fails. Slow links and big payloads need more.

    Attributes:
        num_sites: R.
        site: this rank's site, 0 … R−1.
        place: this rank's place inside its site, 0 … ranks_per_site−1.
        site_group: the ranks of this site, for DDP.

    Raises:
        ValueError: no process group, or a world that can't be divided so.
    """

    def __init__(self, *, ranks_per_site: int = 1, timeout: float = 300.0) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "loco needs a process group, because its ranks are the sites: launch with "
                "`torchrun --nproc-per-node 4 your_script.py` and call "
                "torch.distributed.init_process_group() before you build the optimizer"
            )
        world = dist.get_world_size()
        if ranks_per_site < 1:
            raise ValueError(f"ranks_per_site must be >= 1, got {ranks_per_site}")
        if timeout <= 0:
            raise ValueError(f"timeout must be > 0 seconds, got {timeout}")
        if world % ranks_per_site:
            raise ValueError(
                f"the world's {world} ranks can't be divided into sites of {ranks_per_site}: "
                f"ranks_per_site must divide the world size"
            )
        self.ranks_per_site = ranks_per_site
        self.timeout = float(timeout)
        self.num_sites = world // ranks_per_site
        self.site, self.place = divmod(dist.get_rank(), ranks_per_site)
        self._agree(world)

        self.site_group: dist.ProcessGroup = self._groups(inside=True)

    def connect(self, device: torch.device, *, meet_as: str | None = None) -> tuple[Transport, Transport]:
        """Links of the caller's own, built by all ranks together: (across the sites, inside the site).

        Nobody else's messages run over them, and `site_group`, which is DDP's, survives when they break.

        Args:
            device: where the caller's tensors live.
            meet_as: the caller's name, the same on all ranks and nobody else's, after a failure, when ranks
                may come late or not at all. A group that lost a message can't be used any more, and
                torch names groups by counting: all ranks must build them, or none.

        Raises:
            TransportError: not all ranks came within the timeout, and nothing was built; or one was lost
                while they built, after which only a restart helps.
        """
        if meet_as is not None:
            store = dist.distributed_c10d._get_default_store()
            world = dist.get_world_size()
            meet(store, f"loco/{meet_as}", dist.get_rank(), world, self.timeout)
        try:
            inside = self._groups(inside=True) if self.ranks_per_site > 1 else self.site_group
            across = self._groups(inside=False)
        except RuntimeError as error:
            raise TransportError(
                f"connecting: a rank was lost while all were building their links ({error}); restart the "
                f"run from its last checkpoints"
            ) from error
        return self._transport(across, device, "site"), self._transport(inside, device, "rank of this site")

    def disconnect(self, *links: Transport) -> None:
        """Give up links that are of no use any more, so that peers who wait on them learn of it at once."""
        for link in links:
            if link.group is not self.site_group:
                link.close()

    def everyone(self) -> Transport:
        """The link to every rank of the world, for messages that fit any memory."""
        world = dist.group.WORLD
        assert world is not None
        return self._transport(world, any_device(world), "rank")

    def _agree(self, world: int) -> None:
        """Groups are built by all ranks together: ranks that disagree would wait for each other."""
        mine = self.ranks_per_site.to_bytes(4, "little")
        sizes = self.everyone().swap_records(mine, phase="topology")
        for rank, size in enumerate(sizes):
            if size != sizes[0]:
                raise AgreementError(
                    f"ranks_per_site differs: rank 0 has {int.from_bytes(sizes[0], 'little')}, "
                    f"rank {rank} of {world} has {int.from_bytes(size, 'little')}"
                )

    def _groups(self, *, inside: bool) -> Any:
        """Build the groups of all sites, or of all places -> this rank's."""
        sites, places = range(self.num_sites), range(self.ranks_per_site)
        at = [[site * self.ranks_per_site + place for place in places] for site in sites]
        members = at if inside else [list(column) for column in zip(*at, strict=True)]
        limit = timedelta(seconds=self.timeout)
        groups = [dist.new_group(ranks, timeout=limit) for ranks in members]
        return groups[self.site if inside else self.place]

    def _transport(self, group: dist.ProcessGroup, device: torch.device, member: str) -> Transport:
        return Transport(group, device=device, timeout=self.timeout, member=member)

    def __repr__(self) -> str:
        return (
            f"Topology(ranks_per_site={self.ranks_per_site}, timeout={self.timeout:g}): "
            f"{self.num_sites} sites, this is site {self.site}, place {self.place}"
        )
