"""All ranks meet within a time limit before they reconnect, or none of them goes on."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..errors import LocoError, TransportError, first_line
from .authentication import StoreSeals
from .guard import guarded
from .heartbeats import Heartbeats
from .register import Register
from .store_client import KeyValueStore

_PHASE = "reconnecting"
_POLL = 0.02  # seconds


class Reunion:
    """The meetings of the ranks 0 … world−1, under any number of names.

    For each name the store holds "<meetings held>:<ranks that wait>". A rank either belongs to a meeting,
    with all the others, or does not: a rank that gives up, or is interrupted, takes its arrival back, and the
    others wait on; arriving twice is arriving once.

    Args:
        root: of the store keys.
        others: as `Rendezvous`.
    """

    def __init__(
        self,
        store: KeyValueStore,
        seals: StoreSeals,
        liveness: Heartbeats,
        root: str,
        rank: int,
        world: int,
        *,
        patience: float,
        named: Callable[[Sequence[int]], str],
    ) -> None:
        self._store = store
        self._seals = seals
        self._liveness = liveness
        self._root = root
        self._rank = rank
        self._world = world
        self._others = [other for other in range(world) if other != rank]
        self._patience = patience
        self._named = named
        self._held: dict[str, int] = {}  # by name

    def is_called(self, name: str) -> bool:
        """Whether ranks wait to meet under this name."""
        return bool(_Roll.of(self._register(name).read()).waiting)

    def meet(self, name: str) -> int:
        """Return once all ranks are here at the same time -> how many meetings under this name came before.

        The numbers that a rank is given only grow, whatever becomes of the store's key: what is named by them
        never has a name that was used before.

        Raises:
            TransportError: a rank is lost, not all came within `patience`, or the store does not answer.
        """
        try:
            number = self._meet(self._register(name), self._held.get(name, 0))
        except LocoError:
            raise
        except RuntimeError as error:
            text = f"{_PHASE}: the process group's store failed ({first_line(error)})"
            raise TransportError(text, lasting=True) from error
        self._held[name] = number + 1
        return number

    def _meet(self, register: Register, number: int) -> int:
        """Args: number: the least that the meeting can have."""
        deadline, joined = time.monotonic() + self._patience, False

        def arrive(value: str) -> str | None:
            roll = _Roll.of(value, number)
            if joined and (roll.held > number or self._rank in roll.waiting):
                return None
            return str(roll.joined_by(self._rank, self._world))

        def withdraw(value: str) -> str | None:
            roll = _Roll.of(value, number)
            if (joined and roll.held > number) or self._rank not in roll.waiting:
                return None
            return str(_Roll(roll.held, roll.waiting - {self._rank}))

        with guarded(self._liveness, self._others, phase=_PHASE, named=self._named, reunion=True) as guard:
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
            f"{_PHASE}: {came} of {self._world} ranks came within {self._patience:g} s; a round that "
            f"failed is repeated by all ranks together",
            lasting=True,
        )

    def _register(self, name: str) -> Register:
        return Register(self._store, f"{self._root}/{name}", self._seals)


class _Roll:
    def __init__(self, held: int, waiting: set[int]) -> None:
        self.held = held
        self.waiting = waiting

    @classmethod
    def of(cls, value: str, least: int = 0) -> "_Roll":
        """What a value says; one that is malformed, or from before meeting number `least`, says nothing."""
        held, _, waiting = value.partition(":")
        if not held.isdecimal() or int(held) < least:
            return cls(least, set())
        return cls(int(held), ranks_in(waiting))

    def joined_by(self, rank: int, world: int) -> "_Roll":
        come = self.waiting | {rank}
        return _Roll(self.held + 1, set()) if len(come) == world else _Roll(self.held, come)

    def __str__(self) -> str:
        return f"{self.held}:{listed_ranks(self.waiting)}"


def ranks_in(listed: str) -> set[int]:
    return {int(rank) for rank in listed.split(",") if rank.isdecimal()}


def listed_ranks(ranks: set[int]) -> str:
    return ",".join(map(str, sorted(ranks)))
