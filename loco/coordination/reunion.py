"""All ranks meet within a time limit before they reconnect, or none of them goes on."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from ..errors import LocoError, TransportError, first_line
from ..logs import Waiting
from .authentication import StoreSeals
from .heartbeats import Guard, Heartbeats, guarded
from .register import Register, number_in
from .store_client import KeyValueStore

_PHASE = "reconnecting"
_POLL = 0.02  # seconds
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Party:
    """The ranks 0 … world−1 that meet, as one of them sees it.

    store: answers within a limit.
    root: of the store keys; the same on all ranks, and nobody else's.
    seals: of what is written, if the ranks share a key.
    liveness: who is alive.
    patience: seconds to wait for a rank that is alive.
    named: tells what ranks are called.
    """

    store: KeyValueStore
    root: str
    seals: StoreSeals
    liveness: Heartbeats
    rank: int
    world: int
    patience: float
    named: Callable[[Sequence[int]], str]

    def register(self, key: str) -> Register:
        return Register(self.store, f"{self.root}/{key}", self.seals)

    def named_but(self, come: set[int]) -> str:
        """The ranks that have not come."""
        return self.named([rank for rank in range(self.world) if rank not in come])

    def guarded(self, phase: str, *, raises: bool = True) -> AbstractContextManager[Guard]:
        """Watch the other ranks."""
        others = [other for other in range(self.world) if other != self.rank]
        return guarded(self.liveness, others, phase=phase, named=self.named, reunion=True, raises=raises)


class Reunion:
    """The meetings of a party, under any number of names.

    For each name the store holds "<meetings held>:<ranks that wait>". A rank either belongs to a meeting,
    with all the others, or does not: a rank that gives up, or is interrupted, takes its arrival back, and the
    others wait on; arriving twice is arriving once.
    """

    def __init__(self, party: Party) -> None:
        self._party = party
        self._held: dict[str, int] = {}  # by name

    def is_called(self, name: str) -> bool:
        """Whether ranks wait to meet under this name."""
        return bool(_Roll.of(self._party.register(f"reconnect/{name}").read()).waiting)

    def meet(self, name: str) -> int:
        """Return once all ranks are here at the same time -> how many meetings under this name came before.

        The numbers that a rank is given only grow, whatever becomes of the store's key: what is named by them
        never has a name that was used before.

        Raises:
            TransportError: a rank is lost, not all came within `patience`, or the store does not answer.
        """
        try:
            number = self._meet(self._party.register(f"reconnect/{name}"), self._held.get(name, 0))
        except LocoError:
            raise
        except RuntimeError as error:
            text = f"{_PHASE}: the sites' store failed ({first_line(error)})"
            raise TransportError(text, lasting=True) from error
        self._held[name] = number + 1
        return number

    def _meet(self, register: Register, number: int) -> int:
        """Args: number: the least that the meeting can have."""
        party, joined = self._party, False
        deadline = time.monotonic() + party.patience

        def arrive(value: str) -> str | None:
            roll = _Roll.of(value, number)
            if joined and (roll.held > number or party.rank in roll.waiting):
                return None
            return str(roll.joined_by(party.rank, party.world))

        def withdraw(value: str) -> str | None:
            roll = _Roll.of(value, number)
            if (joined and roll.held > number) or party.rank not in roll.waiting:
                return None
            return str(_Roll(roll.held, roll.waiting - {party.rank}))

        def missing() -> str:
            return f"{_PHASE}: {party.named_but(roll.waiting)}"

        roll = _Roll(number, set())
        with party.guarded(_PHASE) as guard, Waiting(_logger, missing):
            try:
                roll = _Roll.of(register.change(arrive), number)
                # Without anybody who waits, this rank was the last one to come, and has ended the meeting.
                number, joined = (roll.held if roll.waiting else roll.held - 1), True
                while roll.held == number:
                    if guard.loss is None and time.monotonic() <= deadline:
                        self._pause()
                        roll = _Roll.of(register.change(arrive), number)
                        continue
                    came = len(roll.waiting)
                    roll = _Roll.of(register.change(withdraw), number)
                    if roll.held == number:
                        raise self._late(came)
            except BaseException:  # Ctrl-C, say: that is what is raised, whether or not the store answers
                with suppress(RuntimeError):
                    register.change(withdraw)
                raise
        return number

    def _pause(self) -> None:
        time.sleep(_POLL)

    def _late(self, came: int) -> TransportError:
        return TransportError(
            f"{_PHASE}: {came} of {self._party.world} ranks came within {self._party.patience:g} s; a round "
            f"that failed is repeated by all ranks together",
            lasting=True,
        )


class _Roll:
    def __init__(self, held: int, waiting: set[int]) -> None:
        self.held = held
        self.waiting = waiting

    @classmethod
    def of(cls, value: str, least: int = 0) -> "_Roll":
        """What a value says; one that is malformed, or from before meeting number `least`, says nothing."""
        held, _, waiting = value.partition(":")
        if number_in(held) < least:
            return cls(least, set())
        return cls(number_in(held), {number_in(rank) for rank in waiting.split(",")} - {-1})

    def joined_by(self, rank: int, world: int) -> "_Roll":
        come = self.waiting | {rank}
        return _Roll(self.held + 1, set()) if len(come) == world else _Roll(self.held, come)

    def __str__(self) -> str:
        return f"{self.held}:{','.join(map(str, sorted(self.waiting)))}"
