"""All sites in one world: torch's default process group, whose ranks form them."""

import itertools
import os
import sys
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from ..coordination.store_client import address_towards
from ..net.linking import link_ranks
from ..net.listening import Endpoint, outward_address
from ..net.mesh import GroupMesh, Mesh, Subset, group_device
from ..net.transport import Transport
from .arrangement import NO_REPORT, PeerReport, arrange, consecutive_peers, peers_in_mesh

_SET_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_worlds = itertools.count()
_MASTER = 5.0  # seconds, to reach the world's store
_GROUP = 60.0  # seconds at least, of torch's groups: a loaded machine may need them to build one


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


def in_world(endpoint: Endpoint) -> Endpoint:
    """At the address by which this machine reaches the world's store: that of its name may lead nowhere."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        return endpoint
    try:
        found = address_towards(host, int(port), _MASTER)
    except RuntimeError:  # the store may be elsewhere
        return endpoint
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ip_address(found).is_loopback and os.environ.get("LOCAL_WORLD_SIZE", ranks) != ranks:
        return endpoint.at(outward_address() or found)  # the store's own machine, for those on others
    return endpoint.at(found)


def link_world(patience: float, endpoint: Endpoint) -> Mesh:
    """Links between all ranks of the default process group, which all call it equally often."""
    name = f"loco: all ranks {next(_worlds)}"
    store = dist.distributed_c10d._get_default_store()
    return link_ranks(store, name, dist.get_rank(), dist.get_world_size(), limit=patience, endpoint=endpoint)


class OneWorld:
    """Sites that are ranks of the default process group. `Ranks` of a `FixedSites`.

    Here and in torch's groups a rank has torch's number. To `FixedSites` the ranks are numbered site by site,
    which differs where a mesh says who forms a site.

    Args:
        ranks_per_site: consecutive ranks form a site; None: as `mesh` says, or one.
        mesh: of the ranks of the same number in each site.
        endpoint: where this rank listens.
        timeout: seconds, of the groups that torch builds.
        patience: seconds to wait for the other ranks.

    Raises:
        ValueError: neither a process group nor a launcher, or a world that can't be divided so.
        AgreementError: the ranks do not agree on who forms a site.
        TransportError: a rank did not come.
    """

    names = ()

    def __init__(
        self,
        ranks_per_site: int | None,
        mesh: DeviceMesh | None,
        *,
        endpoint: Endpoint,
        timeout: float,
        patience: float,
    ) -> None:
        ensure_process_group()
        self.endpoint = in_world(endpoint)
        self.world = dist.get_world_size()
        self._timeout = timedelta(seconds=max(timeout, _GROUP))
        self._site_group: dist.ProcessGroup | None = None
        self._all_ranks = link_world(patience, self.endpoint)
        try:
            told = self._tell(ranks_per_site, mesh, timeout, patience)
        except BaseException:  # a traceback that is kept holds this object
            self._all_ranks.close()
            raise
        self.told = b"".join(told)
        self._sites = arrange(told)
        self._order = [rank for site in self._sites for rank in site]
        self.rank = self._order.index(dist.get_rank())
        self.ranks_per_site = len(self._sites[0])

    @property
    def store(self) -> Any:
        return dist.distributed_c10d._get_default_store()

    @property
    def site_group(self) -> dist.ProcessGroup:
        """The ranks of this site; all ranks build it together, at the first look."""
        if self._site_group is None:
            self._site_group = self._new_group(self._sites)
        return self._site_group

    def all_ranks(self) -> Mesh:
        return Subset(self._all_ranks, self._order, close=self._all_ranks.close)

    def group_mesh(self, device: torch.device) -> Mesh | None:
        world = dist.group.WORLD
        assert world is not None
        sends = group_device(world, device)
        if sends is None:
            return None
        # NCCL connects later, and then still needs torch's store.
        mesh = GroupMesh(group := self._new_group(self._sites), sends)
        # torch numbers the members of a group by their ranks.
        mine = next(ranks for ranks in self._sites if dist.get_rank() in ranks)
        return Subset(mesh, [dist.get_group_rank(group, rank) for rank in mine], close=mesh.close)

    def close(self) -> None:
        self._all_ranks.close()
        if self._site_group is not None:
            with suppress(ValueError, RuntimeError):  # the process group was destroyed before
                dist.destroy_process_group(self._site_group)
            self._site_group = None

    def _tell(
        self, ranks_per_site: int | None, mesh: DeviceMesh | None, timeout: float, patience: float
    ) -> list[bytes]:
        """Of all ranks, by torch's numbers, who their peers are: a mesh knows those of this rank only.

        A rank whose arguments are refused says so before it raises, so that the others do not wait for it.
        """
        rank, failure, report = dist.get_rank(), None, NO_REPORT
        try:
            if mesh is not None:
                if ranks_per_site is not None:
                    raise ValueError(
                        "a mesh says how many ranks a site has: give mesh or ranks_per_site, not both"
                    )
                peers = peers_in_mesh(mesh, rank, self.world)
            else:
                each = 1 if ranks_per_site is None else ranks_per_site
                peers = consecutive_peers(each, rank, self.world)
            report = PeerReport.of(peers, rank).pack()
        except ValueError as error:
            failure = error
        all_ranks = Transport(
            self._all_ranks,
            range(self.world),
            rank,
            liveness=None,
            timeout=timeout,
            patience=patience,
            member="rank",
        )
        told = all_ranks.swap_records(report, phase="topology", limit=patience)
        if failure is not None:
            raise failure
        return told

    def _new_group(self, members: list[list[int]]) -> dist.ProcessGroup:
        """torch has all ranks build all groups in one order."""
        group, _ = dist.new_subgroups_by_enumeration(members, timeout=self._timeout)
        assert isinstance(group, dist.ProcessGroup)  # this rank is in one of them
        return group
