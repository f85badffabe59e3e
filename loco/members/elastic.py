"""Sites that come and go: who they are is asked before each round, of torchft's lighthouse."""

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping
from typing import Any

import torch

from ..coordination.authentication import StoreSeals
from ..coordination.commit import decide
from ..coordination.heartbeats import NoHeartbeats
from ..coordination.rendezvous import Alone
from ..coordination.store_client import StoreClient
from ..errors import AgreementError, LocoError, NonFiniteError, PeerError, TransportError, WireError
from ..net.links import Links, host_store
from ..net.mesh import NoLinks, Subset
from ..net.transport import Transport
from .lighthouse import HOW_TO_START, Lighthouse
from .quorum import Claim, Plan, plan
from .view import Standing, View

MOST = 3  # rounds that fail among the same sites before it is said: repeating mends only who is gone
_PAUSE = 0.2  # seconds between two looks at whether all have come to the start
_PATIENT = 5.0  # seconds until it is said that sites are missing at the start
_REMIND = 60.0  # and said again
_logger = logging.getLogger(__name__)


class ElasticTopology:
    """Sites of one process each, of which some may die and come back while the others train on.

    It takes the place of `loco.Topology`, and of `init_process_group`:

        topology = loco.ElasticTopology(sites=4, name="berlin", lighthouse="http://10.0.0.1:29510")
        optimizer = loco.PulseLoCo(inner, sync_every=8, topology=topology)

    Before each round a quorum says who takes part: the sites that live, numbered by their names. R, the
    divisor of the mean, is their number. A round in which one is lost has changed nothing on the others, and
    is repeated without it. A site that comes, or comes back, is given θ and m by one that has them, after the
    round in which it came; it is one of the R from the next round on.

    Args:
        sites: how many a run starts with; fewer go on when some die, and more may join.
        name: of this site: the same when it comes back, and no other site's. By default one of its own.
        lighthouse: where torchft's lighthouse listens; by default what TORCHFT_LIGHTHOUSE says.
        address: name or IP address by which the other sites reach this machine; by default its host name.
        port: of the store that this site hosts, on which the sites meet when it is the first of them; 0 is
            any.
        timeout: seconds a site waits for a message of one that is alive before the round fails.
        dead_after: seconds within which a site that is waited for and gives no sign of life fails the round.
            Whether the next quorum waits for it is up to the lighthouse (--heartbeat_timeout_ms).
        connect_timeout: seconds for all sites of a quorum to link up.

    Attributes:
        num_sites: R of the latest round.
        site: this site's number in it, 0 … R−1.
        plan: of the latest quorum; None before the first.

    Raises:
        ImportError: torchft is not installed.
        ValueError: an argument is out of range, or there is no lighthouse to ask.
        TransportError: no lighthouse answers.
    """

    def __init__(
        self,
        *,
        sites: int,
        name: str | None = None,
        lighthouse: str | None = None,
        address: str | None = None,
        port: int = 0,
        timeout: float = 300.0,
        dead_after: float = 5.0,
        connect_timeout: float = 30.0,
    ) -> None:
        if sites < 1:
            raise ValueError(f"sites must be >= 1, got {sites}")
        limits = {"timeout": timeout, "dead_after": dead_after, "connect_timeout": connect_timeout}
        for what, value in limits.items():
            if not value > 0:
                raise ValueError(f"{what} must be > 0 seconds, got {value}")
        lighthouse = lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
        if not lighthouse:
            raise ValueError(
                f"sites that come and go need a lighthouse: {HOW_TO_START}, and give its address as "
                f"`lighthouse` or in TORCHFT_LIGHTHOUSE"
            )
        process = uuid.uuid4().hex[:12]
        self.ranks_per_site, self.rank_in_site = 1, 0
        self.sites = sites
        self.name = name or process
        self.id = f"{self.name}:{process}"
        self.timeout = self.patience = float(timeout)  # whoever is in a quorum has come to its round
        self.dead_after = float(dead_after)
        self.connect_timeout = float(connect_timeout)
        self.num_sites, self.site = 1, 0
        self._address = address or socket.gethostname()
        self._hosted, where = host_store(self._address, port)
        self._lighthouse = Lighthouse(
            lighthouse, id=self.id, name=self.name, store=where, timeout=self.connect_timeout
        )
        self.notes = Alone()  # what a site keeps is its own
        self._links: Links | None = None
        self.plan: Plan | None = None

    def gather(self, claim: Claim) -> Plan:
        """Ask who is there, and decide with them who does what.

        Raises:
            AgreementError: the run's sites were set up differently from this one.
            TransportError: the lighthouse is gone.
        """
        try:
            decided = plan(*self._lighthouse.ask(claim))
        except TransportError as error:
            error.lasting = True
            raise
        if decided.place_of(self.id) < 0:
            raise AgreementError(
                f"{self.name} was set up differently from the sites of the run that it came to: "
                f"{_difference(decided.members[0].claim.setup, claim.setup)}"
            )
        self._tell(decided)
        self.plan = decided
        return decided

    def link(self, decided: Plan) -> None:
        """Link up with all members of a quorum, or keep the links that all of them hold.

        Raises:
            TransportError: a member did not come, or was lost on the way.
        """
        held, members = self.links, decided.members
        if decided.keep_links and held is not None and held.size == len(members):
            return
        self.unlink()
        if len(members) > 1:
            self._links = Links(
                decided.attempt,
                store=members[0].store,
                place=decided.place_of(self.id),
                size=len(members),
                address=self._address,
                timeout=self.connect_timeout,
                dead_after=self.dead_after,
            )

    @property
    def links(self) -> Links | None:
        """The links that can be used, if there are any."""
        return self._links if self._links is not None and self._links.whole else None

    def among(self, decided: Plan, places: list[int] | None = None) -> Transport:
        """The links to these members of a quorum, by default to all."""
        if places is None:
            places = list(range(len(decided.members)))
        return self._transport_among(self.links, places, decided.place_of(self.id))

    def _transport_among(self, links: Links | None, places: list[int], place: int) -> Transport:
        return Transport(
            NoLinks() if links is None else Subset(links.mesh, places, close=links.close),
            places,
            places.index(place),
            device=torch.device("cpu"),  # gloo sends no other memory
            liveness=None if links is None else links.liveness,
            timeout=self.timeout,
            patience=self.timeout,  # whoever is in a quorum has come to its round
            member="site",
        )

    def unlink(self, why: str = "it left the links") -> None:
        if self._links is not None:
            self._links.close(why)
        self._links = None

    def close(self) -> None:
        """Leave: the others go on without this site as soon as the lighthouse has forgotten it."""
        self.unlink()
        self._lighthouse.close()

    def everyone(self) -> Transport:
        """A site is built alone: who the others are, a quorum says."""
        return self.alone()

    def alone(self) -> Transport:
        return self._transport_among(None, [0], 0)

    def membership(self, device: torch.device, setup: Mapping[str, Any]) -> "QuorumMembership":
        return QuorumMembership(self, json.dumps({"sites": self.sites} | dict(setup)))

    def seat(self) -> dict[str, Any]:
        """A site is known by its name: its number is another one in every quorum. To its state and to its
        checkpoints it is alone."""
        return {"name": self.name, "site": 0, "num_sites": 1, "rank_in_site": 0, "ranks_per_site": 1}

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

    def __repr__(self) -> str:
        return f"ElasticTopology(name={self.name!r}): this is site {self.site} of {self.num_sites} now"


class QuorumMembership:
    """The views of one optimizer over an `ElasticTopology`: a quorum for each round.

    Args:
        setup: what all sites of a run have in common.
    """

    others_may_be_ahead = True

    def __init__(self, topology: ElasticTopology, setup: str) -> None:
        self._topology = topology
        self._setup = setup

    def form(self, standing: Standing) -> View:
        """
        Raises:
            AgreementError: the run's sites were set up differently from this one.
            LocoError: no site holds the whole anchor.
            TransportError: the lighthouse is gone; or, and then it does not last, a member was lost.
        """
        topology = self._topology
        told = time.monotonic() - _REMIND + _PATIENT
        while True:
            plan = topology.gather(self._claim(standing))
            claims = [member.claim for member in plan.members]
            if max(claim.round for claim in claims) < 0:
                raise LocoError(
                    f"round {standing.rounds_done + 1}: no site that is left holds the whole anchor: load "
                    f"the last checkpoints"
                )
            is_new_run = all(claim.round <= 0 for claim in claims) and not plan.runs
            if standing.ready or not is_new_run or len(claims) >= topology.sites:
                break
            if time.monotonic() - told > _REMIND:
                told = time.monotonic()
                here = ", ".join(member.name for member in plan.members)
                _logger.warning(
                    "waiting for the run's sites: %d of %d are here (%s)", len(claims), topology.sites, here
                )
            time.sleep(_PAUSE)
        if standing.ready or plan.newcomers:
            topology.link(plan)
        return self._view(plan, standing)

    def give_up(self, why: str) -> None:
        self._topology.unlink(why)

    def attempts(self) -> "QuorumAttempts":
        return QuorumAttempts(self._topology)

    def is_reconnection_waiting(self) -> bool:
        return False

    def _claim(self, standing: Standing) -> Claim:
        links = self._topology.links
        return Claim(
            round=standing.rounds_done,
            digest=standing.digest(),
            ready=standing.ready,
            links="" if links is None else links.name,
            committed=standing.committed,
            doubt=standing.doubt,
            setup=self._setup,
        )

    def _view(self, plan: Plan, standing: Standing) -> View:
        topology, links = self._topology, self._topology.links
        me = plan.place_of(topology.id)
        takes_part = me in plan.workers
        workers = list(plan.workers) if takes_part else [me]
        if takes_part:
            topology.num_sites, topology.site = len(workers), workers.index(me)
        committed = None
        if standing.doubt:
            committed = any(member.claim.committed == standing.doubt for member in plan.members)
        return View(
            name=plan.attempt,
            site=workers.index(me),
            num_sites=len(workers),
            across=topology.among(plan, workers) if takes_part else topology.alone(),
            inside=topology.alone(),
            liveness=NoHeartbeats() if links is None else links.liveness,
            register=_OneVerdict(None if links is None else links.store, plan.attempt),
            site_names=tuple(plan.members[k].name for k in workers),
            handover=QuorumHandover(topology, plan, me),
            runs_round=plan.runs and takes_part,
            committed=committed,
        )


class QuorumHandover:
    """θ and m, from the members of a quorum that hold them to those that have come.

    Args:
        me: this site's index among the members.
    """

    def __init__(self, topology: ElasticTopology, plan: Plan, me: int) -> None:
        self._topology = topology
        self._plan = plan
        self._me = me
        self.link = topology.among(plan)
        self.source = plan.newcomers.get(me)
        self.receivers = tuple(newcomer for newcomer, server in plan.newcomers.items() if server == me)

    def announce(self) -> None:
        self._links().announce(f"{self._plan.attempt} done by {self._me}")

    def await_source(self) -> None:
        self._links().await_word(f"{self._plan.attempt} done by {self.source}", self._plan.workers)

    def name_of(self, member: int) -> str:
        return self._plan.members[member].name

    def _links(self) -> Links:
        links = self._topology.links
        if links is None:
            raise TransportError("the links to the sites that have come broke after the round")
        return links


class QuorumAttempts:
    """A round that fails is tried again among those who are left, unless it keeps failing among the same."""

    def __init__(self, topology: ElasticTopology) -> None:
        self._topology = topology
        self._failed: list[list[str]] = []  # ids of the members, by attempt

    def failed(self, view: View | None, error: Exception, *, refused: bool, own_fault: bool) -> None:
        is_repeatable = isinstance(error, TransportError | WireError | NonFiniteError | PeerError)
        no_quorum = view is None and isinstance(error, TransportError) and error.lasting
        if own_fault or no_quorum or not is_repeatable:
            raise error from None
        self._topology.unlink()
        plan = self._topology.plan
        self._failed.append([] if plan is None else [member.id for member in plan.members])
        _logger.warning("%s; asking who is left", error)
        latest = self._failed[-MOST:]
        if len(latest) == MOST and latest.count(latest[0]) == MOST:
            raise error from None


class _OneVerdict:
    """On the one round of a quorum's attempt, in the store of its links. If the store's host is lost too, the
    next quorum tells: a site that knows says so there.

    Args:
        store: None for a site that is alone.
    """

    def __init__(self, store: StoreClient | None, attempt: str) -> None:
        self._store = store
        self._key = f"verdict/{attempt}"

    def prepare(self, number: int) -> None:
        pass

    def on(self, number: int, wish: str) -> str:
        return wish if self._store is None else decide(self._store, self._key, wish, StoreSeals())


def _difference(theirs: str, ours: str) -> str:
    a, b = json.loads(theirs), json.loads(ours)
    key = next(k for k in a | b if a.get(k) != b.get(k))
    return f"{key} is {b.get(key)} here and {a.get(key)} there"
