"""Sites that stay the same, and their links: inside a site (fast) and across the sites (slow)."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..coordination.authentication import MessageSeals
from ..coordination.commit import Verdicts
from ..coordination.reconnect_barrier import BarrierContext
from ..coordination.rendezvous import Rendezvous
from ..errors import BUILD_ANEW
from ..logs import warn_once_per_machine
from ..net.introductions import PatientStore
from ..net.listening import Endpoint
from ..net.mesh import Mesh, NoLinks
from ..net.peers import Peers
from ..net.transport import Transport

CLOSED_BY_USER = "close() was called"
START_ANSWERS = 60.0  # seconds that a store may take at a start, when all ranks ask it at once
_logger = logging.getLogger(__name__)


class Ranks(Protocol):
    """The ranks of all sites, numbered site by site, as one of them sees them.

    Attributes:
        rank: this one, of 0 … world−1.
        store: by which all agree; each of its clients clones it.
        name: of all of them together, and of no others that ever met in this store.
        told: what all ranks have told each other by now, the same on all.
        within: seconds for all to come.
        endpoint: where this rank listens.
        names: of the sites, in their order, if they have names.
        site_group: torch's, of the ranks of this site; None: a single process outside of torch.distributed.
    """

    rank: int
    world: int
    ranks_per_site: int
    name: str
    told: bytes
    within: float
    endpoint: Endpoint
    names: tuple[str, ...]

    @property
    def store(self) -> Any: ...

    @property
    def site_group(self) -> dist.ProcessGroup | None: ...

    def group_mesh(self, device: torch.device) -> Mesh | None:
        """Links inside this site by one of torch's groups, which all ranks build together; None: loco's own
        connections are better."""
        ...

    def close(self) -> None: ...


def peers_of(ranks: Ranks, *, timeout: float, patience: float, dead_after: float, key: bytes | None) -> Peers:
    """All of these, who reach each other from now on.

    Raises:
        AgreementError, TransportError: as `Peers`.
    """
    kind, called = what_ranks_are_called(ranks.names, ranks.world, ranks.ranks_per_site)
    return Peers(
        ranks.store,
        ranks.name,
        ranks.rank,
        called=called,
        kind=kind,
        endpoint=ranks.endpoint,
        timeout=timeout,
        patience=patience,
        dead_after=dead_after,
        within=ranks.within,
        answers=max(dead_after, START_ANSWERS),
        links_within=max(2 * dead_after, START_ANSWERS),
        key=key,
        told=ranks.told,
    )


class FixedSites:
    """The sites of one session: always the same ranks, however often their links are built anew.

    Args:
        ranks: who they are, and how they reach each other.
        timeout, patience, dead_after, repeats, key: as `loco.Topology`.

    Attributes:
        endpoint: where this rank listens.
        peers: all ranks.
        closed: why it is closed; "" as long as it is open.

    Raises:
        AgreementError: not all ranks have a key.
        TransportError: a rank did not come, or the store does not answer.
    """

    is_elastic = False

    def __init__(
        self,
        ranks: Ranks,
        *,
        timeout: float,
        patience: float,
        dead_after: float,
        repeats: int,
        key: bytes | None,
    ) -> None:
        self._ranks, self.endpoint = ranks, ranks.endpoint
        self.ranks_per_site = ranks.ranks_per_site
        self.timeout = float(timeout)
        self.patience = float(patience)
        self.dead_after = float(dead_after)
        self.repeats = repeats
        self.num_sites = ranks.world // ranks.ranks_per_site
        self.site, self.rank_in_site = divmod(ranks.rank, ranks.ranks_per_site)
        self.closed = ""
        self._seals: dict[str, MessageSeals | None] = {}  # by the links' name
        self._verdicts: dict[str, Verdicts] = {}  # over the links in use, by their owner
        # Those links' names, and keys that this rank wrote.
        self._linked: dict[str, tuple[str, list[str]]] = {}
        self.peers = peers_of(
            ranks, timeout=self.timeout, patience=self.patience, dead_after=self.dead_after, key=key
        )
        self.store, self.liveness = self.peers.store, self.peers.liveness
        if 8 * self.store.round_trip > self.dead_after:
            text = "the sites' store answers within %.2f s: dead_after must be at least eight times"
            text += " as long, or ranks that live may be taken for dead; it is %g s"
            warn_once_per_machine(_logger, text, self.store.round_trip, self.dead_after)
        if self.liveness.needs_interpreter_lock and ranks.world > 1:
            text = "a rank counts as dead, and the round fails on all, if its program holds Python's "
            text += "interpreter lock for longer than dead_after, %g s, as when it pickles for long (%s)"
            warn_once_per_machine(_logger, text, self.dead_after, self.liveness.needs_interpreter_lock)
        self.rendezvous = Rendezvous(
            BarrierContext(
                store=self.store,
                root=f"{self.peers.root}/notes",
                seals=self.peers.seals,
                liveness=self.liveness,
                rank=ranks.rank,
                world=ranks.world,
                patience=self.patience,
                named=self.peers.named,
            )
        )
        self.site_group = ranks.site_group

    def connect(self, device: torch.device, name: str) -> tuple[Transport, Transport]:
        """Links of the caller's own, built by all ranks together: (across the sites, inside the site).

        Nobody else's messages run over them, and `site_group`, which is DDP's, survives when they break.

        Args:
            device: where the caller's tensors live.
            name: "<owner>/<number>": the same on all ranks, and never used before.

        Raises:
            TransportError: a rank was lost while all were building. All can build anew once they have met.
        """
        owner, meshes, written = name.rpartition("/")[0], list[Mesh](), list[str]()
        # All have met, and have nothing else to do.
        limit = max(2 * self.dead_after, 20 * self.store.round_trip)
        try:
            with self.peers.linking("connecting", limit) as by:
                written = by.written
                meshes += [self._mesh(by, f"loco/{name}", device, inside=inside) for inside in (True, False)]
        except BaseException:
            for mesh in meshes:
                mesh.close()
            linked, keys = self._linked.get(owner, (name, []))
            self._linked[owner] = linked, keys + written
            raise
        self._forget_links_before(name, written)
        inside, across = meshes
        return (
            self._transport(across, self._members(inside=False), "site", name, self._ranks.names),
            self._transport(inside, self._members(inside=True), "rank of this site", name, ()),
        )

    def _forget_links_before(self, name: str, written: list[str]) -> None:
        """Remove from the store what served to build and to give up their owner's links before these."""
        owner = name.rpartition("/")[0]
        before, self._linked[owner] = self._linked.get(owner), (name, written)
        if before is not None:
            with suppress(RuntimeError):  # a slow store may keep it
                for key in before[1]:
                    self.store.delete_key(key)
                if self._ranks.rank == 0:
                    self.liveness.forget(before[0])

    def close(self, why: str = "") -> None:
        """Give back what this topology holds: heartbeats, its connections to the store, and `site_group`.

        For a program that goes on without it. An optimizer that is dropped gives back its links by itself; a
        topology that is only dropped keeps `site_group`, which a DistributedDataParallel may still use.

        Args:
            why: if this site goes on with another topology.
        """
        self.closed = self.closed or why or CLOSED_BY_USER
        self.peers.close(why and f"{why}: {BUILD_ANEW}")
        self._ranks.close()

    def disconnect(self, *links: Transport) -> None:
        """Give up links that are of no use any more, so that peers who wait on them learn of it at once."""
        for one in links:
            self._seals.pop(one.mesh.name, None)
            one.close()

    def all_ranks(self) -> Transport:
        """The link to every rank of the world, for messages that fit any memory."""
        peers = self.peers
        seals = self._seals_of(peers.root, peers.rank)
        return peers.transport(peers.mesh, range(peers.size), seals=seals, left_may_return=True)

    def _members(self, *, inside: bool) -> list[int]:
        """The ranks of this site, or this rank's peers of all sites."""
        per_site = self.ranks_per_site
        if inside:
            return list(range(self.site * per_site, (self.site + 1) * per_site))
        return list(range(self.rank_in_site, self.num_sites * per_site, per_site))

    def _mesh(self, by: PatientStore, name: str, device: torch.device, *, inside: bool) -> Mesh:
        ranks = self._members(inside=inside)
        if len(ranks) == 1:
            return NoLinks()
        if inside and (mesh := self._ranks.group_mesh(device)) is not None:
            return mesh
        name += f"/site {self.site}" if inside else f"/rank {self.rank_in_site}"
        return self.peers.link(name, ranks, by)

    def _transport(
        self, mesh: Mesh, ranks: list[int], member: str, link: str, names: Sequence[str]
    ) -> Transport:
        seals = self._seals_of(mesh.name, ranks.index(self.peers.rank)) if mesh.takes_seals else None
        return self.peers.transport(mesh, ranks, member=member, names=names, link=link, seals=seals)

    def _seals_of(self, name: str, rank: int) -> MessageSeals | None:
        """One for all links of a name: no two messages may have the same number."""
        if name not in self._seals:
            self._seals[name] = self.peers.message_seals(name, rank)
        return self._seals[name]

    def seat(self) -> dict[str, Any]:
        """Who this rank is, as its state remembers it."""
        names = ("site", "num_sites", "rank_in_site", "ranks_per_site")
        return {name: getattr(self, name) for name in names}

    def verdicts(self, name: str) -> Verdicts:
        """On the rounds over one set of links, called "<owner>/<number of the meeting before it>".

        All ranks have met, so none asks for the verdicts over its owner's links of before.
        """
        owner = name.rpartition("/")[0]
        if owner in self._verdicts:
            self._verdicts.pop(owner).close()
        self._verdicts[owner] = Verdicts(
            self.store,
            self.peers.seals,
            name,
            clears_up=self.peers.rank == 0,
            liveness=self.liveness,
            others=self.peers.others,
        )
        return self._verdicts[owner]


def what_ranks_are_called(names: Sequence[str], world: int, each: int) -> tuple[str, tuple[str, ...]]:
    """-> what a rank is, and each one's name. A site of one rank has the site's name. loco numbers the ranks
    of one world; where each site has a world of its own, a rank has its number in that.

    Args:
        names: of the sites, if they have names.
        each: ranks of a site.
    """
    sites = names or tuple(map(str, range(world)))
    if each == 1:
        return "site", tuple(sites)
    return "rank", tuple(
        f"{rank % each if names else rank} of site {sites[rank // each]}" for rank in range(world)
    )
