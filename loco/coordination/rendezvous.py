"""Where all ranks meet outside of rounds, by the process group's store: to agree on notes, and to reconnect.

A round's links may be broken when there is something else to agree on, and links of their own would lie idle
between two checkpoints until a router forgets them. The store answers every rank at any time.
"""

import json
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ..errors import CheckpointError, LocoError, TransportError, no_store
from .register import Register
from .reunion import Party, Reunion, listed_ranks, ranks_in

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

    def swap(self, note: dict[str, Any], phase: str) -> list[dict[str, Any]]: ...

    def number_of(self, user: Any) -> int: ...

    def missed(self, phase: str) -> bool: ...

    def reconnect(self) -> None: ...


class Reconnects(Protocol):
    """What builds new links together with the other ranks."""

    def reconnect(self) -> object: ...


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
    """

    def __init__(self, party: Party) -> None:
        self._party = party
        self._through = -1  # the last call whose verdict this rank knows
        self._open: tuple[int, str] | None = None  # a call whose verdict it could not ask for, and its phase
        self._used: list[str] = []  # keys that some rank may still have to read
        self._first_roll = 0  # that may still be there
        self._users: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._known = 0
        self._answering: WeakKeyDictionary[Reconnects, str] = WeakKeyDictionary()
        self._reunion = Reunion(party)

    def meet(self, name: str) -> int:
        """As `Reunion.meet`."""
        return self._reunion.meet(name)

    def answers(self, user: Reconnects, name: str) -> None:
        """As long as `user` is there, this rank leaves a swap when others wait to meet under this name."""
        self._answering[user] = name

    def reconnect(self) -> None:
        """After a `NeededError`: with those who wait for it.

        Raises:
            TransportError: a rank is lost or did not come, or the store does not answer.
        """
        try:
            called = self._called()
        except RuntimeError as error:
            raise no_store("reconnecting", error) from error
        for user in called:
            user.reconnect()

    def _called(self) -> list[Reconnects]:
        """The users whom others wait to meet."""
        return [user for user, name in list(self._answering.items()) if self._reunion.is_called(name)]

    def swap(self, note: dict[str, Any], phase: str) -> list[dict[str, Any]]:
        """Every rank's note, by rank.

        Raises:
            NeededError: ranks wait to reconnect with this rank, or with another one that waits here.
            TransportError: a rank is dead, stopped, cut off, or did not come within `patience`: names it.
            CheckpointError: on all ranks: they came for different things.
        """
        self._party.liveness.say(phase)
        try:
            texts = self._call(note, phase)
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

    def _call(self, note: dict[str, Any], phase: str) -> list[str]:
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
            mine = self._notes_of(number)[self._party.rank]
            self._used.append(mine)
            sealed = self._party.seals.write(mine, json.dumps([phase, note]))
            self._party.store.compare_set(mine, "", sealed)
            self._await_all(number, phase)
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

    def _await_all(self, number: int, phase: str) -> None:
        """Return once all ranks have come; or call it off, for all of them."""
        deadline = time.monotonic() + self._party.patience
        verdict = self._enter(number)
        with self._party.guarded(phase, raises=False) as guard:
            while verdict is None:
                time.sleep(_POLL)
                verdict = self._verdict(number)
                if verdict is not None:
                    break
                if guard.loss is not None:
                    verdict = self._call_off(number, _Off(phase, guard.sentence))
                elif self._called():
                    verdict = self._call_off(number, _Off(phase, "others wait for it elsewhere", True))
                elif time.monotonic() > deadline:
                    verdict = self._call_off(number, _Off(phase, self._late(number)))
        self._through = number
        if isinstance(verdict, _Off):
            error = NeededError if verdict.elsewhere else TransportError
            raise error(f"{phase}: {verdict.why}", lasting=True)

    def _read(self, number: int) -> list[str]:
        """What all wrote to a call to which all came, so that they are through with those before it."""
        party, keys = self._party, self._notes_of(number)
        if not party.store.check(keys):  # the store would wait for them
            raise RuntimeError("it has lost a note, or somebody else writes to it")
        texts = party.store.multi_get(keys)
        used, self._used = self._used, [keys[party.rank]]
        if party.rank == 0:
            used += [f"{party.root}/{k}" for k in range(self._first_roll, number)]
            self._first_roll = number
        with suppress(RuntimeError):  # a slow store may keep them
            for key in used:
                if key != keys[party.rank]:
                    party.store.delete_key(key)
        return [party.seals.read(key, text.decode()) for key, text in zip(keys, texts, strict=True)]

    def _notes_of(self, number: int) -> list[str]:
        """The store keys of a call's notes, by rank."""
        return [f"{self._party.root}/{number}/{rank}" for rank in range(self._party.world)]

    def _number(self) -> int:
        """Of the call that is open."""
        number, store, key = 0, self._party.store, f"{self._party.root}/call"
        while True:
            number = int(store.compare_set(key, "", str(number)))
            if self._verdict(number) is None:
                return number
            store.compare_set(key, str(number), str(number + 1))

    def _roll(self, number: int) -> Register:
        return self._party.register(str(number))

    def _verdict(self, number: int) -> "str | _Off | None":
        """What has become of a call; None: it is open."""
        return _verdict_in(self._roll(number).read())

    def _enter(self, number: int) -> "str | _Off | None":
        """Be counted in -> what has become of the call."""

        def enter(roll: str) -> str | None:
            if _verdict_in(roll) is not None:
                return None
            come = ranks_in(roll) | {self._party.rank}
            return _ALL if len(come) == self._party.world else listed_ranks(come)

        return _verdict_in(self._roll(number).change(enter))

    def _call_off(self, number: int, off: _Off) -> "str | _Off | None":
        """-> what has become of the call: all may have come just now."""
        me = self._party.named([self._party.rank])
        why = json.dumps(vars(replace(off, why=f"{off.why} (so {me} gave it up)")))
        return _verdict_in(self._roll(number).change(lambda roll: why if _verdict_in(roll) is None else None))

    def _late(self, number: int) -> str:
        party = self._party
        missing = sorted(set(range(party.world)) - ranks_in(self._roll(number).read())) or [party.rank]
        return (
            f"no answer from {party.named(missing)} within {party.patience:g} s, though alive; "
            f"last heard of: {party.liveness.last_words(missing[0])}"
        )


class Alone:
    """The notes of a single rank."""

    def number_of(self, user: Any) -> int:
        return 0

    def missed(self, phase: str) -> bool:
        return False

    def reconnect(self) -> None:
        pass

    def swap(self, note: dict[str, Any], phase: str) -> list[dict[str, Any]]:
        return [json.loads(json.dumps(note))]


def swap_or_fail(
    notes: Agreement,
    note: dict[str, Any],
    failure: Exception | None,
    phase: str,
) -> list[dict[str, Any]]:
    """Every rank's note, if none of them failed before.

    Raises:
        Exception: `failure`, this rank's own.
        CheckpointError: another rank's, or a disk's.
        TransportError, NeededError, CheckpointError: as `Rendezvous.swap`.
    """
    note["failure"] = None if failure is None else str(failure) or type(failure).__name__
    told = notes.swap(note, phase)
    if isinstance(failure, OSError):
        raise CheckpointError(f"{phase}: {failure}") from failure
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
