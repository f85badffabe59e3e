"""The outer loop: counts inner steps, runs the rounds between them, and repeats what failed."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from loco import kernels
from loco.kernels import Encoded

from ..config import Settings
from ..coordination.commit import COMMIT
from ..errors import START_AGAIN, TransportError, WireError, advising
from ..exchange.tuning import ExchangeTuner
from ..exchange.wire_config import WireConfig
from ..inner.own_masters import OwnMasters
from ..members.view import SiteTopology, View
from ..report import SyncReport
from ..setup_warnings import SetupWarnings
from ..wire.records import VERSION
from ..wire.refusal import Refused
from .hooks import Hooks, RoundProgress
from .inside_site import share_anchor
from .joining.first_anchor import agree_to_adopt, share_first_anchor, start_again
from .joining.handshake import agree_on_parameters
from .outer.outer_state import OuterState
from .outer.state import load_inner, pop_own_state, state_of, take_over
from .outer.weights import ShownAnchor, require_cast_of_anchor
from .overlap.overlapped import OverlappedRounds
from .round import Round
from .views import Views

_logger = logging.getLogger(__name__)
_GO_ON = "All ranks can go on with the next step() or sync()"


class OuterLoop:
    """Rounds over one optimizer's parameters.

    It is driven from outside: the wrappers call `before_step` and `after_step` in their own step, and what
    `loco.attach` returns does so in hooks of the user's optimizer. The methods that a user sees are explained
    in `loco.surface.RoundSurface`.

    What holds when a site is lost in a round: no other site has changed θ, m, e or w, and all can repeat the
    round with what they had. If the loss came so late that some ranks have heard all votes and others have
    not, those others hold all that the round takes: they learn whether it was committed, and commit it too.

    Args:
        inner: the optimizer whose parameters are synchronised.
        settings: equal on all sites.
        topology: who the sites are.
        wire: how entries travel.
        offload: keep θ, m and e in host memory.

    Attributes:
        state: what this rank holds.
        views: who took part in the latest round, and in an interrupted one.
        hooks: called at every phase of a round.
        report_hooks: called after each round.
        local_step: inner steps since the last round, or boundary.
        steps_since_round: inner steps since a round was applied.
        last_report: of the latest round; None before the first.

    Raises:
        ValueError: this rank's parameters can't be synchronised.
        AgreementError: another rank's can't, or the sites differ.
        TransportError, ReplicaError: the first anchor did not reach all.
    """

    @advising(START_AGAIN)
    def __init__(
        self, inner: Optimizer, settings: Settings, topology: SiteTopology, wire: WireConfig, *, offload: bool
    ) -> None:
        self.inner = inner
        self.hooks = Hooks[RoundProgress]()
        self.report_hooks = Hooks[SyncReport]()
        self.local_step = self.steps_since_round = 0
        self.last_report: SyncReport | None = None
        self._wire = wire
        self._shown: ShownAnchor | None = None  # in eval mode
        self._is_unmoved = True  # no inner step has begun since w = cast(θ)
        setup = {"wire version": VERSION} | settings.agreement() | wire.agreement()
        # A rank that can't go on says so before it raises, so that the others do not wait for it.
        agreed = agree_on_parameters(topology.all_ranks(), topology, inner, setup)
        tuner = ExchangeTuner(wire.codec, topology.num_sites)
        self.state = OuterState.of(agreed.parameters, agreed.part, settings, topology, tuner, offload=offload)
        # Inside a site NCCL's messages would wait for the training's in their streams, and these for them: a
        # round that runs beside the training has loco's own links.
        device = self.state.device if settings.overlap is None else torch.device("cpu")
        membership = topology.membership(device, setup | {"parameters": agreed.fingerprint})
        self.views = Views(self.state, membership)
        self.views.begin()
        self._masters = OwnMasters(inner, agreed.parameters)
        self._overlapped: OverlappedRounds | None = None
        if settings.overlap is not None:
            self._overlapped = OverlappedRounds(
                self.state, self.views, wire, self.hooks, self._check_inner, self._boundary_done
            )
        self._warnings = SetupWarnings(settings, topology, agreed.parameters, self.state.anchor, inner)

    def before_step(self) -> None:
        """Call it before an inner step moves the weights.

        Raises:
            ValueError: θ is shown, the weights were changed from outside, or other parameters are trained
                than the sites agreed on.
            LocoError: an interrupted round can't be settled yet.
        """
        self.refuse_in_eval("step()")
        self.settle(abandon=True)
        if self._overlapped is not None:
            self._overlapped.give_up_landing()
        if self._is_unmoved:
            self.state.parameters.check_unchanged(self.inner)
            require_cast_of_anchor(self.state)
            self._masters.before_first_step()
            self._is_unmoved = False

    def after_step(self) -> None:
        """Count an inner step, and run the round that is due."""
        self.local_step += 1
        self.steps_since_round += 1
        self.views.tell_step(self.local_step)
        if self.local_step == 1:
            self._masters.after_first_step(self.state.rounds_done)
        if self.local_step >= self.state.settings.sync_every:
            if self._overlapped is None:
                self.run_round()
            else:
                self._masters.before_round()
                self.state.check_whole()
                with torch.no_grad():
                    self._overlapped.cross()

    @torch.no_grad()
    def run_round(self) -> SyncReport:
        """A round with all members, tried again as long as that can help.

        Raises:
            LocoError: the round failed and changed nothing; it can be repeated.
        """
        self.refuse_in_eval("sync()")
        self._masters.before_round()
        self.state.check_whole()
        if self._overlapped is not None:
            return self._overlapped.sync()
        views = self.views
        attempts = views.membership.attempts()
        while True:
            view: View | None = None
            current: Round | None = None
            try:
                report = views.settle_unless_told_later()
                if report is not None:
                    return self._done(report)  # what was to be repeated had been done after all
                view = views.form(ready=True)
                report = views.settle_as_told(view)
                if view.handover is not None and view.handover.source is not None:
                    return self._done(views.adopt(view))
                if report is not None and not view.runs_round:
                    return self._done(report)
                current = Round(self.state, view, self._wire, encode=self._encode, hooks=self.hooks)
                views.run(current)
                report = views.settle(COMMIT)
                assert report is not None
            except Refused as refusal:
                error, refused = refusal.error, True
            except (TransportError, WireError) as failure:
                error, refused = failure, False
            else:
                views.serve(view)
                return self._done(report)
            own_fault = current is not None and current.failed_here
            with self._advice():
                attempts.failed(error, linked=view is not None, refused=refused, own_fault=own_fault)

    def _advice(self) -> AbstractContextManager[None]:
        return self.views.advice(_GO_ON, f"{_GO_ON} of this site")

    def _encode(self) -> Encoded:
        self._check_inner()
        state = self.state
        with state.parameters.pieces(state.start, state.stop) as weights:
            return kernels.encode(state.anchor, weights, state.residual, state.gate, state.weight)

    def _check_inner(self) -> None:
        self.state.parameters.check_unchanged(self.inner)
        self._masters.check()

    def _boundary_done(self, report: SyncReport | None) -> SyncReport | None:
        """A boundary between rounds that overlap has applied the round of this report, if one had come."""
        self.local_step, self._is_unmoved = 0, True
        return None if report is None else self._done(report, steps=self.steps_since_round)

    def _done(self, report: SyncReport, *, steps: int | None = None) -> SyncReport:
        """Args: steps: inner steps that the round is of; by default all since the last."""
        steps = self.local_step if steps is None else steps
        self.last_report, self.local_step, self._is_unmoved = report, 0, True
        self.steps_since_round = 0
        self.state.sent_bytes += report.site.sent_bytes
        if self.state.topology.rank_in_site == 0:
            _logger.info("%s: %s", self._site(), report)
        self._warnings.look_at(report, steps=steps)
        self.report_hooks.call(report)
        return report

    def _site(self) -> str:
        view = self.views.current
        return f"site {self.state.topology.site}" if view is None else view.across.called(view.site)

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
        if self._overlapped is not None:
            report = self._overlapped.finish()  # a round in flight ends at the next boundary
            return self.last_report if self._overlapped.cross_with_the_site() else report
        with self._advice():
            report = self.views.settle_unless_told_later()
        if abandon:
            self.views.pending = None
        return None if report is None else self._done(report)

    @torch.no_grad()
    def show_anchor(self) -> None:
        if self._shown is None:
            self.settle()  # which needs the weights
            with self._advice():
                self._shown = ShownAnchor(self.state, self._write_anchor)

    def _write_anchor(self) -> None:
        """w = cast(θ), on all ranks of a site together."""
        self.state.write_weights()
        if self.state.topology.ranks_per_site == 1:
            return
        self.views.are_used_elsewhere()  # a round in flight has these links
        share = partial(share_anchor, self.state, ahead=False)
        if self.views.membership.others_may_be_ahead:
            self.views.in_site(share)
        elif self.views.current is not None:  # new links would need the other sites, who may be training
            with self.views.conversing():
                share(self.views.current)

    def give_weights_back(self) -> None:
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.give_back()

    def refuse_in_eval(self, what: str) -> None:
        """
        Raises:
            ValueError: θ is shown.
        """
        if self._shown is not None:
            raise ValueError(
                f"{what} in eval mode, in which the weights show θ and not what the inner steps have made of "
                f"them: call optimizer.train() first"
            )

    @torch.no_grad()
    def adopt_weights(self) -> None:
        if self._overlapped is not None:
            self._overlapped.wait()
        views = self.views
        in_doubt = views.is_in_doubt
        may_be_ahead = views.membership.others_may_be_ahead
        with self._advice():
            agree_to_adopt(self.state, others_may_be_ahead=may_be_ahead, round_in_doubt=in_doubt)
            view = views.form(ready=True)
            if self._overlapped is not None:
                self._overlapped.drop()
            with self.state.rewriting():
                start_again(self.state)
                with views.conversing():
                    share_first_anchor(self.state, view)
        self._forget()

    def own_state(self, inner_state: dict[str, Any]) -> dict[str, Any]:
        """What a state dict has under "loco", beside the inner optimizer's state."""
        overlapped = self._overlapped
        undecided = self.views.undecided_round() if overlapped is None else None
        own = state_of(self.state, undecided_round=undecided)
        if overlapped is not None:
            own |= overlapped.own_state()
        if self._shown is not None:
            own["weights"] = self._shown.weights
        steps = {"local_step": self.local_step, "steps_since_round": self.steps_since_round}
        return own | steps | {"inner_entries": len(inner_state["state"])}

    def check_own_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take "loco" out of a state dict, and refuse it with a ValueError if it is not this rank's."""
        return pop_own_state(self.state, state_dict)

    def load(self, state_dict: dict[str, Any], agree: Callable[[], object] | None) -> None:
        """The inner optimizer's state and the outer one's, or nothing.

        Args:
            agree: called when only copying is left. If it raises, nothing was changed.
        """
        own = self.check_own_state(state_dict)
        load_inner(self.inner, state_dict, agree)
        self.take_over(own)

    @torch.no_grad()
    def take_over(self, own: dict[str, Any]) -> None:
        """Continue from what `check_own_state` returned."""
        self._shown = None
        if self._overlapped is not None:
            self._overlapped.drop()
        take_over(self.state, own)
        self.views.pending, self.views.committed = None, ""
        if self._overlapped is not None:
            self._overlapped.take_over(own)
        with self._advice():
            was_given = self.views.membership.others_may_be_ahead and self.views.arrive()
        self._forget()
        if not was_given:
            self.local_step = int(own["local_step"])
            self.steps_since_round = int(own.get("steps_since_round", self.local_step))
            self._is_unmoved = self.local_step == 0
        if self._overlapped is not None:
            self._overlapped.finish()

    def _forget(self) -> None:
        """The state was replaced."""
        self._shown, self.local_step, self._is_unmoved = None, 0, True
        self.steps_since_round = 0
        self._warnings.forget()
        self._masters.forget()
