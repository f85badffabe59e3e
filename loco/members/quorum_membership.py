"""Views of sites that come and go: a quorum for each round, by torchft's lighthouse."""

import logging
import time
from typing import TYPE_CHECKING

from ..coordination.authentication import StoreSeals
from ..coordination.commit import decide
from ..coordination.heartbeats import NoHeartbeats
from ..coordination.rendezvous import Reconnects
from ..coordination.store_client import StoreClient
from ..errors import LocoError, NonFiniteError, PeerError, TransportError, WireError
from ..net.links import Links
from .quorum import Claim, Plan
from .view import Standing, View

if TYPE_CHECKING:
    from .elastic import ElasticSites

MOST = 3  # rounds that fail among the same sites before it is said: repeating mends only who is gone
_PAUSE = 0.2  # seconds between two looks at whether all have come to the start
_PATIENT = 5.0  # seconds until it is said that sites are missing at the start
_REMIND = 60.0  # and said again
_logger = logging.getLogger(__name__)


class QuorumMembership:
    """The views of one optimizer over an `ElasticSites`: a quorum for each round.

    Args:
        setup: what all sites of a run have in common.
    """

    others_may_be_ahead = True

    def __init__(self, topology: "ElasticSites", setup: str) -> None:
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

    def reconnects_by(self, user: Reconnects) -> None:
        pass  # a site saves alone

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
        me = plan.index_of(topology.id)
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

    def __init__(self, topology: "ElasticSites", plan: Plan, me: int) -> None:
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

    def __init__(self, topology: "ElasticSites") -> None:
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
