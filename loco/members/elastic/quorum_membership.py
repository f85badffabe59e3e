"""Views of sites that come and go: a quorum for each round."""

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from ...coordination.authentication import StoreSeals
from ...coordination.commit import Verdicts
from ...coordination.heartbeats import NoHeartbeats
from ...coordination.rendezvous import Reconnects
from ...coordination.site_directory import too_few
from ...errors import LocoError, TransportError
from ...logs import SAY_SOON, Waiting
from ...net.links import Links
from ..repeats import Repeats
from ..view import Standing, StatusReporter, VerdictLog, View
from ..world import WorldMembership
from .elastic_sites import ElasticSites
from .first_rank import FirstRank
from .quorum import Claim, Plan, of_site

_PAUSE = 0.2  # seconds between two looks at whether all have come to the start
_logger = logging.getLogger(__name__)


class QuorumMembership:
    """The views of one optimizer over an `ElasticSites`: a quorum for each round.

    Args:
        device: where the optimizer's state lives.
        setup: what all sites of a run have in common.
    """

    others_may_be_ahead = True

    def __init__(self, topology: ElasticSites, device: torch.device, setup: Mapping[str, Any]) -> None:
        self._topology = topology
        # The views of this site's ranks, if it has several.
        self._own = None if topology.own is None else WorldMembership(topology.own, device)
        common = {"sites": topology.sites, "ranks_per_site": topology.ranks_per_site}
        self._setup = json.dumps(common | dict(setup))
        self._first = None if topology.own is None else FirstRank(topology.own)
        self._view: View | None = None

    def form(self, standing: Standing) -> View:
        """
        Raises:
            AgreementError: the run's sites were set up differently from this one, or its ranks have come for
                different things.
            LocoError: no site holds the whole anchor.
            TransportError: nobody says who is there, or a rank of this site is gone; or, and then it does not
                last, a member was lost.
        """
        try:
            return self._form(standing)
        except BaseException as error:  # Ctrl-C, too: the other ranks of this site wait for this one
            if self._own is not None:
                self.give_up(f"it gave up asking who takes part ({type(error).__name__})")
            raise

    def _form(self, standing: Standing) -> View:
        topology, site, mine = self._topology, None, self._claim(standing)
        if self._first is None:
            plan = self._ask(mine, standing.rounds_done)
        else:
            site = self.form_site()
            phase, said = "telling this site's ranks where this one stands", json.dumps(mine.to_json())
            told = site.inside.swap_blobs(said.encode(), phase=phase, limit=site.inside.patience)
            claim = of_site([Claim(**json.loads(blob)) for blob in told])
            found = self._first.find_out(site, lambda: self._ask(claim, standing.rounds_done).to_json())
            plan = topology.plan = Plan.of_json(found)
        if standing.ready or plan.newcomers:
            topology.link(plan)
        self._view = self._view_of(plan, standing, site)
        return self._view

    def form_site(self) -> View:
        assert self._own is not None
        return self._own.form_site()

    def _ask(self, claim: Claim, rounds_done: int) -> Plan:
        """Who is there; at the start of a run, once all are.

        Raises:
            TransportError: not all came within `patience`. A process that is started again after the end of a
                run waits for nobody else.
        """
        topology, plan = self._topology, self._found(claim, rounds_done)
        deadline = time.monotonic() + topology.patience

        def here() -> str:
            names = ", ".join(member.name for member in plan.members)
            return f"{len(plan.members)} of {topology.sites} sites are here ({names})"

        if not self._has_begun(plan, claim):
            with Waiting(_logger, lambda: f"the run's sites: {here()}", first=SAY_SOON):
                while not self._has_begun(plan, claim):
                    if time.monotonic() > deadline:
                        raise too_few(here(), topology.patience)
                    time.sleep(_PAUSE)
                    plan = self._found(claim, rounds_done)
        return plan

    def _found(self, claim: Claim, rounds_done: int) -> Plan:
        plan = self._topology.gather(claim)
        if max(member.claim.round for member in plan.members) < 0:
            raise LocoError(
                f"round {rounds_done + 1}: no site that is left holds the whole anchor: load "
                f"the last checkpoints"
            )
        return plan

    def _has_begun(self, plan: Plan, claim: Claim) -> bool:
        is_new_run = all(member.claim.round <= 0 for member in plan.members) and not plan.runs
        return claim.ready or not is_new_run or len(plan.members) >= self._topology.sites

    def give_up(self, why: str) -> None:
        self._topology.unlink(why)
        if self._own is not None:  # all ranks of a site then ask for the next quorum together
            self._own.give_up(why)
        if self._view is not None:
            self._view.is_whole = False

    def stop(self, why: str) -> None:
        self.give_up(why)
        if self._own is not None:
            self._own.stop(why)

    def attempts(self) -> Repeats:
        return Repeats(self._topology.repeats, self._leave, stop=lambda error: self.stop(str(error)))

    def reconnects_by(self, user: Reconnects) -> None:
        if self._own is not None:  # a site of one rank saves alone
            self._own.reconnects_by(user)

    def _leave(self) -> list[str]:
        """-> the ids of those whom this site leaves."""
        self.give_up("it left the links")
        plan = self._topology.plan
        return [] if plan is None else [member.id for member in plan.members]

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

    def _view_of(self, plan: Plan, standing: Standing, site: View | None) -> View:
        """
        Args:
            site: of this site's ranks, if it has several.
        """
        topology, links = self._topology, self._topology.links
        me = plan.index_of(topology.id)
        takes_part = me in plan.workers
        workers = list(plan.workers) if takes_part else [me]
        if takes_part:
            topology.num_sites, topology.site = len(workers), workers.index(me)
        committed = None
        if standing.doubt:
            committed = any(member.claim.committed == standing.doubt for member in plan.members)
        liveness: StatusReporter = NoHeartbeats() if links is None else links.liveness
        return View(
            name=plan.attempt,
            site=workers.index(me),
            num_sites=len(workers),
            across=topology.among(plan, workers) if takes_part else topology.alone(),
            inside=topology.alone() if site is None else site.inside,
            liveness=liveness if site is None else _InBoth(liveness, site),
            verdicts=_verdicts(plan, me, links, site),
            site_names=tuple(plan.members[k].name for k in workers),
            handover=QuorumHandover(topology, plan, me),
            runs_round=plan.runs and takes_part,
            committed=committed,
        )


def _verdicts(plan: Plan, me: int, links: Links | None, site: View | None) -> VerdictLog:
    if links is None and site is not None:
        return site.verdicts  # alone, the ranks of a site agree by their own store
    if links is None:
        return Verdicts(HashStore(), StoreSeals(), plan.attempt, clears_up=False)
    others = [member for member in range(links.size) if member != me]
    return Verdicts(
        links.store,
        links.seals,
        plan.attempt,
        clears_up=False,
        liveness=links.liveness,
        others=others,
    )


class QuorumHandover:
    """θ and m, from the members of a quorum that hold them to those that have come.

    Args:
        me: this site's index among the members.
    """

    def __init__(self, topology: ElasticSites, plan: Plan, me: int) -> None:
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


class _InBoth:
    """What a rank tells those who wait for it across the sites, and in its site."""

    def __init__(self, across: StatusReporter, site: View) -> None:
        self._across = across
        self._site = site

    def say(self, doing: str) -> None:
        self._across.say(doing)
        self._site.liveness.say(doing)

    def leave(self, why: str, link: str = "") -> None:
        self._across.leave(why, link)
        self._site.liveness.leave(why, self._site.inside.link)
