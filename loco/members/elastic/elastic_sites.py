"""Sites that come and go: who they are is asked before each round."""

import json
import logging
import uuid
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

from ...coordination.authentication import MessageSeals
from ...coordination.hosted_store import Guests, HostedStore, host_at_port
from ...coordination.rendezvous import Alone
from ...coordination.store_client import host_and_port
from ...errors import AgreementError, TransportError
from ...net.links import Links, beats_of, prefix_of
from ...net.listening import ANYWHERE, Endpoint
from ...net.mesh import NoLinks, Subset
from ...net.transport import Transport
from ..fixed import CLOSED_BY_USER, FixedSites
from ..meeting import Meeting
from ..own_world import check_one_site, own_world
from ..view import Agreement
from .lighthouse import Lighthouse, address_towards_lighthouse, is_local
from .quorum import Claim, Plan, plan
from .store_quorum import StoreQuorum

_logger = logging.getLogger(__name__)


class ElasticSites:
    """Sites of which some may die and come back while the others train on.

    A site of several ranks comes and goes as one: its first rank asks for all. Each rank is linked with those
    of the same number in the other sites.

    Before each round a quorum says who takes part: the sites that live, numbered by their names. R, the
    divisor of the mean, is their number. A round in which one is lost has changed nothing on the others, and
    is repeated without it. A site that comes, or comes back, is given θ and m by one that has them, after the
    round in which it came; it is one of the R from the next round on.

    Args:
        sites: how many a run starts with; fewer go on when some die, and more may join.
        name: of this site: the same when it comes back, and no other site's.
        at, at_least, lighthouse: as `loco.Sites`.
        endpoint: where this rank listens.
        timeout, patience, dead_after, repeats, key: as `loco.Sites`. Whether the next quorum waits for a site
            that is dead is up to the lighthouse (--heartbeat_timeout_ms), if there is one.
        connect_timeout: seconds for all sites of a quorum to link up.

    Attributes:
        num_sites: R of the latest round.
        site: this site's number in it, 0 … R−1.
        plan: of the latest quorum; None before the first.
        closed: as of `FixedSites`.

    Raises:
        ImportError: torchft is not installed.
        ValueError: `at` can't be used.
        AgreementError: the ranks of this site were started differently.
        TransportError: no lighthouse answers, or a rank of this site is lost.
    """

    is_elastic = True

    def __init__(
        self,
        *,
        sites: int,
        name: str,
        at: str | None = None,
        at_least: int = 1,
        lighthouse: str | None = None,
        endpoint: Endpoint = ANYWHERE,
        timeout: float,
        patience: float = 600.0,
        dead_after: float,
        repeats: int = 2,
        key: bytes | None = None,
        connect_timeout: float = 30.0,
    ) -> None:
        self.sites = sites
        self.name = name
        self.timeout = float(timeout)
        self.patience = float(patience)
        self.dead_after = float(dead_after)
        self.connect_timeout = float(connect_timeout)
        self.repeats = repeats
        self._key = key
        self._endpoint = endpoint
        self.num_sites, self.site = 1, 0
        world = own_world(patience, name, endpoint)
        self.own: FixedSites | None = None
        if world is not None and world.world > 1:
            self.own = FixedSites(
                world, timeout=timeout, patience=patience, dead_after=dead_after, repeats=0, key=key
            )
        self.ranks_per_site = 1 if self.own is None else self.own.ranks_per_site
        self.rank_in_site = 0 if self.own is None else self.own.rank_in_site
        self.site_group = None if self.own is None else self.own.site_group
        # What a site keeps is its own.
        self.rendezvous: Agreement = Alone() if self.own is None else self.own.rendezvous
        process = self._one_id([sites, name, at, at_least, lighthouse])
        self.id = f"{self.name}:{process}"
        self._source: Lighthouse | StoreQuorum | None = None  # of the first rank
        self._meeting: Meeting | None = None
        self._store_at = ""  # as this machine reaches the meeting's
        self._hosted: HostedStore | None = None
        if lighthouse is None:
            assert at is not None
            self._meet(at, at_least, patience)
        else:
            self._ask_lighthouse(lighthouse, at)
        self._links: Links | None = None
        self.closed = ""
        self.plan: Plan | None = None
        self._belongs = False
        self._namesakes: set[str] = set()  # ids of processes that were in a quorum in this one's place

    def _meet(self, at: str, at_least: int, patience: float) -> None:
        """By the store at an address."""
        meeting = Meeting(
            at,
            site=self.name,
            sites=self.sites,
            at_least=at_least,
            ranks=self.ranks_per_site,
            endpoint=self._endpoint,
            patience=patience,
            dead_after=self.dead_after,
            key=self._key,
        )
        if self.rank_in_site == 0:
            self._meeting, self._source = meeting, StoreQuorum(meeting, self.id)
            meeting.host()
        meeting.store()
        self._endpoint, self._store_at = meeting.own_endpoint(), meeting.own_at

    def _ask_lighthouse(self, lighthouse: str, at: str | None) -> None:
        """Each site hosts a store, on which the others meet when it is the first of them."""
        given = self._endpoint
        if at is None:
            host, ports = given.advertised or address_towards_lighthouse(lighthouse), given.ports
        else:
            host, port = host_and_port(at)
            ports = range(port, port + 1)
        if self.rank_in_site == 0:
            self._hosted = host_at_port(ports)
            self._source = Lighthouse(
                lighthouse,
                id=self.id,
                name=self.name,
                store=f"{host}:{self._hosted.port}",
                timeout=self.connect_timeout,
                key=self._key,
            )
        elif not is_local(host):
            host = address_towards_lighthouse(lighthouse)
        self._endpoint = given.at(host)

    def _one_id(self, told: list[Any]) -> str:
        """A number that no other process has; the ranks of a site have one."""
        process = uuid.uuid4().hex[:12]
        if self.own is None:
            return process
        blobs = self.own.all_ranks().swap_blobs(
            json.dumps([told, process]).encode(), phase="start of this site", limit=self.own.patience
        )
        each = [json.loads(blob) for blob in blobs]
        check_one_site([theirs for theirs, _ in each], "sites, site, at, at_least, lighthouse")
        return each[0][1]

    def gather(self, claim: Claim) -> Plan:
        """Ask who is there, and decide with them who does what. The first rank of a site asks.

        Raises:
            AgreementError: the run's sites were set up differently from this one, or its name is taken by a
                process that lives.
            TransportError: the lighthouse or the store is gone, or too few sites are left.
        """
        claim = replace(claim, belongs=self._belongs)
        assert self._source is not None
        while True:
            try:
                decided = plan(*self._source.ask(claim))
            except TransportError as error:
                error.lasting = True
                raise
            if all(member.id != self.id for member in decided.namesakes):
                break
            self._refuse_living_namesake(decided)
        if decided.index_of(self.id) < 0:
            raise AgreementError(
                f"{self.name} was set up differently from the sites of the run that it came to: "
                f"{_difference(decided.members[0].claim.setup, claim.setup)}"
            )
        self._tell(decided)
        self.plan = decided
        self._belongs = True
        return decided

    def _refuse_living_namesake(self, decided: Plan) -> None:
        """Return as long as it may be a process that has died after it asked for this quorum."""
        (other,) = (member for member in decided.members + decided.strangers if member.name == self.name)
        if other.id in self._namesakes:
            raise AgreementError(
                f"site {self.name} is here already, in {other.where}, and is alive: give every site a name "
                f"of its own (LOCO_SITE), or end that process first"
            )
        self._namesakes.add(other.id)

    def link(self, decided: Plan) -> None:
        """Link up with all members of a quorum, each rank with those of its number, or keep the links that
        all of them hold.

        Raises:
            TransportError: a member did not come, or was lost on the way.
        """
        held, members = self.links, decided.members
        if decided.keep_links and held is not None and held.size == len(members):
            return
        self.unlink()
        if len(members) > 1:
            host = "" if self._meeting is None else self._meeting.hosted_by
            self._links = Links(
                decided.attempt,
                store=self._store_at or members[0].store,
                hosted_by=host if self._store_at else members[0].name,
                member=decided.index_of(self.id),
                names=[one.name for one in members],
                rank=self.rank_in_site,
                endpoint=self._endpoint,
                timeout=self.connect_timeout,
                dead_after=self.dead_after,
                key=self._key,
            )
            self._serve(self._links)

    def _serve(self, links: Links) -> None:
        """If this site hosts the store of these links, it does so until all their members have ended."""
        hosted, is_host = self._hosted, links.member == 0
        if self._meeting is not None:
            hosted, is_host = self._meeting.hosted, True
        if hosted is None or self._source is None:
            return
        guests: list[Guests] = []
        if is_host:
            others = [member for member in range(links.size) if member != links.member]
            each = range(self.ranks_per_site)
            guests = [Guests(prefix_of(links.name), beats_of(rank), others, links.seals) for rank in each]
        hosted.serve(self.id, guests, partial(_leave, ref(self._source)))

    @property
    def links(self) -> Links | None:
        """The links that can be used, if there are any."""
        return self._links if self._links is not None and self._links.whole else None

    def among(self, decided: Plan, members: list[int] | None = None) -> Transport:
        """The links to these members of a quorum, for its round; by default to all, to hand over θ."""
        links, what = self.links, "round"
        if members is None:
            members, what = list(range(len(decided.members))), "handover"
        me = members.index(decided.index_of(self.id))
        names = [decided.members[member].name for member in members]
        seals = None
        if links is not None:
            # Of this quorum and its plan: members that were told different things do not believe each other.
            seals = links.message_seals(f"{what} of {members} in {decided.to_json()}", me)
        return self._transport_among(links, members, names, me, seals)

    def _transport_among(
        self,
        links: Links | None,
        members: list[int],
        names: list[str],
        me: int,
        seals: MessageSeals | None = None,
    ) -> Transport:
        return Transport(
            NoLinks() if links is None else Subset(links.mesh, members, close=links.close),
            members,
            me,
            liveness=None if links is None else links.liveness,
            timeout=self.timeout,
            patience=self.timeout,  # whoever is in a quorum has come to its round
            member="site",
            names=names,
            seals=seals,
        )

    def unlink(self, why: str = "it left the links") -> None:
        if self._links is not None:
            self._links.close(why)
        self._links = None

    def close(self, why: str = "") -> None:
        """Leave: the others go on without this site."""
        self.closed = self.closed or why or CLOSED_BY_USER
        self.unlink(why or "it left the links")
        if self._source is not None:
            self._source.close()
        if self.own is not None:
            self.own.close(why)

    def all_ranks(self) -> Transport:
        """A site is built alone: who the others are, a quorum says."""
        return self.alone() if self.own is None else self.own.all_ranks()

    def alone(self) -> Transport:
        return self._transport_among(None, [0], [self.name], 0)

    def seat(self) -> dict[str, Any]:
        """A site is known by its name: its number is another one in every quorum. To its state and to its
        checkpoints it is alone."""
        alone = {"site": 0, "num_sites": 1}
        return {
            "name": self.name,
            "rank_in_site": self.rank_in_site,
            "ranks_per_site": self.ranks_per_site,
        } | alone

    def _tell(self, decided: Plan) -> None:
        """Log who has come and who is gone."""
        before = {} if self.plan is None else {member.id: member.name for member in self.plan.members}
        now = {member.id: member.name for member in decided.members}
        if before and before != now:
            gone = ", ".join(name for id, name in before.items() if id not in now) or "nobody"
            come = ", ".join(name for id, name in now.items() if id not in before) or "nobody"
            _logger.warning("the sites are now %s (gone: %s; come: %s)", ", ".join(now.values()), gone, come)
        for member in decided.strangers:
            _logger.warning("%s was set up differently, and is left out", member.name)
        for member in decided.namesakes:
            _logger.warning("another process has the name %s, and is left out: %s", member.name, member.where)


def _leave(source: "ref[Lighthouse | StoreQuorum]") -> None:
    """For a program that ends: the others do not wait for its site any more."""
    left = source()
    if left is not None:
        left.close()


def _difference(theirs: str, ours: str) -> str:
    a, b = json.loads(theirs), json.loads(ours)
    key = next(k for k in a | b if a.get(k) != b.get(k))
    return f"{key} is {b.get(key)} here and {a.get(key)} there"
