"""Rendezvous that all ranks exchange outside of rounds, by the process group's store.

A round's links may be broken when there is something else to agree on, and links of their own would lie idle
between two checkpoints until a router forgets them. The store answers every rank at any time.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ..errors import CheckpointError, LocoError, TransportError, no_store
from .authentication import StoreSeals
from .liveness import Liveness, Loss

_ALL = "all"  # have come
_POLL = 0.02  # seconds


@dataclass(frozen=True)
class _Off:
    """A call that was called off."""

    phase: str  # of who did it
    why: str
    elsewhere: bool = False  # they are needed


class NeededError(TransportError):
    """Others wait elsewhere, and can't come before this rank has been there."""


class Rendezvous:
    """The notes of the ranks 0 … world−1.

    A call is for all ranks, and has one verdict: all have come, and everyone reads everyone's note; or it is
    called off, by the first rank that can't wait any longer, and whoever comes later for the same thing is
    told so. Calls are counted in the store and not by the ranks, so that they meet again whatever one of them
    has missed. For whom the store does not answer, the verdict stays open until its next call.

    In the store: `call`, the number of the call that is open; under each number the roll, which is
    "0,2" (who has come), "all" or why it is off, and beside it a note of each rank that has come.

    Args:
        store: answers within a limit.
        words: seals what is written, if there is a key.
        liveness: who is alive.
        name: the same on all ranks, and nobody else's.
        patience: seconds to wait for a rank that is alive.
        named: what ranks are called.
    """

    def __init__(
        self,
        store: Store,
        words: StoreSeals,
        liveness: Liveness,
        name: str,
        *,
        rank: int,
        world: int,
        patience: float,
        named: Callable[[Sequence[int]], str],
    ) -> None:
        self._store = store
        self._store_seals = words
        self._liveness = liveness
        self._place = f"loco/{name}/notes"
        self._rank = rank
        self._world = world
        self._patience = patience
        self._named = named
        self._through = -1  # the last call whose verdict this rank knows
        self._open: tuple[int, str] | None = None  # a call whose verdict it could not ask for, and its phase
        self._used: list[str] = []  # keys that some rank may still have to read
        self._first_roll = 0  # that may still be there
        self._users: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._known = 0

    def swap(
        self, note: dict[str, Any], phase: str, needed: Callable[[], bool] | None = None
    ) -> list[dict[str, Any]]:
        """Every rank's note, by rank.

        Args:
            needed: tells whether ranks wait elsewhere for those who wait here.

        Raises:
            NeededError: it said so, to this rank or to another one that waits here.
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
            mine = f"{self._place}/{number}/{self._rank}"
            self._used.append(mine)
            self._store.compare_set(mine, "", self._store_seals.write(mine, json.dumps([phase, note])))
            self._meet(number, phase, needed)
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

    def _meet(self, number: int, phase: str, needed: Callable[[], bool] | None) -> None:
        """Return once all ranks have come; or call it off, for all of them."""
        deadline = time.monotonic() + self._patience
        losses: list[Loss] = []
        others = [rank for rank in range(self._world) if rank != self._rank]
        verdict = self._decide(number, self._with_me)
        with self._liveness.watching(others, losses.append, reunion=True):
            while verdict is None:
                time.sleep(_POLL)
                verdict = self._verdict(number)
                if verdict is None and losses:
                    lost = self._liveness.describe(losses[0], self._named)
                    verdict = self._call_off(number, _Off(phase, lost))
                elif verdict is None and needed is not None and needed():
                    verdict = self._call_off(number, _Off(phase, "others wait for it elsewhere", True))
                elif verdict is None and time.monotonic() > deadline:
                    verdict = self._call_off(number, _Off(phase, self._late(number)))
        self._through = number
        if isinstance(verdict, _Off):
            error = NeededError if verdict.elsewhere else TransportError
            raise error(f"{phase}: {verdict.why}", lasting=True)

    def _read(self, number: int) -> list[str]:
        """What all wrote to a call to which all came, so that they are through with those before it."""
        keys = [f"{self._place}/{number}/{rank}" for rank in range(self._world)]
        if not self._store.check(keys):  # the store would wait for them
            raise RuntimeError("it has lost a note, or somebody else writes to it")
        texts = self._store.multi_get(keys)
        used, self._used = self._used, [keys[self._rank]]
        if self._rank == 0:
            used += [f"{self._place}/{k}" for k in range(self._first_roll, number)]
            self._first_roll = number
        with suppress(RuntimeError):  # a slow store may keep them
            for key in used:
                if key != keys[self._rank]:
                    self._store.delete_key(key)
        return [self._store_seals.read(key, text.decode()) for key, text in zip(keys, texts, strict=True)]

    def _number(self) -> int:
        """Of the call that is open."""
        number, key = 0, f"{self._place}/call"
        while True:
            number = int(self._store.compare_set(key, "", str(number)))
            if self._verdict(number) is None:
                return number
            self._store.compare_set(key, str(number), str(number + 1))

    def _verdict(self, number: int) -> "str | _Off | None":
        """What has become of a call; None: it is open."""
        key = f"{self._place}/{number}"
        return _read(self._store.get(key).decode() if self._store.check([key]) else "")[1]

    def _with_me(self, come: set[int]) -> str:
        everyone = come | {self._rank}
        return _ALL if len(everyone) == self._world else ",".join(map(str, sorted(everyone)))

    def _call_off(self, number: int, off: _Off) -> "str | _Off | None":
        """-> what has become of it: all may have come just now."""
        off = replace(off, why=f"{off.why} (so {self._named([self._rank])} gave it up)")
        return self._decide(number, lambda _: json.dumps(vars(off)))

    def _decide(self, number: int, change: Callable[[set[int]], str]) -> "str | _Off | None":
        """Replace what the roll says, unless the call is decided -> its verdict, if there is one now."""
        key, now = f"{self._place}/{number}", ""
        while True:
            wish = change(_read(now)[0])
            found = self._store.compare_set(key, now, wish).decode()
            verdict = _read(found)[1]
            if found == wish or verdict is not None:
                return verdict
            now = found

    def _late(self, number: int) -> str:
        come = _read(self._store.get(f"{self._place}/{number}").decode())[0]
        missing = sorted(set(range(self._world)) - come) or [self._rank]
        return (
            f"no answer from {self._named(missing)} within {self._patience:g} s, though alive; "
            f"last heard of: {self._liveness.last_words(missing[0])}"
        )


class Alone(Rendezvous):
    """The notes of a single rank."""

    def __init__(self) -> None:
        pass

    def number_of(self, user: Any) -> int:
        return 0

    def missed(self, phase: str) -> bool:
        return False

    def swap(
        self, note: dict[str, Any], phase: str, needed: Callable[[], bool] | None = None
    ) -> list[dict[str, Any]]:
        return [json.loads(json.dumps(note))]


def swap_or_fail(
    notes: Rendezvous,
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


def _read(roll: str) -> "tuple[set[int], str | _Off | None]":
    """Who has come, and the verdict, if there is one."""
    if roll == _ALL:
        return set(), _ALL
    if roll.startswith("{"):
        return set(), _Off(**json.loads(roll))
    return {int(rank) for rank in roll.split(",") if rank}, None
