"""The views that a rank's rounds run in, one after another, and what a lost one left undecided."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar

from ..coordination.commit import ABORT, COMMIT
from ..errors import SAME_STEPS, LocoError, TransportError, WireError, advising
from ..members.view import Membership, Standing, View, require_open
from ..report import SyncReport
from ..wire.refusal import Refused
from .hooks import COUNTS, Phase
from .inside_site import await_site
from .joining.catch_up import catch_up_in_site
from .joining.first_anchor import share_first_anchor
from .joining.recovery import adopt_state, hand_over_state
from .outer.outer_state import OuterState
from .outer.state import standing_of
from .round import Round

_logger = logging.getLogger(__name__)
T = TypeVar("T")


class Views:
    """Forms the view of each round, and brings a round to its end whose view was lost before.

    Args:
        state: of this rank.
        membership: who takes part.

    Attributes:
        current: the latest one, over whose links this rank talks; None before the first.
        pending: a round that this rank may have promised or applied, and whose end is missing.
        committed: the name of the view that made the latest round.
        are_used_elsewhere: waits as long as another thread uses these, and forms new links itself where that
            is needed -> whether one did.
    """

    def __init__(self, state: OuterState, membership: Membership) -> None:
        self.current: View | None = None
        self.pending: Round | None = None
        self.committed = ""
        self.are_used_elsewhere: Callable[[], bool] = lambda: False
        self.membership = membership
        membership.reconnects_by(self)
        self._state = state
        self._of_site: View | None = None  # over whose links the ranks of this site were last in one state

    def begin(self) -> None:
        """θ is site 0's weights, or those of the run that is under way, on all sites, verified; w =
        cast(θ)."""
        is_alone = self.membership.others_may_be_ahead
        share_first_anchor(self._state, None if is_alone else self.form(ready=False, catches_up=False))
        if is_alone:
            self.arrive()

    def arrive(self) -> SyncReport | None:
        """Hold the θ that the run holds; at the start of one, the first site's -> of what was given."""

        def begin(view: View) -> SyncReport | None:
            assert view.handover is not None
            if view.handover.source is not None:
                return self.adopt(view)
            hand_over_state(self._state, view.handover)
            with self.conversing():
                await_site(view.inside, phase="starting to train")
            return None

        return self._repeated(partial(self.form, ready=False), begin)

    def _repeated(self, form: Callable[[], View], talk: Callable[[View], T]) -> T:
        """Talk in a view, and again in another one if its links are lost, as long as that can help."""
        attempts = self.membership.attempts()
        while True:
            view: View | None = None
            try:
                view = form()
                return talk(view)
            except (TransportError, WireError) as error:
                attempts.failed(error, linked=view is not None, refused=False, own_fault=False)

    def form(self, *, ready: bool, catches_up: bool = True) -> View:
        """The membership's view, once the ranks of a site hold the same weights in it."""
        require_open(self._state.topology)
        self._form_site(catches_up=catches_up)
        state, pending = self._state, self.pending
        in_doubt = pending is not None and pending.is_promised
        view = self.membership.form(
            Standing(
                rounds_done=-1 if state.anchor_incomplete else state.rounds_done,
                digest=lambda: standing_of(state),
                ready=ready,
                committed=self.committed,
                doubt=pending.view.name if pending is not None and in_doubt else "",
            )
        )
        self.current = view
        return view

    def reconnect(self) -> None:
        """Form new links in this site with those who wait for them."""
        if self.are_used_elsewhere():
            return
        self.membership.give_up("")
        self._form_site()

    def in_site(self, talk: Callable[[View], None]) -> None:
        """The ranks of this site talk over their links, and again over new ones if they are lost."""

        def form() -> View:
            require_open(self._state.topology)
            view = self._form_site()
            assert view is not None
            return view

        def converse(view: View) -> None:
            with self.conversing():
                talk(view)

        self._repeated(form, converse)

    def _form_site(self, *, catches_up: bool = True) -> View | None:
        """Links inside this site, whose ranks are then in one state; None: it has one rank."""
        state, before = self._state, self._of_site
        if state.topology.ranks_per_site == 1:
            return None
        view = self.membership.form_site()
        if view is not before and catches_up:
            committed = self.committed if self.membership.others_may_be_ahead else None
            with self.conversing():
                catch_up_in_site(state, view, self.pending, committed)
        if view is not before:
            self._of_site = self.current = view
        return view

    def adopt(self, view: View) -> SyncReport:
        """Take θ and m from another site."""
        with self.conversing():
            report = adopt_state(self._state, view)
        self.committed = ""
        return report

    def serve(self, view: View) -> None:
        """Give θ and m to the sites of a view that lack them."""
        handover, view.handover = view.handover, None  # once, whatever cuts it off
        if handover is None:
            return
        try:
            with self.conversing():
                hand_over_state(self._state, handover)
        except TransportError as error:  # the round is done; the receivers will ask again
            _logger.warning("%s", error)

    def run(self, current: Round) -> Round:
        """Steps 2 to 7, to the verdict: the round counts. If they fail once this rank has promised the round,
        its verdict decides.

        Raises:
            Refused: by all ranks together; their links are whole.
        """
        self.pending = current  # first: Ctrl-C may come between a promise and any line after it
        try:
            with self.conversing():
                current.run()
        except BaseException as error:
            if isinstance(error, Refused) and error.failed_here:
                current.failed_here = True
            if not current.is_promised:
                self.pending = None
                raise
            if not isinstance(error, Exception):  # Ctrl-C, say: the next call settles it
                raise
            if self.decide(ABORT) is None:
                raise
            _logger.warning("%s; the round counts all the same", error)
            return current
        if self.decide(COMMIT) is None:
            error = TransportError(
                f"round {current.number}: another rank lost its links in the last vote, so no rank has "
                f"applied the round"
            )
            self.hang_up(error)
            raise error
        return current

    def landed(self, come: Round | None) -> Round | None:
        """A round that has travelled is over; if it counts, the next boundary applies it."""
        self.pending = None
        if come is not None:
            self.committed = come.view.name
        return come

    def decide(self, vote: str) -> Round | None:
        """Learn whether the pending round counts -> it, if it does.

        Args:
            vote: what this rank writes as the verdict, unless another rank was quicker.

        Raises:
            TransportError: it can't be learned now; the next call tries again.
        """
        pending = self.pending
        if pending is not None and pending.is_promised:
            require_open(self._state.topology)
            pending.commit(vote)
        if pending is None or pending.phase not in COUNTS:
            self.pending = None
        return self.pending

    def settle(self, vote: str) -> SyncReport | None:
        """Apply the pending round, if it counts -> its report.

        Raises:
            TransportError: as `decide`.
        """
        pending = self.decide(vote)
        if pending is None:
            return None
        if pending.phase is Phase.COMMITTED:
            pending.apply()
        self.committed = pending.view.name
        view = self.current
        if self._state.lacks_slices:
            if view is not None and view.is_whole:
                with self.conversing():
                    pending.share(view)
            else:
                self._form_site()  # which ends with it
        self.pending = None
        return pending.report()

    def settle_unless_told_later(self) -> SyncReport | None:
        return None if self._is_told_later() else self.settle(ABORT)

    def decide_unless_told_later(self) -> Round | None:
        return None if self._is_told_later() else self.decide(ABORT)

    def _is_told_later(self) -> bool:
        """Where sites come and go, the other ranks of this site, or else the next view, tell what became of a
        round in doubt."""
        pending = self.pending
        if pending is not None and pending.is_promised and self.membership.others_may_be_ahead:
            self._form_site()
            return pending.is_promised
        return False

    def settle_as_told(self, view: View) -> SyncReport | None:
        """By the verdict that the members of a new view report."""
        return self.settle(COMMIT) if self._is_told(view) else None

    def decide_as_told(self, view: View) -> Round | None:
        return self.decide(COMMIT) if self._is_told(view) else None

    def _is_told(self, view: View) -> bool:
        if self.pending is None or view.committed is None:
            return False
        self.pending.learn_verdict(committed=view.committed)
        return True

    @property
    def is_in_doubt(self) -> bool:
        """Whether a round was interrupted that counts, or may."""
        pending = self.pending
        return pending is not None and (pending.is_promised or pending.phase in COUNTS)

    def undecided_round(self) -> int | None:
        """The number of the interrupted round of which this rank does not know yet whether it counts.

        Raises:
            LocoError: the interrupted round counts and is applied, but this rank's weights lack the part that
                the other ranks of its site hold.
        """
        self._state.check_whole()
        pending = self.pending
        if pending is None or not self.is_in_doubt:
            return None
        if not pending.is_promised:
            raise not_shared(pending.number)
        return pending.number

    def tell_step(self, local_step: int) -> None:
        """What those who wait for this rank may want to know."""
        if self.current is not None:
            state = self._state
            steps = f"step {local_step} of {state.settings.sync_every}"
            self.current.liveness.say(f"computing, {steps} after round {state.rounds_done}")

    def advice(self, staying: str, coming: str) -> AbstractContextManager[None]:
        """Around what may raise a TransportError, which then ends with what to do.

        Args:
            staying, coming: where the sites stay the same, or come and go, if no process has died.
        """
        if self.membership.others_may_be_ahead:
            return advising(f"{coming}; if one of its processes has died, restart this site")
        dead = "if a process has died, restart all sites from their last checkpoint"
        return advising(f"{staying}; {dead}", SAME_STEPS)

    @contextmanager
    def conversing(self) -> Iterator[None]:
        """Around messages that all ranks exchange in one order. A rank that leaves early hangs up, so that no
        message of a repeat is taken for one that a peer still waits for. All ranks refuse together, which
        leaves links whole."""
        try:
            yield
        except Refused:
            raise
        except BaseException as error:
            self.hang_up(error)
            raise

    def hang_up(self, error: BaseException) -> None:
        said = str(error) if isinstance(error, LocoError) else f"{type(error).__name__}: {error}"
        # Do not repeat peers' reports.
        self.membership.give_up(said.partition("; last heard of")[0])


def not_shared(number: int) -> LocoError:
    return LocoError(
        f"round {number} was interrupted before the ranks of this site had shared its result: call settle(), "
        f"sync() or step() on every rank to complete it"
    )
