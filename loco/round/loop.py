"""The outer loop: rounds, one after the other, and what is done when one of them fails."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch.optim import Optimizer

from ..config import Settings
from ..coordination.commit import ABORT, COMMIT
from ..errors import LocoError, TransportError, WireError
from ..exchange.tuning import ExchangeTuner
from ..exchange.wire_config import WireConfig
from ..members.view import SiteTopology, Standing, View, require_open
from ..report import SyncReport
from ..wire.records import VERSION
from ..wire.refusal import Refused
from .hooks import COUNTS, Hooks, Phase
from .inside_site import await_site, share_anchor
from .joining.catch_up import catch_up_in_site
from .joining.first_anchor import agree_to_adopt, share_first_anchor, start_again
from .joining.handshake import agree_on_parameters
from .joining.recovery import adopt_state, hand_over_state
from .outer_state import OuterState
from .round import Round
from .state import digest_of

T = TypeVar("T")
_logger = logging.getLogger(__name__)


class OuterLoop:
    """Rounds over one optimizer's parameters.

    What holds when a site is lost in a round: no other site has changed θ, m, e or w, and all can repeat the
    round with what they had. If the loss came so late that some ranks have heard all votes and others have
    not, those others hold all that the round takes: they learn whether it was committed, and commit it too.

    Args:
        inner: the optimizer whose parameters are synchronised.
        settings: equal on all sites.
        topology: who the sites are.
        wire: how entries travel.
        offload: keep θ, m and e in host memory.

    Raises:
        ValueError: this rank's parameters can't be synchronised.
        AgreementError: another rank's can't, or the sites differ.
        TransportError, ReplicaError: the first anchor did not reach all.
    """

    def __init__(
        self, inner: Optimizer, settings: Settings, topology: SiteTopology, wire: WireConfig, *, offload: bool
    ) -> None:
        self.hooks = Hooks()
        self._wire = wire
        setup = {"wire version": VERSION} | vars(settings) | wire.agreement()
        # A rank that can't go on says so before it raises, so that the others do not wait for it.
        agreed = agree_on_parameters(topology.all_ranks(), topology, inner, setup)
        tuner = ExchangeTuner(wire.codec, topology.num_sites)
        self.state = OuterState.of(agreed.parameters, agreed.part, settings, topology, tuner, offload=offload)
        self._membership = topology.membership(self.state.device, setup | {"parameters": agreed.fingerprint})
        self._membership.reconnects_by(self)
        self._view: View | None = None
        self._site_view: View | None = None  # over whose links the ranks of this site were last in one state
        self._pending: Round | None = None  # promised or applied by this rank, perhaps; its end is missing
        self._committed = ""  # the name of the view that made the latest round
        self._start()

    @torch.no_grad()
    def run_round(self, check_inner: Callable[[], None]) -> SyncReport:
        """A round with all members, tried again as long as that can help.

        Args:
            check_inner: raises a ValueError if the inner optimizer can't take part: all ranks then refuse.

        Raises:
            LocoError: the round failed and changed nothing; it can be repeated.
        """
        self.state.check_whole()
        attempts = self._membership.attempts()
        while True:
            view: View | None = None
            current: Round | None = None
            try:
                report = self._settle_unless_told_later()
                if report is not None:
                    return report  # what was to be repeated had been done after all
                view = self._form(ready=True)
                report = self._settle_as_told(view)
                if view.handover is not None and view.handover.source is not None:
                    return self._adopt(view)
                if report is not None and not view.runs_round:
                    return report
                current = Round(self.state, view, self._wire, check_inner=check_inner, hooks=self.hooks)
                report = self._run_once(current)
            except Refused as refusal:
                error, refused = refusal.error, True
            except (TransportError, WireError) as failure:
                error, refused = failure, False
            else:
                self._serve(view)
                return report
            own_fault = current is not None and current.failed_here
            attempts.failed(view, error, refused=refused, own_fault=own_fault)

    @torch.no_grad()
    def settle(self, *, abandon: bool = False) -> SyncReport | None:
        """Finish a round whose end was cut off, if any -> its report, if it counts.

        Where the others may be ahead, only the next view tells what became of a round in doubt, and nothing
        is settled here.

        Args:
            abandon: w is about to move, so give up a round that can't be settled yet: if it counts after all,
                the next view brings the others' θ.

        Raises:
            LocoError: it can't be finished yet; or this rank can't go on, see `OuterState.check_whole`.
        """
        self.state.check_whole()
        report = self._settle_unless_told_later()
        if abandon:
            self._pending = None
        return report

    def undecided_round(self) -> int | None:
        """The number of the interrupted round of which this rank does not know yet whether it counts.

        Raises:
            LocoError: the interrupted round counts and is applied, but this rank's weights lack the part that
                the other ranks of its site hold.
        """
        self.state.check_whole()
        pending = self._pending
        if pending is None or not (pending.is_promised or pending.phase in COUNTS):
            return None
        if not pending.is_promised:
            raise LocoError(
                f"round {pending.number} was interrupted before the ranks of this site had shared its "
                f"result: call settle(), sync() or step() on every rank to complete it"
            )
        return pending.number

    @torch.no_grad()
    def resume(self) -> bool:
        """Go on from a state that was just loaded -> whether another site's has taken its place."""
        self._pending, self._committed = None, ""
        return self._membership.others_may_be_ahead and self._arrive()

    @torch.no_grad()
    def show_anchor(self) -> None:
        """w = cast(θ), on all ranks of a site together.

        Raises:
            TransportError: a link inside the site is lost.
        """
        self.state.write_weights()
        view = self._view
        if view is not None and view.inside.size > 1:
            self._converse(lambda: share_anchor(self.state, view))

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """As `RoundSurface.adopt_weights`."""
        pending, may_be_ahead = self._pending, self._membership.others_may_be_ahead
        in_doubt = pending is not None and (pending.is_promised or pending.phase in COUNTS)
        agree_to_adopt(self.state, others_may_be_ahead=may_be_ahead, round_in_doubt=in_doubt)
        view = self._form(ready=True)
        with self.state.rewriting():
            start_again(self.state)
            self._converse(lambda: share_first_anchor(self.state, view))

    @torch.no_grad()
    def reconnect(self) -> None:
        """Form new links in this site with those who wait for them."""
        self._membership.give_up("")
        self._form_site()

    def tell_step(self, local_step: int) -> None:
        """What those who wait for this rank may want to know."""
        if self._view is not None:
            steps = f"step {local_step} of {self.state.settings.sync_every}"
            self._view.liveness.say(f"computing, {steps} after round {self.state.rounds_done}")

    def _start(self) -> None:
        """θ is site 0's weights, or those of the run that is under way, on all sites, verified; w =
        cast(θ)."""
        is_alone = self._membership.others_may_be_ahead
        share_first_anchor(self.state, None if is_alone else self._form(ready=False, catches_up=False))
        if is_alone:
            self._arrive()

    def _arrive(self) -> bool:
        """Hold the θ that the run holds; at the start of one, the first site's. -> whether it was given."""
        attempts = self._membership.attempts()
        while True:
            view: View | None = None
            try:
                view = self._form(ready=False)
                assert view.handover is not None
                if view.handover.source is not None:
                    self._adopt(view)
                    return True
                hand_over_state(self.state, view.handover)
                self._converse(partial(await_site, view.inside, phase="starting to train"))
                return False
            except (TransportError, WireError) as error:
                attempts.failed(view, error, refused=False, own_fault=False)

    def _form(self, *, ready: bool, catches_up: bool = True) -> View:
        """The membership's view, once the ranks of a site hold the same weights in it."""
        require_open(self.state.topology)
        self._form_site(catches_up=catches_up)
        state, pending = self.state, self._pending
        in_doubt = pending is not None and pending.is_promised
        view = self._membership.form(
            Standing(
                rounds_done=-1 if state.anchor_incomplete else state.rounds_done,
                digest=lambda: digest_of(state.anchor),
                ready=ready,
                committed=self._committed,
                doubt=pending.view.name if pending is not None and in_doubt else "",
            )
        )
        self._view = view
        return view

    def _form_site(self, *, catches_up: bool = True) -> None:
        """Links inside this site, whose ranks are then in one state."""
        state, before = self.state, self._site_view
        if state.topology.ranks_per_site == 1:
            return
        view = self._membership.form_site()
        if view is not before and catches_up:
            committed = self._committed if self._membership.others_may_be_ahead else None
            self._converse(lambda: catch_up_in_site(state, view, self._pending, committed))
        if view is not before:
            self._site_view = self._view = view

    def _run_once(self, current: Round) -> SyncReport:
        """Steps 2 to 8. If they fail once this rank has promised the round, the register knows the verdict.

        Raises:
            Refused: by all ranks together; their links are whole.
        """
        self._pending = current  # first: Ctrl-C may come between a promise and any line after it
        try:
            self._converse(current.run)
        except BaseException as error:
            if not current.is_promised:
                self._pending = None
                raise
            if not isinstance(error, Exception):  # Ctrl-C, say: the next call settles it
                raise
            report = self._settle(ABORT)
            if report is None:
                raise
            _logger.warning("%s; the round counts all the same", error)
            return report
        report = self._settle(COMMIT)
        if report is None:
            error = TransportError(
                f"round {current.number}: another rank lost its links in the last vote, so no rank has "
                f"applied the round, and all can repeat it"
            )
            self._hang_up(error)
            raise error
        return report

    def _settle(self, vote: str) -> SyncReport | None:
        """Apply the pending round, if it counts -> its report.

        Args:
            vote: this rank's, for the register, if no other rank was quicker.

        Raises:
            TransportError: it can't be settled now; the next call tries again.
        """
        pending = self._pending
        if pending is not None and pending.is_promised:
            require_open(self.state.topology)
            pending.commit(vote)
        if pending is None or pending.phase not in COUNTS:
            self._pending = None
            return None
        if pending.phase is Phase.COMMITTED:
            pending.apply()
        self._committed = pending.view.name
        view = self._view
        if len(self.state.part.slices) > 1 and not pending.is_shared:
            if view is not None and view.is_whole:
                self._converse(lambda: pending.share(view))
            else:
                self._form_site()  # which ends with it
        self._pending = None
        return pending.report()

    def _settle_unless_told_later(self) -> SyncReport | None:
        """Where sites come and go, the other ranks of this site, or else the next view, tell what became of a
        round in doubt."""
        pending = self._pending
        if pending is not None and pending.is_promised and self._membership.others_may_be_ahead:
            self._form_site()
            if pending.is_promised:
                return None
        return self._settle(ABORT)

    def _settle_as_told(self, view: View) -> SyncReport | None:
        if self._pending is None or view.committed is None:
            return None
        self._pending.learn_verdict(committed=view.committed)
        return self._settle(COMMIT)

    def _adopt(self, view: View) -> SyncReport:
        report = self._converse(lambda: adopt_state(self.state, view))
        self._committed = ""
        return report

    def _serve(self, view: View) -> None:
        if view.handover is None:
            return
        try:
            self._converse(partial(hand_over_state, self.state, view.handover))
        except TransportError as error:  # the round is done; the receivers will ask again
            _logger.warning("%s", error)

    def _converse(self, speak: Callable[[], T]) -> T:
        """Messages that all ranks exchange in one order. A rank that leaves early hangs up, so that no
        message of a repeat is taken for one that a peer still waits for. All ranks refuse a round together,
        which leaves links whole."""
        try:
            return speak()
        except Refused:
            raise
        except BaseException as error:
            self._hang_up(error)
            raise

    def _hang_up(self, error: BaseException) -> None:
        said = str(error) if isinstance(error, LocoError) else f"{type(error).__name__}: {error}"
        # Do not repeat peers' reports.
        self._membership.give_up(said.partition("; last heard of")[0])
