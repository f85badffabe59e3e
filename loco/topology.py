"""Which ranks form a site: two process groups, one inside a site (fast), one across the sites (slow)."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .errors import AgreementError
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
        timeout: seconds a rank waits for a message of another one before the round fails.

    Attributes:
        num_sites: R.
        site: this rank's site, 0 … R−1.
        place: this rank's place inside its site, 0 … ranks_per_site−1.
        site_group: the ranks of this site.
        cross_group: the ranks of this place in all sites, in site order.

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

        sites, places = range(self.num_sites), range(ranks_per_site)
        site_groups = [self._group([s * ranks_per_site + p for p in places]) for s in sites]
        cross_groups = [self._group([s * ranks_per_site + p for s in sites]) for p in places]
        self.site_group: dist.ProcessGroup = site_groups[self.site]
        self.cross_group: dist.ProcessGroup = cross_groups[self.place]

    def transports(self, device: torch.device) -> tuple[Transport, Transport]:
        """The links of this rank: (across the sites, inside the site)."""
        across = Transport(self.cross_group, device=device, timeout=self.timeout, member="site")
        inside = Transport(self.site_group, device=device, timeout=self.timeout, member="rank of this site")
        return across, inside

    def everyone(self, device: torch.device) -> Transport:
        """The link to every rank of the world."""
        world = dist.group.WORLD
        assert world is not None
        return Transport(world, device=device, timeout=self.timeout, member="rank")

    def _agree(self, world: int) -> None:
        """Groups are built by all ranks together: ranks that disagree would wait for each other."""
        group = dist.group.WORLD
        assert group is not None
        sizes = self.everyone(any_device(group)).swap_records(
            self.ranks_per_site.to_bytes(4, "little"), phase="topology"
        )
        for rank, size in enumerate(sizes):
            if size != sizes[0]:
                raise AgreementError(
                    f"ranks_per_site differs: rank 0 has {int.from_bytes(sizes[0], 'little')}, "
                    f"rank {rank} of {world} has {int.from_bytes(size, 'little')}"
                )

    def _group(self, ranks: list[int]) -> Any:
        # torch's annotation also allows the placeholder that ranks outside of the group get.
        return dist.new_group(ranks, timeout=timedelta(seconds=self.timeout))

    def __repr__(self) -> str:
        return (
            f"Topology(ranks_per_site={self.ranks_per_site}, timeout={self.timeout:g}): "
            f"{self.num_sites} sites, this is site {self.site}, place {self.place}"
        )
