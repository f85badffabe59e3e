"""Notes that all ranks exchange outside of rounds, by the process group's store.

A round's links may be broken when there is something else to agree on, and links of their own would lie idle
between two checkpoints until a router forgets them. The store answers every rank at any time.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from .errors import CheckpointError, TransportError, first_line
from .heartbeat import Heartbeat, Loss
from .sealing import Words

_ALL, _OFF = "all have come", "off: "  # what may become of a call
_POLL = 0.02  # seconds


class Notes:
    """The notes of the ranks 0 … world−1.

    A call is for all ranks, and has one verdict: all have come, and everyone reads everyone's note; or it is
    called off, by the first rank that can't wait any longer, and whoever comes to it later learns why. Only
    for whom the store does not answer the verdict is open: it asks again in its next call.

    Args:
        store: answers within a limit.
        words: seals what is written, if there is a key.
        heartbeat: who is alive.
        name: the same on all ranks, and nobody else's.
        patience: seconds to wait for a rank that is alive.
        named: what ranks are called.
    """

    def __init__(
        self,
        store: Store,
        words: Words,
        heartbeat: Heartbeat,
        name: str,
        *,
        rank: int,
        world: int,
        patience: float,
        named: Callable[[Sequence[int]], str],
    ) -> None:
        self._store = store
        self._words = words
        self._heartbeat = heartbeat
        self._name = name
        self._rank = rank
        self._world = world
        self._patience = patience
        self._named = named
        self._call = 0
        self._open: tuple[dict[str, Any], str] | None = None  # of this call, if its verdict is not known
        self._used: list[str] = []  # keys in the store that some rank may still have to read

    def swap(self, note: dict[str, Any], phase: str) -> list[dict[str, Any]]:
        """Every rank's note, by rank.

        Raises:
            TransportError: a rank is dead, stopped, cut off, or did not come within `patience`: names it.
        """
        if self._open is not None and self._open[1] != phase:
            with suppress(TransportError):  # which this rank has raised already
                self._swap(*self._open)
        return self._swap(note, phase)

    def _swap(self, note: dict[str, Any], phase: str) -> list[dict[str, Any]]:
        self._heartbeat.say(phase)
        roll = f"loco/{self._name}/notes/{self._call}"
        keys = [f"{roll}/{rank}" for rank in range(self._world)]
        mine = keys[self._rank]
        own = [mine, roll] if self._rank == 0 else [mine]
        try:
            # If the store was out of reach in this call before, others may have read what was written then.
            self._store.compare_set(mine, "", self._words.write(mine, json.dumps(note)))
            self._meet(roll, phase)
            texts = self._store.multi_get(keys)
        except TransportError:
            self._over(own)
            raise
        except RuntimeError as error:
            self._open = note, phase
            raise TransportError(
                f"{phase}: the process group's store does not answer ({first_line(error)})", lasting=True
            ) from error
        except BaseException as error:  # Ctrl-C, say
            with suppress(RuntimeError):
                self._call_off(roll, type(error).__name__)
                self._over(own)
            raise
        # All came to this call, so they are through with those before it.
        used, self._used = self._used, []
        self._over(own)
        with suppress(RuntimeError):  # a slow store may keep them
            for key in used:
                self._store.delete_key(key)
        found = [self._words.read(key, text.decode()) for key, text in zip(keys, texts, strict=True)]
        return [json.loads(text) for text in found]

    def _over(self, keys: list[str]) -> None:
        self._call += 1
        self._open = None
        self._used += keys

    def _meet(self, roll: str, phase: str) -> None:
        """Return once all ranks have come; or call it off, for all of them."""
        deadline = time.monotonic() + self._patience
        losses: list[Loss] = []
        others = [rank for rank in range(self._world) if rank != self._rank]
        self._change(roll, self._with_me)
        with self._heartbeat.watching(others, losses.append, reunion=True):
            while (now := self._store.get(roll).decode()) != _ALL:
                if not now.startswith(_OFF) and (losses or time.monotonic() > deadline):
                    why = self._heartbeat.describe(losses[0], self._named) if losses else self._late(now)
                    now = self._call_off(roll, why)
                if now.startswith(_OFF):
                    raise TransportError(f"{phase}: {now.removeprefix(_OFF)}", lasting=True)
                time.sleep(_POLL)

    def _with_me(self, now: str) -> str:
        come = _ranks(now) | {self._rank}
        return _ALL if len(come) == self._world else ",".join(map(str, sorted(come)))

    def _late(self, now: str) -> str:
        missing = sorted(set(range(self._world)) - _ranks(now))
        return (
            f"no answer from {self._named(missing)} within {self._patience:g} s, though alive; "
            f"last heard of: {self._heartbeat.last_words(missing[0])}"
        )

    def _call_off(self, roll: str, why: str) -> str:
        """-> what has become of the call: all may have come just now."""
        return self._change(roll, lambda _: f"{_OFF}{why} (so {self._named([self._rank])} gave it up)")

    def _change(self, roll: str, change: Callable[[str], str]) -> str:
        """Replace what the roll says, unless the call is decided -> what it says now."""
        now = ""
        while True:
            wish = change(now)
            found = self._store.compare_set(roll, now, wish).decode()
            if found in (wish, _ALL) or found.startswith(_OFF):
                return found
            now = found


class Alone(Notes):
    """The notes of a single rank."""

    def __init__(self) -> None:
        pass

    def swap(self, note: dict[str, Any], phase: str) -> list[dict[str, Any]]:
        return [json.loads(json.dumps(note))]


def swap_or_fail(
    notes: Notes, note: dict[str, Any], failure: Exception | None, phase: str
) -> list[dict[str, Any]]:
    """Every rank's note, if none of them failed before.

    Raises:
        Exception: `failure`, this rank's own.
        CheckpointError: another rank's.
        TransportError: as `Notes.swap`.
    """
    note["failure"] = None if failure is None else str(failure)
    told = notes.swap(note, phase)
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(told):
        if theirs["failure"] is not None:
            raise CheckpointError(f"{phase}: rank {rank} failed: {theirs['failure']}")
    return told


def _ranks(roll: str) -> set[int]:
    return {int(rank) for rank in roll.split(",") if rank}
