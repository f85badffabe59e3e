"""What the parts of a pipeline did, and when: computed, waited, received."""

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
    """What was noted in a while."""

    events: list[dict[str, Any]] = field(default_factory=list)  # what a part did, from when to when
    said: list[str] = field(default_factory=list)  # that a person should know now
    counts: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)  # tokens by their age in versions, when used

    def add(self, other: Notes) -> None:
        self.events += other.events
        self.said += other.said
        self.counts.update(other.counts)
        self.staleness.update(other.staleness)


class Diary:
    """Of one part. The controller is given what is new now and then, and who started the run fetches it from
    there."""

    def __init__(self, part: str, controller: Any) -> None:
        self._part, self._controller = part, controller
        self.notes = Notes()
        self._sent = time.monotonic()

    @contextmanager
    def doing(self, what: str, **about: Any) -> Iterator[dict[str, Any]]:
        """What is written into the dictionary is noted, too. `cpu`: seconds that this process computed."""
        begun, computed, found = time.time(), time.process_time(), dict(about)
        yield found
        cpu = time.process_time() - computed
        event = {"part": self._part, "what": what, "from": begun, "to": time.time(), "cpu": cpu}
        self.notes.events.append(event | found)
        if time.monotonic() - self._sent > _EVERY:
            self.send()

    def say(self, text: str) -> None:
        """To the person who started the run, at once."""
        self.notes.said.append(f"{self._part}: {text}")
        self.send()

    def send(self) -> Any:
        """-> what can be waited for."""
        sent = self._controller.note.remote(self.notes)
        self.notes, self._sent = Notes(), time.monotonic()
        return sent
