"""The rounds of an optimizer whose inner steps go on while a round travels."""

import logging
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from loco import kernels
from loco.kernels import Encoded, Entries

from ...errors import TransportError, WireError
from ...exchange.wire_config import WireConfig
from ...members.view import View
from ...report import SyncReport
from ..hooks import Hooks, Phase, RoundProgress
from ..inside_site import await_site, digests_of_copies, share_anchor
from ..outer.outer_state import OuterState
from ..round import Round
from ..views import Views, not_shared
from ..votes import not_finite
from .boundary import cross, land, take_back
from .flight import Flight, Landing, travel, warn_of_the_end

_AGAIN = "What this site had sent goes with the next round: call step() or sync() again"
_logger = logging.getLogger(__name__)


class OverlappedRounds:
    """Each round is applied at the boundary after the one at which it was sent off: see `boundary`.

    A round that fails is one in which nobody has sent anything: v goes back into e, θ and m stay, and the
    inner steps that were made meanwhile stand. Where sites come and go, one that the others have left behind
    is given their θ at a boundary; v and the inner steps that it has made stay in its e. Ctrl-C may come
    between any two lines: every call begins with what it has cut off (`finish`).

    Args:
        state: of this rank.
        views: in which its rounds run.
        wire: how entries travel.
        hooks: called at every phase of a round, up to its verdict in the thread in which it travels.
        check_inner: raises a ValueError if the inner optimizer can't take part.
        done: called at the end of each boundary, with the report of the round that it has applied, if there
            was one.
    """

    def __init__(
        self,
        state: OuterState,
        views: Views,
        wire: WireConfig,
        hooks: Hooks[RoundProgress],
        check_inner: Callable[[], None],
        done: Callable[[SyncReport | None], SyncReport | None],
    ) -> None:
        self._state = state
        self._views = views
        self._wire = wire
        self._hooks = hooks
        self._check_inner = check_inner
        self._done = done
        self._flights: list[Flight] = []  # at most one
        self._come: Round | None = None  # it counts, and has no report yet
        self._behind: View | None = None  # in which this site is given θ
        self._has_kept = False  # what it has not given the others
        # The rounds that the latest boundary sends off, and that `sync` waits for.
        self._crossing = self._landing = 0
        # Of the latest boundary: why this rank refuses the next round, and digests of its weights.
        self._problem: Exception | None
        self._problem, self._copies = None, b""
        views.are_used_elsewhere = self.wait
        weakref.finalize(self, warn_of_the_end, state, self._flights)

    def cross(self) -> None:
        """A boundary.

        Raises:
            LocoError: the round before this boundary failed; or this rank's part in the next is refused.
        """
        self.finish()
        self._await()
        if self._is_behind:  # its next part is of the steps that it makes from there, as a newcomer's
            self._catch_up()
            return
        state = self._state
        self._problem = self._problem_of_inner()
        self._copies = digests_of_copies(state.parameters, state.part)
        self._crossing = self._next
        self._cross(self._come)
        self.finish()
        assert state.ahead is not None
        has_failed = self._problem is not None or state.ahead.first_nonfinite >= 0
        if has_failed and state.topology.ranks_per_site == 1:  # ranks of a site raise at one boundary
            self._await()  # which raises it, as all ranks refuse the round

    def _cross(self, come: Round | None) -> None:
        state = self._state
        try:
            with state.memory.used():
                cross(state, come)
        except BaseException:  # Ctrl-C, say: others would wait for what this site was about to send
            if state.is_torn:
                self._views.membership.stop(f"round {state.rounds_done + 1} was stopped while it was applied")
            raise

    def sync(self) -> SyncReport:
        """A boundary, and its round, which is waited for: w = cast(θ).

        Raises:
            LocoError: as `cross`, or the round failed.
        """
        state, report = self._state, self.finish()
        if report is not None and report.round == self._landing:
            return report
        while not self._landing or self._landing != state.on_its_way:  # again, if it was given θ
            self._landing = self._next
            self.cross()
        self._await()
        if self._is_behind:
            return self._catch_up() or self.sync()
        assert self._come is not None
        land(state, self._come)
        report = self.finish()
        assert report is not None
        if (
            len(state.part.slices) < state.topology.ranks_per_site
            and self._views.membership.others_may_be_ahead
        ):
            # Of shards, a rank that missed the verdict is told it by those that did not, which may end now.
            with self._advice():
                self._views.in_site(lambda view: await_site(view.inside, phase="the end of sync"))
        return report

    def give_up_landing(self) -> None:
        """An inner step begins: a `sync` that was cut off is not what comes next."""
        self._landing = 0

    def finish(self) -> SyncReport | None:
        """The end of the latest boundary, as far as it lacks: the ranks of a site share their parts of the
        weights, what is to be sent is sent off, and the round that was applied is reported -> its report.

        Raises:
            LocoError: the ranks of this site can't share.
        """
        state, views, come = self._state, self._views, self._come
        if self._is_behind:
            return self._catch_up()
        if come is not None and come.phase is not Phase.APPLIED:
            return None
        if not self._flights and views.is_in_doubt:
            self._learn_verdict()
            if self._come is not None or not views.membership.others_may_be_ahead:
                return None
        if state.lacks_slices:
            with self._advice():
                views.in_site(partial(self._share, come))
        if not self._flights and state.on_its_way:
            self._send_off(come)
        for flight in self._flights:
            flight.take_off()
        if come is not None and not self._flights:
            views.serve(come.view)
        has_crossed = 0 < self._crossing == state.on_its_way
        if not has_crossed and come is None:
            return None
        self._done(None)  # first: a report may be lost to Ctrl-C, but steps are counted from this boundary
        self._crossing, self._come = 0, None
        return None if come is None else self._done(come.report())

    def _learn_verdict(self) -> None:
        """Of a flight that ended without it, as the store did not answer."""
        views = self._views
        with self._advice():
            come = views.decide_unless_told_later()
        if come is not None:
            come.meter.travelled(0.0, 0.0)
            self._come = views.landed(come)
        elif not views.is_in_doubt:
            take_back(self._state)

    def cross_with_the_site(self) -> bool:
        """The boundary at which a flight ended without the verdict, if the round counts after all: the other
        ranks of this site have crossed it, and wait to share -> whether it did."""
        come, ranks = self._come, self._state.topology.ranks_per_site
        if come is None or come.phase is not Phase.COMMITTED or ranks == 1:
            return False
        self.cross()
        return True

    @property
    def _next(self) -> int:
        """The number of the round that the next boundary sends off."""
        return self._state.rounds_done + (2 if self._state.on_its_way else 1)

    def _await(self) -> None:
        """Until the round in flight has come, if there is one."""
        if not self._flights:
            return
        flight, began = self._flights[0], time.perf_counter()
        flight.wait()
        # The flight is forgotten last, or Ctrl-C between two lines would lose what it has sent.
        try:
            come, behind = flight.result()
        except Exception:
            # In doubt it may count, and `finish` asks. And v is taken back once.
            if self._state.on_its_way and not self._views.is_in_doubt:
                take_back(self._state)
            self._flights.clear()
            raise
        if come is not None:
            come.meter.travelled(flight.seconds, time.perf_counter() - began)
        self._come, self._behind = come, behind
        self._flights.clear()

    @property
    def _is_behind(self) -> bool:
        return self._behind is not None or self._state.anchor_incomplete

    def _catch_up(self) -> SyncReport | None:
        """Be given the θ of the others, who have gone on without this site; None: none of them is left.

        Raises:
            NonFiniteError: it was, and an update of this site's is infinite or NaN.
            LocoError: no site gives it now; the next boundary asks again.
        """
        view = self._behind
        self._flights.clear()  # this one has ended
        if not self._has_kept:  # it lacks a part of θ after an attempt that was cut off
            self._problem = None if self._state.anchor_incomplete else self._keep_all()
            self._has_kept = True
        try:
            report = self._catch_up_by(view)
        except Exception:
            self._behind, self._has_kept = None, False
            raise
        problem, self._problem = self._problem, None
        self._behind, self._has_kept = None, False  # last: Ctrl-C may have come while it waited for θ
        report = report and self._done(report)
        if problem is not None:
            raise problem
        return report

    def _catch_up_by(self, view: View | None) -> SyncReport | None:
        with self._advice():
            if view is not None:
                try:
                    return self._views.adopt(view)
                except (TransportError, WireError) as error:
                    _logger.warning("%s", error)
            return self._views.arrive()

    def _keep_all(self) -> Exception | None:
        """v and the inner steps since go into e. A round that counts is applied first. -> what is wrong with
        these steps."""
        state, come = self._state, self._come
        if come is not None and come.phase is not Phase.APPLIED:
            self._cross(come)
        else:
            if state.on_its_way:
                take_back(state)
            self._cross(None)
        bad = -1 if state.ahead is None else state.ahead.first_nonfinite
        take_back(state)
        self._done(None)
        if come is not None:
            self._come = None  # first: a hook may call `eval()`, or save
            self._has_kept, behind, self._behind = True, self._behind, None
            try:
                self._done(come.report())
            finally:
                self._behind = behind
        return None if bad < 0 else not_finite(f"round {state.rounds_done + 1}", state.name_at(bad))

    def _advice(self) -> AbstractContextManager[None]:
        return self._views.advice(f"{_AGAIN} on all ranks", _AGAIN)

    def wait(self) -> bool:
        """Until no round is under way -> whether one was."""
        under_way = [flight for flight in self._flights if not flight.has_ended]
        for flight in under_way:
            flight.wait()
        return bool(under_way)

    def _problem_of_inner(self) -> Exception | None:
        try:
            self._check_inner()
        except Exception as error:
            return error
        return None

    def _share(self, come: Round | None, view: View) -> None:
        if self._state.lacks_slices:  # otherwise these are new links, over which all have shared at once
            share_anchor(self._state, view) if come is None else come.share(view)

    def _send_off(self, applied: Round | None) -> None:
        """Args: applied: at this boundary: the sites that have come in its view are given its θ."""
        state, views, problem, copies = self._state, self._views, self._problem, self._copies
        sends, number = state.ahead, state.on_its_way
        served = None if applied is None else applied.view  # the round itself holds all entries
        assert sends is not None

        def encode() -> Encoded:
            if problem is not None:
                raise problem
            return sends

        def run() -> Landing:
            if served is not None:
                views.serve(served)
            how = {"encode": encode, "copies": lambda: copies, "hooks": self._hooks, "number": number}
            return travel(views, partial(Round, self._state, wire=self._wire, **how), self._advice)

        self._flights.append(Flight(run))

    def drop(self) -> None:
        """The state is about to be replaced: what has come, or is on its way, belongs to the old one."""
        self.wait()
        self._state.on_its_way = self._crossing = self._landing = 0
        self._flights.clear()
        self._come = self._behind = self._state.ahead = None
        self._state.lacks_slices = False

    def own_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the round in flight. It is sent again when the state is loaded, which
        waits for nobody now and gives the same sums.

        Raises:
            LocoError: the latest boundary was cut off.
        """
        state = self._state
        is_applied = self._come is not None and self._come.phase is Phase.APPLIED
        if state.lacks_slices or is_applied or 0 < self._crossing == state.on_its_way:
            raise not_shared(state.rounds_done)
        sent = state.ahead and state.ahead.entries._asdict()
        weight = state.ahead.factor if state.ahead else 1.0
        how = {"ahead_by": state.ahead_by, "sent_weight": weight}
        return {"ahead": sent, **how, "in_flight": state.on_its_way > 0}

    def take_over(self, own: dict[str, Any]) -> None:
        """Go on from `own_state`, whose other parts are loaded; `finish` sends off what was in flight."""
        saved, state, weight = own.get("ahead"), self._state, float(own.get("sent_weight", 1.0))
        if saved is None:
            return
        state.ahead = Encoded(Entries(**saved).to(state.device), kernels.digest(state.anchor), -1, weight)
        state.ahead_by = float(own.get("ahead_by", state.beta))
        if own.get("in_flight"):
            state.on_its_way = state.rounds_done + 1
            self._problem, self._copies = None, digests_of_copies(state.parameters, state.part)
