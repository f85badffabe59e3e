"""Progress on stderr: a bar for a person, a line now and then for a log file."""

from __future__ import annotations

import sys
import time

from experiments.errors import missing_extra

try:
    from tqdm import tqdm
except ImportError as error:
    raise missing_extra(error) from None


class Progress:
    """`with Progress("label", total=…) as progress: … progress.advance("loss 1.9")`."""

    def __init__(
        self, label: str, *, total: int, done: int = 0, shown: bool = True, every: float = 15.0
    ) -> None:
        person = shown and sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=done, desc=label, disable=not person)
        self._lines = shown and not person
        self._label, self._total, self._done = label, total, done
        self._every = every  # seconds between lines
        self._start = time.perf_counter()
        self._next = self._start  # the first step is shown, and the last

    def advance(self, note: str = "") -> None:
        self._done += 1
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update()
        now = time.perf_counter()
        if self._lines and (now >= self._next or self._done == self._total):
            self._next = now + self._every
            line = f"{self._label}: {self._done}/{self._total}, {now - self._start:.0f} s"
            print(f"{line}, {note}" if note else line, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
