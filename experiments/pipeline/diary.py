"""What a part of the pipeline did, and when: computed, waited, received."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_EVERY = 0.5  # seconds


class Diary:
    """Of one part; the controller gets a copy now and then."""

    def __init__(self, part: str, controller: Any) -> None:
        self._part, self._controller = part, controller
        self._events: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self._sent = time.monotonic()

    @contextmanager
    def doing(self, what: str, **about: Any) -> Iterator[dict[str, Any]]:
        """What is written into the dictionary is noted, too."""
        begun, found = time.time(), dict(about)
        yield found
        self._events.append({"part": self._part, "what": what, "from": begun, "to": time.time()} | found)
        if time.monotonic() - self._sent > _EVERY:
            self.send()

    def send(self) -> Any:
        """-> what can be waited for."""
        sent = self._controller.note.remote(self._events, dict(self.counts), dict(self.staleness))
        self._events, self._sent = [], time.monotonic()
        self.counts.clear()
        self.staleness.clear()
        return sent
