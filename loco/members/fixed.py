"""Which ranks of one world form a site, and their links: inside a site (fast) and across the sites (slow)."""

import hashlib
import logging
import struct
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..coordination.authentication import LEAST_KEY_BYTES, MessageSeals, StoreSeals
from ..coordination.commit import Verdicts
from ..coordination.guard import guarded
from ..coordination.heartbeats import Heartbeats
from ..coordination.liveness import Liveness
from ..coordination.rendezvous import Rendezvous
from ..coordination.reunion import Party
from ..coordination.store_client import StoreClient
from ..errors import AgreementError, TransportError, first_line, no_store
from ..logs import warn_once_per_machine
from ..net.linking import TRIES, PatientStore, link
from ..net.mesh import GroupMesh, Mesh, NoLinks, any_device, only_gloo, wire_device
from ..net.transport import Transport, listed
from .process_group import ensure_process_group
from .world import WorldMembership

_OPENING = struct.Struct("<I?16s")  # ranks_per_site, is there a key, random bytes
_logger = logging.getLogger(__name__)


class Topology:
    """Sites of `ranks_per_site` consecutive ranks; by default every rank is a site.

    Build it on every rank. It calls `torch.distributed.init_process_group()` if you have not. With several
    ranks per site, let DDP average the gradients inside the site, and give the optimizer the same topology:

        topology = loco.Topology(ranks_per_site=8)
        model = DistributedDataParallel(model, process_group=topology.site_group)
        optimizer = loco.PulseLoCo(inner, topology=topology)

    Across the sites each rank exchanges its own slice of the flat state with the ranks of the same
    number in the other sites, so that the ranks of a site share the work, the memory and the link.

    Args:
        ranks_per_site: must divide the world size.
        timeout: seconds a rank waits for a message of another one that is alive, from the moment it is ready
            for it until the last byte is there, before the round fails. Slow links and big payloads need
            more.
        patience: seconds it waits at the start of a round for a rank that is alive and still computing.
        dead_after: seconds within which a rank that is waited for and gives no sign of life, because its
            process is dead or stopped or its link is cut, fails the round.
        repeats: how often a round whose links were lost, between ranks that live, is tried again over new
            ones before it fails. A link that is idle for minutes may be cut by whatever it passes through.
        key: at least 16 bytes that all ranks share and nobody else knows: every message then proves that it
            is genuine. For links that others can write to; it hides nothing (SECURITY.md).

    Attributes:
        num_sites: R.
        site: this rank's site, 0 … R−1.
        rank_in_site: this rank's number inside its site, 0 … ranks_per_site−1.
        site_group: the ranks of this site, for DDP.
        notes: by which all ranks agree outside of rounds.

    Raises:
        ValueError: neither a process group nor a launcher, or a world that can't be divided so.
        TransportError: a rank did not come, or the process group's store does not answer.
    """

    def __init__(
        self,
        *,
        ranks_per_site: int = 1,
        timeout: float = 300.0,
        patience: float = 600.0,
        dead_after: float = 5.0,
        repeats: int = 2,
        key: bytes | None = None,
    ) -> None:
        ensure_process_group()
        world = dist.get_world_size()
        if ranks_per_site < 1:
            raise ValueError(f"ranks_per_site must be >= 1, got {ranks_per_site}")
        for name, value in (("timeout", timeout), ("patience", patience), ("dead_after", dead_after)):
            if not value > 0:
                raise ValueError(f"{name} must be > 0 seconds, got {value}")
        if world % ranks_per_site:
            raise ValueError(
                f"the world's {world} ranks can't be divided into sites of {ranks_per_site}: "
                f"ranks_per_site must divide the world size"
            )
        self.ranks_per_site = ranks_per_site
        self.timeout = float(timeout)
        self.patience = float(patience)
        if repeats < 0:
            raise ValueError(f"repeats must be >= 0, got {repeats}")
        self.dead_after = float(dead_after)
        self.repeats = repeats
        self.num_sites = world // ranks_per_site
        self.site, self.rank_in_site = divmod(dist.get_rank(), ranks_per_site)
        if key is not None and len(key) < LEAST_KEY_BYTES:
            raise ValueError(f"key must have at least {LEAST_KEY_BYTES} bytes, got {len(key)}")
        # Until all ranks are here nobody is missed, and until they have agreed nothing is sealed.
        self._liveness: Liveness | None = None
        self._key: bytes | None = None
        self._seals: dict[str, MessageSeals] = {}  # by the links' name
        self._session = self._agree(world, key)
        self._key = key
        store = dist.distributed_c10d._get_default_store()
        self._store_seals = StoreSeals(key, self._session)
        self._verdicts: dict[str, Verdicts] = {}  # over the links in use, by their owner
        # Those links' names, and keys that this rank wrote.
        self._linked: dict[str, tuple[str, list[str]]] = {}
        name, limit, seals = self._session.hex(), self.dead_after, self._store_seals
        try:
            self.store = StoreClient(store, limit=limit)
            liveness = Liveness(store, name, dist.get_rank(), dead_after=limit, seals=seals)
        except RuntimeError as error:
            raise no_store("topology", error) from error
        if 8 * self.store.round_trip > limit:
            text = "the process group's store answers within %.2f s: dead_after must be at least eight times"
            text += " as long, or ranks that live may be taken for dead; it is %g s"
            warn_once_per_machine(_logger, text, self.store.round_trip, limit)
        # torch's store asks for the name of every host that connects, and answers nobody until it is told:
        # for seconds, where names are looked up slowly. So nobody listens before all have connected.
        self.everyone().swap_records(b"\0", phase="topology", limit=self.patience)
        self._liveness = liveness
        self.notes = Rendezvous(
            Party(
                store=self.store,
                root=f"loco/{self._session.hex()}/notes",
                seals=self._store_seals,
                liveness=liveness,
                rank=dist.get_rank(),
                world=world,
                patience=self.patience,
                named=self._named,
            )
        )
        self.site_group = self._new_group(inside=True)

    @property
    def liveness(self) -> Heartbeats:
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
            self.liveness, self._others, phase="connecting", named=self._named, reunion=True
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
            self._transport(across, self._members(inside=False), "site", name),
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

    def close(self) -> None:
        """Give back what this topology holds: heartbeats, its connections to the store, and `site_group`.

        For a program that goes on without it. An optimizer that is dropped gives back its links by itself; a
        topology that is only dropped keeps `site_group`, which a DistributedDataParallel may still use.
        """
        if self._liveness is not None:
            self._liveness.close()
        self.store.close()
        with suppress(ValueError, RuntimeError):  # it was closed, or the process group was destroyed, before
            dist.destroy_process_group(self.site_group)

    def disconnect(self, *links: Transport) -> None:
        """Give up links that are of no use any more, so that peers who wait on them learn of it at once."""
        for one in links:
            self._seals.pop(one.mesh.name, None)
            one.close()

    def everyone(self) -> Transport:
        """The link to every rank of the world, for messages that fit any memory."""
        world = dist.group.WORLD
        assert world is not None
        mesh = GroupMesh(world, any_device(world), owned=False)
        return self._transport(mesh, list(range(dist.get_world_size())), "rank", reunion=True)

    def _agree(self, world: int, key: bytes | None) -> bytes:
        """Groups are built by all ranks together: ranks that disagree would wait for each other.

        -> what names this session. Every rank has put random bytes of its own into it, so it is no older
        one: a message of which somebody kept a copy proves nothing in it.
        """
        mine = _OPENING.pack(self.ranks_per_site, key is not None, uuid.uuid4().bytes)
        records = self.everyone().swap_records(mine, phase="topology", limit=self.patience)
        opened = [_OPENING.unpack(record) for record in records]
        for rank, (size, keyed, _) in enumerate(opened):
            if size != opened[0][0]:
                raise AgreementError(
                    f"ranks_per_site differs: rank 0 has {opened[0][0]}, rank {rank} of {world} has {size}"
                )
            if keyed != opened[0][1]:
                have, lack = (0, rank) if opened[0][1] else (rank, 0)
                raise AgreementError(f"rank {have} of {world} has a key, rank {lack} has none")
        return hashlib.blake2b(b"".join(records), digest_size=16).digest()

    def _named(self, ranks: Sequence[int]) -> str:
        if self.ranks_per_site == 1:
            return listed("site", ranks)
        sites = sorted({rank // self.ranks_per_site for rank in ranks})
        return f"{listed('rank', ranks)} of {listed('site', sites)}"

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]

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
        if only_gloo():
            limit = max(self.dead_after / TRIES, 4 * self.store.round_trip)
            return link(store, name, ranks.index(dist.get_rank()), len(ranks), limit=limit)
        assert dist.group.WORLD is not None
        sends = wire_device(dist.group.WORLD, device)
        group = self._new_group(inside=inside)  # NCCL connects later, and then still needs torch's store
        return GroupMesh(group, sends, owned=True)

    def _new_group(self, *, inside: bool) -> dist.ProcessGroup:
        """torch has all ranks build all groups in one order."""
        per_site = self.ranks_per_site
        at = [[site * per_site + k for k in range(per_site)] for site in range(self.num_sites)]
        members = at if inside else [list(column) for column in zip(*at, strict=True)]
        group, _ = dist.new_subgroups_by_enumeration(members, timeout=timedelta(seconds=self.timeout))
        assert isinstance(group, dist.ProcessGroup)  # this rank is in one of them
        return group

    def _transport(
        self,
        mesh: Mesh,
        ranks: list[int],
        member: str,
        link: str = "",
        *,
        reunion: bool = False,
    ) -> Transport:
        rank = ranks.index(dist.get_rank())
        return Transport(
            mesh,
            ranks,
            rank,
            liveness=self._liveness,
            timeout=self.timeout,
            patience=self.patience,
            member=member,
            link=link,
            seals=self._seals_of(mesh.name, rank),
            reunion=reunion,
        )

    def _seals_of(self, name: str, rank: int) -> MessageSeals | None:
        """One for all links of a name: no two messages may have the same number."""
        if self._key is None:
            return None
        if name not in self._seals:
            self._seals[name] = MessageSeals(self._key, self._session, name, rank)
        return self._seals[name]

    def membership(self, device: torch.device, setup: Mapping[str, Any]) -> WorldMembership:
        """Of one optimizer. All ranks have proven that they agree on its setup."""
        return WorldMembership(self, device)

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
            self._store_seals,
            name,
            clears_up=self.site == self.rank_in_site == 0,
            liveness=self._liveness,
            others=self._others,
        )
        return self._verdicts[owner]

    def __repr__(self) -> str:
        return (
            f"Topology(ranks_per_site={self.ranks_per_site}, timeout={self.timeout:g}, "
            f"patience={self.patience:g}, dead_after={self.dead_after:g}): "
            f"{self.num_sites} sites, this is site {self.site}, rank {self.rank_in_site} in it"
        )
