"""What each part of a pipeline did, and when: computed, waited, received."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_EVERY = 0.5  # seconds


@dataclass
class Notes:
    """What was noted since the last look."""

    events: list[dict[str, Any]] = field(default_factory=list)  # part, what it did, from when to when
    said: list[str] = field(default_factory=list)  # messages to the user
    counts: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)  # tokens by their age in versions when used

    def add(self, other: Notes) -> None:
        self.events += other.events
        self.said += other.said
        self.counts.update(other.counts)
        self.staleness.update(other.staleness)


class Diary:
    """The notes of one part. They go to the controller now and then, and the run's driver fetches them."""

    def __init__(self, part: str, controller: Any) -> None:
        self._part, self._controller = part, controller
        self.notes = Notes()
        self._sent = time.monotonic()

    @contextmanager
    def doing(self, what: str, **about: Any) -> Iterator[dict[str, Any]]:
        """Note what the block does, what is put into the dictionary, and the process's CPU seconds."""
        begun, computed, found = time.time(), time.process_time(), dict(about)
        yield found
        self.did(what, begun, cpu=time.process_time() - computed, **found)

    def did(self, what: str, begun: float, **about: Any) -> None:
        """Note what has been done since `begun`."""
        self.notes.events.append({"part": self._part, "what": what, "from": begun, "to": time.time()} | about)
        if time.monotonic() - self._sent > _EVERY:
            self.send()

    def beside(self, name: str) -> Diary:
        """The diary of a thread of this part, which works at the same time."""
        return Diary(f"{self._part}, {name}", self._controller)

    def say(self, text: str) -> None:
        """Show a message to the user, at once."""
        self.notes.said.append(f"{self._part}: {text}")
        self.send()

    def send(self) -> Any:
        """-> the remote call, to wait for."""
        sent = self._controller.note.remote(self.notes)
        self.notes, self._sent = Notes(), time.monotonic()
        return sent
