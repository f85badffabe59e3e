"""A barrier in the store at which all ranks meet before they reconnect: all pass it, or none does."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from ..errors import LocoError, TransportError, seconds
from ..logs import Waiting
from .authentication import StoreSeals
from .compare_and_set import CompareAndSetKey, number_in
from .heartbeats import Guard, Heartbeats, guarded
from .store_client import KeyValueStore, no_store

_PHASE = "reconnecting"
_POLL = 0.02  # seconds
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BarrierContext:
    """What one of the ranks 0 … world−1 needs to meet the others through the store.

    store: answers within a limit.
    root: prefix of the store keys, the same on all ranks and used for nothing else.
    seals: of what is written, if the ranks share a key.
    liveness: who is alive.
    patience: seconds to wait for a rank that is alive.
    named: names ranks in errors.
    """

    store: KeyValueStore
    root: str
    seals: StoreSeals
    liveness: Heartbeats
    rank: int
    world: int
    patience: float
    named: Callable[[Sequence[int]], str]

    def shared_key(self, key: str) -> CompareAndSetKey:
        return CompareAndSetKey(self.store, f"{self.root}/{key}", self.seals)

    def named_but(self, come: set[int]) -> str:
        """The ranks that have not come."""
        return self.named([rank for rank in range(self.world) if rank not in come])

    def guarded(self, phase: str, *, link: str = "", raises: bool = True) -> AbstractContextManager[Guard]:
        """Watch the other ranks. `link`: a rank that gives it up is lost, too."""
        others = [other for other in range(self.world) if other != self.rank]
        return guarded(
            self.liveness,
            others,
            phase=phase,
            named=self.named,
            link=link,
            left_may_return=True,
            raises=raises,
        )


class ReconnectBarrier:
    """Meetings of all ranks, under any number of names.

    For each name the store holds "<meetings held>:<ranks that wait>". A rank that gives up or is interrupted
    removes itself from those that wait, and the others go on waiting; arriving twice counts once. So either
    all ranks belong to a meeting, or it has not taken place.
    """

    def __init__(self, context: BarrierContext) -> None:
        self._context = context
        self._held: dict[str, int] = {}  # by name

    def is_called(self, name: str) -> bool:
        """Whether ranks wait to meet under this name."""
        return bool(_BarrierState.of(self._context.shared_key(f"reconnect/{name}").read()).waiting)

    def next_meeting(self, name: str) -> int:
        """The number that the next meeting has, as far as this rank knows."""
        return self._held.get(name, 0)

    def meet(self, name: str, link: str = "") -> int:
        """Return once all ranks are here at the same time -> how many meetings under this name came before.

        link: a rank that has given it up does not come.

        The numbers returned to a rank only grow, whatever happens to the store's key, so a name made from
        them is never used twice.

        Raises:
            TransportError: a rank is lost, not all came within `patience`, or the store does not answer.
        """
        try:
            number = self._meet(self._context.shared_key(f"reconnect/{name}"), self.next_meeting(name), link)
        except LocoError:
            raise
        except RuntimeError as error:
            raise no_store(_PHASE, self._context.store, error) from error
        self._held[name] = number + 1
        return number

    def _meet(self, shared_key: CompareAndSetKey, number: int, link: str) -> int:
        """Args: number: the least that the meeting can have."""
        context, joined = self._context, False
        deadline = time.monotonic() + context.patience

        def arrive(value: str) -> str | None:
            state = _BarrierState.of(value, number)
            if joined and (state.held > number or context.rank in state.waiting):
                return None
            return str(state.joined_by(context.rank, context.world))

        def withdraw(value: str) -> str | None:
            state = _BarrierState.of(value, number)
            if (joined and state.held > number) or context.rank not in state.waiting:
                return None
            return str(_BarrierState(state.held, state.waiting - {context.rank}))

        def missing() -> str:
            return f"{_PHASE}: {context.named_but(state.waiting)}"

        state = _BarrierState(number, set())
        with context.guarded(_PHASE, link=link) as guard, Waiting(_logger, missing):
            try:
                state = _BarrierState.of(shared_key.change(arrive), number)
                # If nobody waits, this rank came last and has completed the meeting.
                number, joined = (state.held if state.waiting else state.held - 1), True
                while state.held == number:
                    if guard.loss is None and time.monotonic() <= deadline:
                        self._pause()
                        state = _BarrierState.of(shared_key.change(arrive), number)
                        continue
                    came = len(state.waiting)
                    state = _BarrierState.of(shared_key.change(withdraw), number)
                    if state.held == number:
                        raise self._late(came)
            except BaseException:  # such as Ctrl-C: it is raised whether or not the store answers
                with suppress(RuntimeError):
                    shared_key.change(withdraw)
                raise
        return number

    def _pause(self) -> None:
        time.sleep(_POLL)

    def _late(self, came: int) -> TransportError:
        return TransportError(
            f"{_PHASE}: {came} of {self._context.world} ranks came within "
            f"{seconds(self._context.patience)}; a round that failed is repeated by all ranks together",
            lasting=True,
        )


class _BarrierState:
    def __init__(self, held: int, waiting: set[int]) -> None:
        self.held = held
        self.waiting = waiting

    @classmethod
    def of(cls, value: str, least: int = 0) -> "_BarrierState":
        """Parse a value. One that is malformed, or older than meeting `least`, counts as empty."""
        held, _, waiting = value.partition(":")
        if number_in(held) < least:
            return cls(least, set())
        return cls(number_in(held), {number_in(rank) for rank in waiting.split(",")} - {-1})

    def joined_by(self, rank: int, world: int) -> "_BarrierState":
        come = self.waiting | {rank}
        return _BarrierState(self.held + 1, set()) if len(come) == world else _BarrierState(self.held, come)

    def __str__(self) -> str:
        return f"{self.held}:{','.join(map(str, sorted(self.waiting)))}"
