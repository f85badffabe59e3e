"""Where all ranks meet outside of rounds, by the process group's store: to agree on notes, and to reconnect.

A round's links may be broken when there is something else to agree on, and links of their own would lie idle
between two checkpoints until a router forgets them. The store answers every rank at any time.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ..errors import CheckpointError, LocoError, TransportError, no_store
from .authentication import StoreSeals
from .guard import watched
from .heartbeats import Heartbeats
from .register import Register
from .reunion import Reunion, listed_ranks, ranks_in
from .store_client import KeyValueStore

_ALL = "all"  # have come
_POLL = 0.02  # seconds


@dataclass(frozen=True)
class _Off:
    """A call that was called off."""

    phase: str  # of the rank that did it
    why: str
    elsewhere: bool = False  # the ranks are needed for a reconnection


class NeededError(TransportError):
    """Other ranks wait to reconnect, and can't come before this rank has reconnected with them."""


class Agreement(Protocol):
    """How ranks agree outside of rounds: all of them (`Rendezvous`), or one that is alone (`Alone`)."""

    def swap(
        self, note: dict[str, Any], phase: str, needed: Callable[[], bool] | None = None
    ) -> list[dict[str, Any]]: ...

    def number_of(self, user: Any) -> int: ...

    def missed(self, phase: str) -> bool: ...

    def answers(self, user: Any, name: str) -> None: ...

    def called(self) -> list[Any]: ...

    def meet(self, name: str) -> int: ...

    def is_called(self, name: str) -> bool: ...


class Rendezvous:
    """The ranks 0 … world−1 meet for two things.

    To **swap** notes, for a save or a load: a call is for all ranks, and has one verdict: all have come, and
    every rank reads every note; or it is called off, by the first rank that can't wait any longer, and a rank
    that comes later for the same thing is told so. Calls are counted in the store and not by the ranks, so
    that they meet again whatever one of them has missed. For a rank that the store does not answer, the
    verdict stays open until its next call.

    To **meet** before they reconnect (`Reunion`): a rank that gives up takes its arrival back, and the others
    wait on.

    A reconnection outranks a swap: when ranks wait to reconnect under a name that this rank `answers`, the
    call that it waits in is called off, and all that wait in it are told (`NeededError`) to reconnect first.

    In the store: `call`, the number of the call that is open; under each number the roll, which is "0,2" (who
    has come), "all" or why it is off, and beside it a note of each rank that has come.

    Args:
        store: answers within a limit.
        seals: of what is written, if the ranks share a key.
        liveness: who is alive.
        name: the same on all ranks, and nobody else's.
        patience: seconds to wait for a rank that is alive.
        named: what ranks are called.
    """

    def __init__(
        self,
        store: KeyValueStore,
        seals: StoreSeals,
        liveness: Heartbeats,
        name: str,
        *,
        rank: int,
        world: int,
        patience: float,
        named: Callable[[Sequence[int]], str],
    ) -> None:
        self._store = store
        self._seals = seals
        self._liveness = liveness
        self._root = f"loco/{name}/notes"
        self._rank = rank
        self._world = world
        self._others = [other for other in range(world) if other != rank]
        self._patience = patience
        self._named = named
        self._through = -1  # the last call whose verdict this rank knows
        self._open: tuple[int, str] | None = None  # a call whose verdict it could not ask for, and its phase
        self._used: list[str] = []  # keys that some rank may still have to read
        self._first_roll = 0  # that may still be there
        self._users: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._known = 0
        self._answering: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._reunion = Reunion(
            store, seals, liveness, f"{self._root}/reconnect", rank, world, patience=patience, named=named
        )

    def meet(self, name: str) -> int:
        """As `Reunion.meet`."""
        return self._reunion.meet(name)

    def is_called(self, name: str) -> bool:
        """Whether ranks wait to meet under this name."""
        return self._reunion.is_called(name)

    def answers(self, user: Any, name: str) -> None:
        """As long as `user` is there, this rank leaves a swap when others wait to meet under this name."""
        self._answering[user] = name

    def called(self) -> list[Any]:
        """The users whom others wait to meet; after a `NeededError` they reconnect. A RuntimeError if the
        store does not answer."""
        return [user for user, name in list(self._answering.items()) if self.is_called(name)]

    def swap(
        self, note: dict[str, Any], phase: str, needed: Callable[[], bool] | None = None
    ) -> list[dict[str, Any]]:
        """Every rank's note, by rank.

        Args:
            needed: tells, beside the names that this rank `answers`, whether ranks wait to reconnect.

        Raises:
            NeededError: ranks wait to reconnect with this rank, or with another one that waits here.
            TransportError: a rank is dead, stopped, cut off, or did not come within `patience`: names it.
            CheckpointError: on all ranks: they came for different things.
        """
        self._liveness.say(phase)
        try:
            texts = self._call(note, phase, needed)
        except LocoError:
            raise
        except RuntimeError as error:
            raise no_store(phase, error) from error
        told = [json.loads(text) for text in texts]
        if any(came != phase for came, _ in told):
            found = ", ".join(f"rank {rank} for {came!r}" for rank, (came, _) in enumerate(told))
            raise CheckpointError(f"save() and load() belong at one place on all ranks, but came {found}")
        return [theirs for _, theirs in told]

    def number_of(self, user: Any) -> int:
        """Tells apart who uses these notes, by the order in which they first came: alike on all ranks."""
        if user not in self._users:
            self._users[user] = self._known
            self._known += 1
        return self._users[user]

    def missed(self, phase: str) -> bool:
        """Whether this rank's last call was for this, and only the store's answer to it was lost: all have
        come to it, or may still come.

        Raises:
            TransportError: the store still does not answer.
        """
        if self._open is None or self._open[1] != phase:
            return False
        try:
            return not isinstance(self._verdict(self._open[0]), _Off)
        except LocoError:
            raise
        except RuntimeError as error:
            raise no_store(phase, error) from error

    def _call(self, note: dict[str, Any], phase: str, needed: Callable[[], bool] | None) -> list[str]:
        if self._open is not None:
            asked, for_what = self._open
            verdict = self._verdict(asked)
            if for_what == phase and verdict == _ALL:  # the others went on with it
                texts = self._read(asked)
                self._open, self._through = None, asked
                return texts
            if for_what != phase and verdict is None:  # they wait, and this rank does not come back to it
                self._call_off(asked, _Off(for_what, f"it came for something else, {phase}"))
            self._open = None
        number = self._number()
        last = self._verdict(number - 1) if number - 1 > self._through else None
        if isinstance(last, _Off) and last.phase == phase and not last.elsewhere:
            self._through = number - 1
            raise TransportError(f"{phase}: {last.why}", lasting=True)
        try:
            mine = f"{self._root}/{number}/{self._rank}"
            self._used.append(mine)
            self._store.compare_set(mine, "", self._seals.write(mine, json.dumps([phase, note])))
            self._await_all(number, phase, needed)
            return self._read(number)
        except LocoError:
            raise
        except RuntimeError:
            self._open = number, phase
            raise
        except BaseException as error:  # Ctrl-C, say
            with suppress(RuntimeError):
                self._call_off(number, _Off(phase, type(error).__name__))
            raise

    def _await_all(self, number: int, phase: str, needed: Callable[[], bool] | None) -> None:
        """Return once all ranks have come; or call it off, for all of them."""
        deadline = time.monotonic() + self._patience
        verdict = self._enter(number)
        with watched(self._liveness, self._others, phase=phase, named=self._named, reunion=True) as guard:
            while verdict is None:
                time.sleep(_POLL)
                verdict = self._verdict(number)
                if verdict is not None:
                    break
                if guard.loss is not None:
                    verdict = self._call_off(number, _Off(phase, guard.sentence))
                elif self.called() or (needed is not None and needed()):
                    verdict = self._call_off(number, _Off(phase, "others wait for it elsewhere", True))
                elif time.monotonic() > deadline:
                    verdict = self._call_off(number, _Off(phase, self._late(number)))
        self._through = number
        if isinstance(verdict, _Off):
            error = NeededError if verdict.elsewhere else TransportError
            raise error(f"{phase}: {verdict.why}", lasting=True)

    def _read(self, number: int) -> list[str]:
        """What all wrote to a call to which all came, so that they are through with those before it."""
        keys = [f"{self._root}/{number}/{rank}" for rank in range(self._world)]
        if not self._store.check(keys):  # the store would wait for them
            raise RuntimeError("it has lost a note, or somebody else writes to it")
        texts = self._store.multi_get(keys)
        used, self._used = self._used, [keys[self._rank]]
        if self._rank == 0:
            used += [f"{self._root}/{k}" for k in range(self._first_roll, number)]
            self._first_roll = number
        with suppress(RuntimeError):  # a slow store may keep them
            for key in used:
                if key != keys[self._rank]:
                    self._store.delete_key(key)
        return [self._seals.read(key, text.decode()) for key, text in zip(keys, texts, strict=True)]

    def _number(self) -> int:
        """Of the call that is open."""
        number, key = 0, f"{self._root}/call"
        while True:
            number = int(self._store.compare_set(key, "", str(number)))
            if self._verdict(number) is None:
                return number
            self._store.compare_set(key, str(number), str(number + 1))

    def _roll(self, number: int) -> Register:
        return Register(self._store, f"{self._root}/{number}", self._seals)

    def _verdict(self, number: int) -> "str | _Off | None":
        """What has become of a call; None: it is open."""
        return _verdict_in(self._roll(number).read())

    def _enter(self, number: int) -> "str | _Off | None":
        """Be counted in -> what has become of the call."""

        def enter(roll: str) -> str | None:
            if _verdict_in(roll) is not None:
                return None
            come = ranks_in(roll) | {self._rank}
            return _ALL if len(come) == self._world else listed_ranks(come)

        return _verdict_in(self._roll(number).change(enter))

    def _call_off(self, number: int, off: _Off) -> "str | _Off | None":
        """-> what has become of the call: all may have come just now."""
        why = json.dumps(vars(replace(off, why=f"{off.why} (so {self._named([self._rank])} gave it up)")))
        return _verdict_in(self._roll(number).change(lambda roll: why if _verdict_in(roll) is None else None))

    def _late(self, number: int) -> str:
        missing = sorted(set(range(self._world)) - ranks_in(self._roll(number).read())) or [self._rank]
        return (
            f"no answer from {self._named(missing)} within {self._patience:g} s, though alive; "
            f"last heard of: {self._liveness.last_words(missing[0])}"
        )


class Alone:
    """The notes of a single rank."""

    def number_of(self, user: Any) -> int:
        return 0

    def missed(self, phase: str) -> bool:
        return False

    def answers(self, user: Any, name: str) -> None:
        pass

    def called(self) -> list[Any]:
        return []

    def meet(self, name: str) -> int:
        return 0

    def is_called(self, name: str) -> bool:
        return False

    def swap(
        self, note: dict[str, Any], phase: str, needed: Callable[[], bool] | None = None
    ) -> list[dict[str, Any]]:
        return [json.loads(json.dumps(note))]


def swap_or_fail(
    notes: Agreement,
    note: dict[str, Any],
    failure: Exception | None,
    phase: str,
    needed: Callable[[], bool] | None = None,
) -> list[dict[str, Any]]:
    """Every rank's note, if none of them failed before.

    Raises:
        Exception: `failure`, this rank's own.
        CheckpointError: another rank's.
        TransportError, NeededError, CheckpointError: as `Rendezvous.swap`.
    """
    note["failure"] = None if failure is None else str(failure) or type(failure).__name__
    told = notes.swap(note, phase, needed)
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(told):
        if theirs["failure"] is not None:
            raise CheckpointError(f"{phase}: rank {rank} failed: {theirs['failure']}")
    return told


def _verdict_in(roll: str) -> "str | _Off | None":
    if roll == _ALL:
        return _ALL
    return _Off(**json.loads(roll)) if roll.startswith("{") else None
