"""How all ranks agree outside of rounds, through the store: they exchange notes, and meet to reconnect.

A round's links may be broken when ranks have to agree, and links made for it would be idle between two
checkpoints until a router drops them. The store answers every rank at any time.
"""

import json
import logging
import math
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ..errors import CheckpointError, LocoError, TransportError, seconds
from ..logs import Waiting
from .compare_and_set import number_in
from .reconnect_barrier import BarrierContext, ReconnectBarrier
from .store_client import no_store

_POLL = 0.02  # seconds
_logger = logging.getLogger(__name__)
_MOST_REMOVED = 100  # that are removed at once


@dataclass(frozen=True)
class _Off:
    """Why a call was called off."""

    phase: str  # of the rank that did it
    why: str
    elsewhere: bool = False  # the ranks are needed for a reconnection


@dataclass(frozen=True)
class _CallState:
    """The state of a call, as the store holds it.

    notes: for each rank that has come, the name of its note: random, and new each time that it comes.
    sure: the ranks that have seen their own notes' names in a full list. Each has come to this very call, so
        a list or a note that somebody has kept and written again never completes a call.
    """

    notes: dict[str, str] = field(default_factory=dict)
    sure: tuple[int, ...] = ()
    off: _Off | None = None

    @classmethod
    def of(cls, value: str) -> "_CallState":
        """
        Raises:
            RuntimeError: it is malformed.
        """
        if not value:
            return cls()
        try:
            found = json.loads(value)
            off = found.pop("off")
            return cls(dict(found["notes"]), tuple(found["sure"]), off and _Off(**off))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise RuntimeError(f"it holds {value[:80]!r} where ranks come together") from error

    def joined_by(self, rank: int, note: str, world: int) -> "_CallState":
        notes = self.notes | {str(rank): note}
        sure = set(self.sure) if notes == self.notes else set[int]()
        if len(notes) == world:
            sure.add(rank)
        return _CallState(notes, tuple(sorted(sure)))

    def missing(self, world: int) -> list[int]:
        """Ranks that have not come, or else those that have not seen that all have."""
        return [rank for rank in range(world) if str(rank) not in self.notes] or sorted(
            set(range(world)) - set(self.sure)
        )

    def __str__(self) -> str:
        return json.dumps(asdict(self))


class NeededError(TransportError):
    """Other ranks wait to reconnect, and can't come before this rank has reconnected with them."""


class Reconnects(Protocol):
    """Builds new links together with the other ranks."""

    def reconnect(self) -> object: ...


class Rendezvous:
    """The ranks 0 … world−1 agree in two ways.

    They **exchange notes**, for a save or a load, in a call of all ranks that ends in one way for all. Either
    all have come, and every rank reads every note. Or the first rank that can't wait any longer calls it off,
    and a rank that comes later for the same purpose is told so. Calls are numbered in the store, so that
    ranks find each other again whatever one of them has missed; a rank refuses numbers of calls that it knows
    to be over. A rank that the store does not answer learns in its next call how this one ended.

    They **meet** before they reconnect, at the `barrier`.

    A reconnection outranks an exchange: when ranks wait to reconnect under a name that this rank `answers`,
    the call in which it waits is called off, and every rank in it gets a `NeededError`: reconnect first.

    In the store: `call`, the number of the open call; under each number its `_CallState`, and beside it the
    note of each rank that has come.
    """

    def __init__(self, context: BarrierContext) -> None:
        self._context = context
        self._through = -1  # the last call whose verdict this rank knows
        self._open: tuple[int, str] | None = None  # a call whose verdict it could not ask for, and its phase
        self._note = ""  # the name of this rank's note in that call
        self._used: list[str] = []  # keys that some rank may still have to read
        self._first_kept = 0  # that may still be there
        self._users: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._known = 0
        self._answering: WeakKeyDictionary[Reconnects, str] = WeakKeyDictionary()
        self.barrier = ReconnectBarrier(context)

    def answers(self, user: Reconnects, name: str) -> None:
        """While `user` exists, this rank leaves an exchange when others wait to meet under `name`."""
        self._answering[user] = name

    def reconnect(self) -> None:
        """After a `NeededError`: reconnect with the ranks that wait for this one.

        Raises:
            TransportError: a rank is lost or did not come, or the store does not answer.
        """
        try:
            awaited = self._awaited()
        except RuntimeError as error:
            raise no_store("reconnecting", self._context.store, error) from error
        for user in awaited:
            user.reconnect()

    def called(self, rank: int) -> str:
        return self._context.named([rank])

    def _awaited(self) -> list[Reconnects]:
        """The users whom others wait to meet."""
        return [user for user, name in list(self._answering.items()) if self.barrier.is_called(name)]

    def exchange_notes(self, note: dict[str, Any], phase: str) -> list[dict[str, Any]]:
        """Every rank's note, by rank.

        Raises:
            NeededError: ranks wait to reconnect with this rank, or with another one that waits here.
            TransportError: a rank is dead, stopped, cut off, or did not come within `patience`: names it.
            CheckpointError: on all ranks: they came for different things.
        """
        self._context.liveness.say(phase)
        try:
            texts = self._call(note, phase)
        except LocoError:
            raise
        except RuntimeError as error:
            raise no_store(phase, self._context.store, error) from error
        told = [json.loads(text) for text in texts]
        if any(came != phase for came, _ in told):
            named = self._context.named
            found = ", ".join(f"{named([rank])} for {came!r}" for rank, (came, _) in enumerate(told))
            raise CheckpointError(f"save() and load() belong at one place on all ranks, but came {found}")
        return [theirs for _, theirs in told]

    def number_of(self, user: Any) -> int:
        """Numbers callers by first use; equal on all ranks."""
        if user not in self._users:
            self._users[user] = self._known
            self._known += 1
        return self._users[user]

    def missed(self, phase: str) -> bool:
        """Whether this rank's last call was for `phase` and only the store's answer was lost, so that all
        ranks have come to it, or may still come.

        Raises:
            TransportError: the store still does not answer.
        """
        if self._open is None or self._open[1] != phase:
            return False
        try:
            return self._state_of(self._open[0]).off is None
        except LocoError:
            raise
        except RuntimeError as error:
            raise no_store(phase, self._context.store, error) from error

    def _call(self, note: dict[str, Any], phase: str) -> list[str]:
        if self._open is not None:
            asked, for_what = self._open
            state = self._state_of(asked)
            if for_what == phase and self._is_complete(state):  # the others went on with it
                texts = self._read(asked, state)
                self._open, self._through = None, asked
                return texts
            if for_what != phase and self._is_open(state):  # the others wait in vain for this rank
                self._call_off(asked, _Off(for_what, f"it came for something else, {phase}"))
            self._open = None
        number = self._number()
        last = self._state_of(number - 1).off if number - 1 > self._through else None
        if last is not None and last.phase == phase and not last.elsewhere:
            self._through = number - 1
            raise TransportError(f"{phase}: {last.why}", lasting=True)
        try:
            self._note = secrets.token_hex(8)
            mine = self._key_of(number, self._context.rank, self._note)
            self._used.append(mine)
            sealed = self._context.seals.write(mine, json.dumps([phase, note]))
            self._context.store.compare_set(mine, "", sealed)
            return self._read(number, self._await_all(number, phase))
        except LocoError:
            raise
        except RuntimeError:
            self._open = number, phase
            raise
        except BaseException as error:  # Ctrl-C, say
            with suppress(RuntimeError):
                self._call_off(number, _Off(phase, type(error).__name__))
            raise

    def _await_all(self, number: int, phase: str) -> _CallState:
        """Return once all ranks have come; or call it off, for all of them."""
        context, confirm_by = self._context, math.inf
        deadline = time.monotonic() + context.patience
        state = self._join(number)
        told = Waiting(_logger, lambda: f"{phase}: {context.named(state.missing(context.world))}")
        with context.guarded(phase, raises=False) as guard, told:
            while self._is_open(state):
                time.sleep(_POLL)
                state = self._join(number)
                if not self._is_open(state):
                    break
                now = time.monotonic()
                # Ranks that have come poll all the time, unless they have lost the store.
                is_full = len(state.notes) == context.world
                confirm_by = min(confirm_by, now + 2 * context.liveness.dead_after) if is_full else math.inf
                if guard.loss is not None:
                    state = self._call_off(number, _Off(phase, guard.sentence))
                elif self._awaited():
                    state = self._call_off(number, _Off(phase, "others wait for it elsewhere", True))
                elif now > min(deadline, confirm_by):
                    state = self._call_off(number, _Off(phase, self._late(state)))
        self._through = number
        if state.off is not None:
            error = NeededError if state.off.elsewhere else TransportError
            raise error(f"{phase}: {state.off.why}", lasting=True)
        return state

    def _read(self, number: int, state: _CallState) -> list[str]:
        """All ranks' notes in a call to which all came. So all are done with earlier calls."""
        context = self._context
        keys = [self._key_of(number, rank, state.notes[str(rank)]) for rank in range(context.world)]
        if not context.store.check(keys):  # the store would wait for them
            raise RuntimeError("it has lost a note, or somebody else writes to it")
        texts = context.store.multi_get(keys)
        used, self._used = self._used, [keys[context.rank]]
        if context.rank == 0:
            first = max(self._first_kept, number - _MOST_REMOVED)
            used += [f"{context.root}/{k}" for k in range(first, number)]
            self._first_kept = number
        with suppress(RuntimeError):  # a slow store may keep them
            for key in used:
                if key != keys[context.rank]:
                    context.store.delete_key(key)
        return [context.seals.read(key, text.decode()) for key, text in zip(keys, texts, strict=True)]

    def _key_of(self, number: int, rank: int, note: str) -> str:
        return f"{self._context.root}/{number}/{rank}/{note}"

    def _number(self) -> int:
        """The number of the open call. A malformed value, or that of a call that is over, is replaced."""
        shared_key, least = self._context.shared_key("call"), self._through + 1

        def later(value: str) -> str | None:
            return None if number_in(value) >= least else str(least)

        while not self._is_open(self._state_of(number := number_in(shared_key.change(later)))):
            least = number + 1
        return number

    def _state_of(self, number: int) -> _CallState:
        return _CallState.of(self._context.shared_key(str(number)).read())

    def _is_complete(self, state: _CallState) -> bool:
        return state.off is None and len(state.sure) == self._context.world

    def _is_open(self, state: _CallState) -> bool:
        return state.off is None and not self._is_complete(state)

    def _join(self, number: int) -> _CallState:
        """Add this rank; once all are in, record that it has seen so -> the call's state."""

        def join(value: str) -> str | None:
            state = _CallState.of(value)
            joined = state.joined_by(self._context.rank, self._note, self._context.world)
            return str(joined) if self._is_open(state) and joined != state else None

        return _CallState.of(self._context.shared_key(str(number)).change(join))

    def _call_off(self, number: int, off: _Off) -> _CallState:
        """Call it off, unless all have come just now -> the call's state."""
        me = self._context.named([self._context.rank])

        def call_off(value: str) -> str | None:
            state = _CallState.of(value)
            why = replace(off, why=f"{off.why} (so {me} gave it up)")
            return str(replace(state, off=why)) if self._is_open(state) else None

        return _CallState.of(self._context.shared_key(str(number)).change(call_off))

    def _late(self, state: _CallState) -> str:
        context, missing = self._context, state.missing(self._context.world)
        limit = context.patience
        if len(state.notes) == context.world:
            limit = min(limit, 2 * context.liveness.dead_after)
        return (
            f"no answer from {context.named(missing)} within {seconds(limit)}, though alive; "
            f"last heard of: {context.liveness.last_words(missing[0])}"
        )


class Alone:
    """The same for a single rank."""

    def number_of(self, user: Any) -> int:
        return 0

    def missed(self, phase: str) -> bool:
        return False

    def reconnect(self) -> None:
        pass

    def called(self, rank: int) -> str:
        return "this site"

    def exchange_notes(self, note: dict[str, Any], phase: str) -> list[dict[str, Any]]:
        return [json.loads(json.dumps(note))]
