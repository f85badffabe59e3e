"""The outer loop of sites that come and go: a round is repeated without those that were lost in it, and who
comes is given θ and m (see `ElasticTopology`)."""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from loco import kernels
from loco.kernels import Encoded

from ..config import Settings
from ..coordination.authentication import StoreSeals
from ..coordination.commit import ABORT, COMMIT, decide
from ..coordination.heartbeats import NoHeartbeats
from ..errors import LocoError, NonFiniteError, PeerError, TransportError, WireError
from ..exchange.conversation import Exchange, WireConfig
from ..members.elastic import ElasticTopology
from ..members.quorum import Claim, Plan
from ..report import SyncReport
from ..wire.header import VERSION
from ..wire.refusal import Problem
from .handshake import fingerprint
from .loop import OuterLoop
from .recovery import Head, give, take, take_head
from .state import digest_of

MOST = 3  # rounds that fail among the same sites before it is said: repeating mends only who is gone
_PAUSE = 0.2  # seconds between two looks at whether all have come to the start
_PATIENT = 5.0  # seconds until it is said that sites are missing at the start
_REMIND = 60.0  # and said again
_logger = logging.getLogger(__name__)


class ElasticLoop(OuterLoop):
    """Rounds among the sites of the latest quorum.

    What holds when a site is lost in a round: no survivor has changed θ, m, e or w, and all repeat the round
    with what they had. If the loss came so late that some have heard all votes and others have not, those
    who have not hold all that the round takes: they learn in the next quorum that it was committed, and
    commit it too. If none of those who heard are left, nobody has.

    What a site that comes finds: θ, m and the number of rounds are the others', bit for bit; w = cast(θ). Its
    residual is kept if the last round it took part in is the last one it knows of: if it was stopped, or out
    of reach, or brought its own checkpoint of that round. Otherwise part of it may have been sent since, and
    it starts empty, with a warning: what a dead process withheld is lost. So are inner steps that no round
    has taken up. A whole run that is started again is no different: the checkpoint of the latest round leads,
    and who brings it, or another of that round, goes on from its very step.
    """

    topology: ElasticTopology

    def __init__(
        self,
        inner: Optimizer,
        settings: Settings,
        topology: ElasticTopology,
        wire: WireConfig,
        *,
        offload: bool,
    ) -> None:
        self._took_part: dict[str, int] = {}  # the last round of each site, by name
        self._plan: Plan | None = None  # of the latest round that was tried
        self._store_of_round: Any = None
        self._committed = ""  # the attempt that made the latest round
        self._verdict: bool | None = None  # on that round, once another site tells it
        self._anchor_incomplete = False  # θ is a part of another site's
        self._at_fault = False  # this site itself can't take part in the round
        super().__init__(inner, settings, topology, wire, offload=offload)
        setup = {"wire version": VERSION, "sites": topology.sites} | vars(settings) | wire.agreement()
        self._setup = json.dumps(setup | {"parameters": fingerprint(self.parameters.describe())})
        self._arrive()

    @torch.no_grad()
    def run_round(self) -> SyncReport:
        """A round with all sites that live, or, if they have gone on without this one, their θ.

        Raises:
            LocoError: the lighthouse is gone, or rounds go on failing though nobody is lost.
        """
        self.check_whole()
        failed: list[Plan] = []
        while True:
            plan = self._gather(ready=True)
            try:
                self.topology.link(plan)
                place = plan.place_of(self.topology.id)
                if place in plan.newcomers:
                    return self._follow(plan, plan.newcomers[place])
                return self._take_part_in(plan)
            except (TransportError, WireError, NonFiniteError, PeerError) as error:
                if self._at_fault:
                    raise
                self._give_up(plan, error, failed)

    def settle(self) -> SyncReport | None:
        """A round whose end was cut off is settled by the next quorum. Until then w must not move, so who
        goes on all the same gives the round up: if it counts after all, the next one brings the others' θ."""
        self.check_whole()
        self._unfinished = None
        return None

    def own_state(self) -> dict[str, Any]:
        return {"took_part": dict(self._took_part)}

    def adopt_state(self, state: Mapping[str, Any]) -> bool:
        """Come to the others with a state that was loaded: if they are further, θ and m are theirs."""
        self._took_part, self._committed, self._anchor_incomplete = (
            dict(state.get("took_part", {})),
            "",
            False,
        )
        return self._arrive()

    @torch.no_grad()
    def _arrive(self) -> bool:
        """Hold the θ that the run holds; at the start of one, the first site's. -> whether it was given."""
        failed: list[Plan] = []
        told = time.monotonic() - _REMIND + _PATIENT
        while True:
            plan = self._gather(ready=False)
            new = all(member.claim.round <= 0 for member in plan.members)
            if new and not plan.runs and len(plan.members) < self.topology.sites:
                if time.monotonic() - told > _REMIND:
                    told = time.monotonic()
                    here = ", ".join(member.name for member in plan.members)
                    _logger.warning(
                        "waiting for the run's sites: %d of %d are here (%s)",
                        len(plan.members),
                        self.topology.sites,
                        here,
                    )
                time.sleep(_PAUSE)
                continue
            try:
                place = plan.place_of(self.topology.id)
                if plan.newcomers:
                    self.topology.link(plan)
                if place in plan.newcomers:
                    self._follow(plan, plan.newcomers[place])
                else:
                    self._serve(plan)
                return place in plan.newcomers
            except (TransportError, WireError) as error:
                self._give_up(plan, error, failed)

    def _gather(self, *, ready: bool) -> Plan:
        """The next quorum's plan, once this site knows where it stands."""
        links, doubt = self.topology.links, self._unfinished is not None
        tried = self._plan.attempt if self._plan is not None else ""
        claim = Claim(
            round=-1 if self._anchor_incomplete else self.rounds_done,
            digest=digest_of(self.anchor),
            ready=ready,
            links="" if links is None else links.name,
            committed=self._committed,
            doubt=tried if doubt else "",
            setup=self._setup,
        )
        plan = self.topology.gather(claim)
        if max(member.claim.round for member in plan.members) < 0:
            raise LocoError(
                f"round {self.rounds_done + 1}: no site that is left holds the whole anchor: load the last "
                f"checkpoints"
            )
        if doubt:
            self._verdict = any(member.claim.committed == tried for member in plan.members)
            try:
                self._finish(ABORT)
            finally:
                self._verdict = None
        return plan

    def _take_part_in(self, plan: Plan) -> SyncReport:
        self._seat(plan)
        report = super().run_round()
        try:
            self._serve(plan)
        except TransportError as error:  # the round is done; who came will come again
            _logger.warning("%s", error)
            self.topology.unlink()
        return report

    def _seat(self, plan: Plan) -> None:
        """Link this site to the others of the round."""
        topology, links = self.topology, self.topology.links
        workers = list(plan.workers)
        topology.num_sites, topology.site = len(workers), workers.index(plan.place_of(topology.id))
        self._plan, self._store_of_round = plan, None if links is None else links.store
        self._across = topology.among(plan, workers)
        self._liveness = NoHeartbeats() if links is None else links.liveness
        self._exchange = Exchange(
            self._across, self._inside, self.parameters.name_of, self._wire, self._tuner
        )
        self._step = replace(self._step, num_sites=len(workers))
        self._connected = True

    def _counts(self, number: int, wish: str) -> bool:
        """Whether all sites of the quorum apply the round, or none that is left.

        The store of the links tells. If its host is lost too, the next quorum does: who knows says so there.
        """
        if self._verdict is not None:
            return self._verdict
        if self._store_of_round is None:  # alone
            return wish == COMMIT
        assert self._plan is not None
        return decide(self._store_of_round, f"verdict/{self._plan.attempt}", wish, StoreSeals()) == COMMIT

    def _apply(self, round: Any) -> None:
        super()._apply(round)
        assert self._plan is not None
        self._committed = self._plan.attempt
        self._took_part |= {self._plan.members[k].name: self.rounds_done for k in self._plan.workers}

    def _serve(self, plan: Plan) -> None:
        """Give θ and m to the newcomers that this site is to serve."""
        here = plan.place_of(self.topology.id)
        mine = [newcomer for newcomer, server in plan.newcomers.items() if server == here]
        if not mine:
            return
        link, links, tensors = self.topology.among(plan), self.topology.links, self._shared()
        if links is None:
            raise TransportError(f"giving round {self.rounds_done}: the links broke after it")
        digests = [digest_of(tensor) for tensor in tensors]
        head = Head(round=self.rounds_done, digests=digests, took_part=self._took_part)
        links.announce(f"{plan.attempt} done by {here}")
        for newcomer in mine:
            give(link, newcomer, head, tensors)
            _logger.warning("gave round %d to %s", self.rounds_done, plan.members[newcomer].name)

    def _follow(self, plan: Plan, server: int) -> SyncReport:
        """Take θ and m from a site that holds them, once its round is done."""
        began, links = time.perf_counter(), self.topology.links
        assert links is not None
        links.await_word(f"{plan.attempt} done by {server}", plan.workers)
        link = self.topology.among(plan)
        head = take_head(link, server)
        self._anchor_incomplete = True
        take(link, server, head, self._shared())
        self._anchor_incomplete = False
        with self.rewritten(), self.parameters.pieces(self.start, self.stop, write=True) as weights:
            kernels.write_weights(self.anchor, weights)
            dropped = self._keep_or_empty_residual(head)
            self.rounds_done, self._took_part = head.round, dict(head.took_part)
            self._committed = ""
        _logger.warning("took round %d from %s", head.round, plan.members[server].name)
        if dropped:
            _logger.warning("%s", dropped)
        numel = self.stop - self.start
        return SyncReport(
            round=self.rounds_done,
            numel=numel,
            entries=0,
            density=0.0,
            wire="float32",
            exchange="rejoin",
            payload_bytes=0,
            sent_bytes=link.sent_bytes,
            received_bytes=link.received_bytes,
            site_bytes=0,
            dense_bytes=0,
            update_norms=(),
            left_out=(),
            residual_norm=0.0 if self.residual is None else float(self.residual.double().norm()),
            seconds={"rejoin": time.perf_counter() - began},
        )

    def _keep_or_empty_residual(self, head: Head) -> str:
        """What is withheld may be sent once, if this site has not taken part in a round that it can't
        remember. -> what was dropped, and why."""
        last = head.took_part.get(self.topology.name, 0)
        if self.residual is None or last == self.rounds_done:
            return ""
        norm = float(self.residual.double().norm())
        self.residual.zero_()
        if not norm:
            return ""
        return (
            f"this site's residual of round {self.rounds_done} (norm {norm:.3g}) is dropped: the last round "
            f"it took part in is {last}, and a part of it may have been sent"
        )

    def _give_up(self, plan: Plan, error: LocoError, failed: list[Plan]) -> None:
        """Hang up, so that the others learn of it, and leave it to the next quorum.

        Raises:
            LocoError: the error, if it keeps coming though nobody is lost.
        """
        self.topology.unlink()
        failed.append(plan)
        _logger.warning("%s; asking who is left", error)
        same = [[member.id for member in one.members] for one in failed[-MOST:]]
        if len(same) == MOST and same.count(same[0]) == MOST:
            raise error

    def _shared(self) -> list[Tensor]:
        """What all sites hold alike."""
        return [tensor for tensor in (self.anchor, self.momentum) if tensor is not None]

    def _encode(self) -> tuple[Encoded | None, float, Problem | None]:
        encoded, norm, problem = super()._encode()
        self._at_fault = problem is not None
        return encoded, norm, problem
