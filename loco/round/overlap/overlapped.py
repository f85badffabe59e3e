"""The rounds of an optimizer whose inner steps go on while a round travels."""

import atexit
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

from loco import kernels
from loco.kernels import Encoded, Entries

from ...coordination.commit import ABORT
from ...errors import SAME_STEPS, TransportError, WireError, advising
from ...exchange.wire_config import WireConfig
from ...members.view import SiteTopology, View
from ...wire.refusal import Refused
from ..hooks import Hooks, RoundProgress
from ..outer_state import OuterState
from ..round import Round
from ..views import Views
from .boundary import cross, first_unusable, land, take_back
from .flight import Flight

_AGAIN = (
    "What this site had sent goes with the next round: call step() or sync() again on all ranks; if a "
    "process has died, restart all sites from their last checkpoint"
)
_AT_EXIT = 5.0  # seconds
_logger = logging.getLogger(__name__)


def require_one_rank_per_site(topology: SiteTopology) -> None:
    """
    Raises:
        ValueError: rounds can't overlap for these sites.
    """
    if topology.is_elastic or topology.ranks_per_site > 1:
        what = "come and go" if topology.is_elastic else "have several ranks"
        raise ValueError(
            f"overlap=True is for sites of one rank that stay the same; these {what}: leave it out, and each "
            f"round is waited for"
        )


class OverlappedRounds:
    """Each round is applied at the boundary after the one at which it was sent off: see `boundary`.

    A round that fails is one in which nobody has sent anything: v goes back into e, θ and m stay, and the
    inner steps that were made meanwhile stand.

    Args:
        state: of this rank.
        views: in which its rounds run.
        wire: how entries travel.
        hooks: called at every phase of a round, up to its verdict in the thread in which it travels.
        check_inner: raises a ValueError if the inner optimizer can't take part.
    """

    def __init__(
        self,
        state: OuterState,
        views: Views,
        wire: WireConfig,
        hooks: Hooks[RoundProgress],
        check_inner: Callable[[], None],
    ) -> None:
        self._state = state
        self._views = views
        self._wire = wire
        self._hooks = hooks
        self._check_inner = check_inner
        self._flight: Flight | None = None
        self._come: Round | None = None  # it counts, and is not applied yet
        atexit.register(_warn_at_exit, weakref.ref(self))

    def cross(self) -> Round | None:
        """A boundary -> the round that it applied, if one had come.

        Raises:
            LocoError: the round before this boundary failed; or this one can't begin, on this rank or, if it
                is refused, on all.
        """
        self._await()
        self._refuse_what_is_unusable()
        come, state = self._come, self._state
        with state.memory.used():
            encoded = cross(state, come)
        self._come = None
        self._send_off(lambda: encoded)
        return come

    def land(self) -> Round:
        """Wait for the round that the boundary just crossed has sent off, and apply it: w = cast(θ).

        Raises:
            LocoError: it failed.
        """
        self._await()
        come = self._come
        assert come is not None
        land(self._state, come)
        self._come = None
        return come

    def _await(self) -> None:
        """Until the round in flight has come, if there is one."""
        flight = self._flight
        if flight is None:
            return
        began = time.perf_counter()
        flight.wait()
        # The flight is forgotten last, or Ctrl-C between two lines would lose what it has sent.
        try:
            come = flight.result()
        except Exception:
            assert self._state.ahead is not None
            with self._state.rewriting():
                take_back(self._state, self._state.ahead)
                self._flight = None
            raise
        come.meter.travelled(flight.seconds, time.perf_counter() - began)
        self._come, self._flight = come, None

    def _refuse_what_is_unusable(self) -> None:
        """All sites refuse the next round together if this rank can't take part: nothing is applied before it
        is repaired."""
        problem: Exception | None = None
        try:
            self._check_inner()
            bad = first_unusable(self._state)
        except Exception as error:
            problem, bad = error, -1
        if problem is None and bad < 0:
            return

        def encode() -> Encoded:
            if problem is not None:
                raise problem
            nothing = Entries.none(self._state.numel, self._state.device)
            return Encoded(nothing, 0, bad)

        refused = Flight(lambda: self._travel(encode, self._next))
        refused.wait()
        refused.result()  # raises: this rank has voted against it

    @property
    def _next(self) -> int:
        """The number of the round that the next boundary sends off."""
        return self._state.rounds_done + (1 if self._come is None else 2)

    def _send_off(self, encode: Callable[[], Encoded]) -> None:
        number = self._next
        self._flight = Flight(lambda: self._travel(encode, number))

    def _travel(self, encode: Callable[[], Encoded], number: int) -> Round:
        """Bring a round to its verdict, tried again as long as that can help -> the round, which counts."""
        views = self._views
        attempts = views.membership.attempts()
        while True:
            view: View | None = None
            current: Round | None = None
            try:
                come = views.decide(ABORT)
                if come is None:
                    view = views.form(ready=True)
                    current = Round(
                        self._state, view, self._wire, encode=encode, hooks=self._hooks, number=number
                    )
                    come = views.run(current)
                views.pending = None
                return come
            except Refused as refusal:
                error, refused = refusal.error, True
            except (TransportError, WireError) as failure:
                error, refused = failure, False
            own_fault = current is not None and current.failed_here
            with advising(_AGAIN, SAME_STEPS):
                attempts.failed(error, linked=view is not None, refused=refused, own_fault=own_fault)

    def drop(self) -> None:
        """The state is about to be replaced: what has come, or is on its way, belongs to the old one."""
        if self._flight is not None:
            self._flight.wait()
        self._flight = self._come = self._state.ahead = None

    def own_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the round in flight. It is sent again when the state is loaded, which
        waits for nobody now and gives the same sums."""
        v = self._state.ahead
        in_flight = self._flight is not None or self._come is not None
        return {"ahead": None if v is None else v._asdict(), "in_flight": in_flight}

    def take_over(self, own: dict[str, Any]) -> None:
        """Go on from `own_state`, whose other parts have been loaded."""
        saved, state = own.get("ahead"), self._state
        state.ahead = None if saved is None else Entries(**saved).to(state.device)
        if own.get("in_flight"):
            assert state.ahead is not None
            encoded = Encoded(state.ahead, kernels.digest(state.anchor), -1)
            self._send_off(lambda: encoded)

    def warn_at_exit(self) -> None:
        flight, come = self._flight, self._come
        if flight is None and come is None:
            return
        _logger.warning(
            "the program ends with round %d in flight, which is in no site's weights: call sync() after the "
            "last step, on all sites",
            self._next,
        )
        if flight is not None:
            flight.wait(_AT_EXIT)  # others may wait for this site's part of it


def _warn_at_exit(rounds: "weakref.ref[OverlappedRounds]") -> None:
    if (those := rounds()) is not None:
        those.warn_at_exit()
