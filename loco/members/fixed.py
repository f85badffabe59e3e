"""Sites that stay the same, and their links: inside a site (fast) and across the sites (slow)."""

import hashlib
import logging
import struct
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..coordination.authentication import MessageSeals, StoreSeals
from ..coordination.commit import Verdicts
from ..coordination.heartbeats import guarded
from ..coordination.liveness import Liveness
from ..coordination.reconnect_barrier import BarrierContext
from ..coordination.rendezvous import Rendezvous
from ..coordination.store_client import StoreClient, no_store
from ..errors import BUILD_ANEW, AgreementError, TransportError, first_line
from ..logs import warn_once_per_machine
from ..net.introductions import PatientStore
from ..net.linking import link
from ..net.listening import Endpoint
from ..net.mesh import Mesh, NoLinks
from ..net.transport import Transport, listed

CLOSED_BY_USER = "close() was called"
_OPENING = struct.Struct("<?16s")  # is there a key, random bytes
_logger = logging.getLogger(__name__)


class Ranks(Protocol):
    """The ranks of all sites, numbered site by site, as one of them sees them.

    Attributes:
        rank: this one, of 0 … world−1.
        store: by which all agree; each of its clients clones it.
        told: what all ranks have told each other by now, the same on all.
        endpoint: where this rank listens.
        names: of the sites, in their order, if they have names.
        site_group: torch's, of the ranks of this site; None: a single process outside of torch.distributed.
    """

    rank: int
    world: int
    ranks_per_site: int
    told: bytes
    endpoint: Endpoint
    names: tuple[str, ...]

    @property
    def store(self) -> Any: ...

    @property
    def site_group(self) -> dist.ProcessGroup | None: ...

    def all_ranks(self) -> Mesh:
        """Between all ranks, for construction and checkpoints."""
        ...

    def group_mesh(self, device: torch.device) -> Mesh | None:
        """Links inside this site by one of torch's groups, which all ranks build together; None: loco's own
        connections are better."""
        ...

    def close(self) -> None: ...


class FixedSites:
    """The sites of one session: always the same ranks, however often their links are built anew.

    Args:
        ranks: who they are, and how they reach each other.
        timeout, patience, dead_after, repeats, key: as `loco.Topology`.

    Attributes:
        endpoint: where this rank listens.
        store_seals: of what its ranks write into `store`.
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
        self._kind, self._called = what_ranks_are_called(ranks.names, ranks.world, ranks.ranks_per_site)
        # Until all ranks are here nobody is missed, and until they have agreed nothing is sealed.
        self._liveness: Liveness | None = None
        self.closed = ""
        self._key: bytes | None = None
        self._seals: dict[str, MessageSeals] = {}  # by the links' name
        self._session = self._agree(key)
        self._key = key
        store = ranks.store
        self.store_seals = StoreSeals(key, self._session)
        self._verdicts: dict[str, Verdicts] = {}  # over the links in use, by their owner
        # Those links' names, and keys that this rank wrote.
        self._linked: dict[str, tuple[str, list[str]]] = {}
        # Heartbeats name their keys again and again: enough of the session to be nobody else's.
        name, limit, seals = self._session.hex()[:12], self.dead_after, self.store_seals
        try:
            self.store = StoreClient(store, limit=limit)
            liveness = Liveness(store, name, ranks.rank, dead_after=limit, seals=seals)
        except RuntimeError as error:
            raise no_store("topology", store, error) from error
        if 8 * self.store.round_trip > limit:
            text = "the sites' store answers within %.2f s: dead_after must be at least eight times"
            text += " as long, or ranks that live may be taken for dead; it is %g s"
            warn_once_per_machine(_logger, text, self.store.round_trip, limit)
        if liveness.needs_interpreter_lock and ranks.world > 1:
            text = "a rank counts as dead, and the round fails on all, if its program holds Python's "
            text += "interpreter lock for longer than dead_after, %g s, as when it pickles for long (%s)"
            warn_once_per_machine(_logger, text, limit, liveness.needs_interpreter_lock)
        # torch's store asks for the name of every host that connects, and answers nobody until it is told:
        # for seconds, where names are looked up slowly. So nobody listens before all have connected.
        self.all_ranks().swap_records(b"\0", phase="topology", limit=self.patience)
        self._liveness = liveness
        self.rendezvous = Rendezvous(
            BarrierContext(
                store=self.store,
                root=f"loco/{name}/notes",
                seals=self.store_seals,
                liveness=liveness,
                rank=ranks.rank,
                world=ranks.world,
                patience=self.patience,
                named=self._named,
            )
        )
        self.site_group = ranks.site_group

    @property
    def liveness(self) -> Liveness:
        assert self._liveness is not None
        return self._liveness

    def connect(self, device: torch.device, name: str) -> tuple[Transport, Transport]:
        """Links of the caller's own, built by all ranks together: (across the sites, inside the site).

        Nobody else's messages run over them, and `site_group`, which is DDP's, survives when they break.

        Args:
            device: where the caller's tensors live.
            name: "<owner>/<number>": the same on all ranks, and never used before.

        Raises:
            TransportError: a rank was lost while all were building. All can build anew once they have met.
        """
        meshes: list[Mesh] = []
        with guarded(
            self.liveness, self._others, phase="connecting", named=self._named, left_may_return=True
        ) as guard:
            # All have met, and have nothing else to do.
            limit = max(2 * self.dead_after, 20 * self.store.round_trip)
            store = PatientStore(self.store, limit=limit, may_still_come=lambda: guard.loss is None)
            try:
                for inside in (True, False):
                    meshes.append(self._mesh(store, f"loco/{name}", device, inside=inside))
            except RuntimeError as error:
                for mesh in meshes:
                    mesh.close()
                owner = name.rpartition("/")[0]
                linked, keys = self._linked.get(owner, (name, []))
                self._linked[owner] = linked, keys + store.written
                # Whoever could not be reached may have died just now, which its silence has yet to show.
                if guard.notices_within(self.dead_after):
                    raise
                raise TransportError(f"connecting: {first_line(error)}") from error
        self._forget_links_before(name, store.written)
        inside, across = meshes
        return (
            self._transport(across, self._members(inside=False), "site", name, names=self._ranks.names),
            self._transport(inside, self._members(inside=True), "rank of this site", name),
        )

    def _forget_links_before(self, name: str, written: list[str]) -> None:
        """Remove from the store what served to build and to give up their owner's links before these."""
        owner = name.rpartition("/")[0]
        before, self._linked[owner] = self._linked.get(owner), (name, written)
        if before is not None:
            with suppress(RuntimeError):  # a slow store may keep it
                for key in before[1]:
                    self.store.delete_key(key)
                if self._liveness is not None and self.site == self.rank_in_site == 0:
                    self._liveness.forget(before[0])

    def close(self, why: str = "") -> None:
        """Give back what this topology holds: heartbeats, its connections to the store, and `site_group`.

        For a program that goes on without it. An optimizer that is dropped gives back its links by itself; a
        topology that is only dropped keeps `site_group`, which a DistributedDataParallel may still use.

        Args:
            why: if this site goes on with another topology.
        """
        self.closed = self.closed or why or CLOSED_BY_USER
        if self._liveness is not None:
            self._liveness.close(why and f"{why}: {BUILD_ANEW}")
        self.store.close()
        self._ranks.close()

    def disconnect(self, *links: Transport) -> None:
        """Give up links that are of no use any more, so that peers who wait on them learn of it at once."""
        for one in links:
            self._seals.pop(one.mesh.name, None)
            one.close()

    def all_ranks(self) -> Transport:
        """The link to every rank of the world, for messages that fit any memory."""
        every = list(range(self._ranks.world))
        return self._transport(
            self._ranks.all_ranks(), every, self._kind, names=self._called, left_may_return=True
        )

    def _agree(self, key: bytes | None) -> bytes:
        """-> what names this session. Every rank has put random bytes of its own into it, so it is no older
        one: a message of which somebody kept a copy proves nothing in it.
        """
        mine = _OPENING.pack(key is not None, uuid.uuid4().bytes)
        records = self.all_ranks().swap_records(mine, phase="topology", limit=self.patience)
        keyed = [_OPENING.unpack(record)[0] for record in records]
        for rank, has in enumerate(keyed):
            if has != keyed[0]:
                have, lack = (0, rank) if keyed[0] else (rank, 0)
                raise AgreementError(f"{self._named([have])} has a key, {self._named([lack])} has none")
        return hashlib.blake2b(self._ranks.told + b"".join(records), digest_size=16).digest()

    def _named(self, ranks: Sequence[int]) -> str:
        return listed(self._kind, ranks, self._called)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._ranks.world) if rank != self._ranks.rank]

    def _members(self, *, inside: bool) -> list[int]:
        """The ranks of this site, or this rank's peers of all sites."""
        per_site = self.ranks_per_site
        if inside:
            return list(range(self.site * per_site, (self.site + 1) * per_site))
        return list(range(self.rank_in_site, self.num_sites * per_site, per_site))

    def _mesh(self, store: PatientStore, name: str, device: torch.device, *, inside: bool) -> Mesh:
        ranks = self._members(inside=inside)
        if len(ranks) == 1:
            return NoLinks()
        name += f"/site {self.site}" if inside else f"/rank {self.rank_in_site}"
        if inside and (mesh := self._ranks.group_mesh(device)) is not None:
            return mesh
        return link(
            store,
            name,
            ranks.index(self._ranks.rank),
            len(ranks),
            endpoint=self._ranks.endpoint,
            called=lambda other: self._named([ranks[other]]),
        )

    def _transport(
        self,
        mesh: Mesh,
        ranks: list[int],
        member: str,
        link: str = "",
        *,
        names: Sequence[str] = (),
        left_may_return: bool = False,
    ) -> Transport:
        rank = ranks.index(self._ranks.rank)
        return Transport(
            mesh,
            ranks,
            rank,
            liveness=self._liveness,
            timeout=self.timeout,
            patience=self.patience,
            member=member,
            names=names,
            link=link,
            seals=self._seals_of(mesh.name, rank) if mesh.takes_seals else None,
            left_may_return=left_may_return,
        )

    def _seals_of(self, name: str, rank: int) -> MessageSeals | None:
        """One for all links of a name: no two messages may have the same number."""
        if self._key is None:
            return None
        if name not in self._seals:
            self._seals[name] = MessageSeals(self._key, self._session, name, rank)
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
            self.store_seals,
            name,
            clears_up=self.site == self.rank_in_site == 0,
            liveness=self._liveness,
            others=self._others,
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
