"""One watcher of a folder for all clients that wait for a change in it."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from .names import listing_tag

_log = logging.getLogger(__name__)
_MOST_FOLDERS = 16  # that are watched at once, each by a thread
_AFTER_FAILURE = 1.0  # seconds until a folder that could not be listed is tried again


class Watched(Protocol):
    """What a `FolderStore` and a `Relay` have in common."""

    def names(self, folder: str) -> list[str]: ...
    def wait(self, folder: str, known: list[str], timeout: float) -> list[str]: ...


@dataclass
class _Watch:
    waiting: int = 0
    changes: int = 0
    names: list[str] = field(default_factory=list)  # after the last change


class Watches:
    """Long polls. For each folder that is waited for, one thread waits, for all clients.

    Args:
        watched: where the folders are.
        slice_seconds: how long a thread waits before it looks whether any client is left.
        most: clients that wait at once. Beyond that, and beyond some folders, a client is answered at once,
            and asks again.
    """

    def __init__(self, watched: Watched, slice_seconds: float, most: int) -> None:
        self._watched, self._slice, self._most = watched, slice_seconds, most
        self._changed = threading.Condition()
        self._watches: dict[str, _Watch] = {}
        self._closed = threading.Event()

    def names(self, folder: str, tag: str = "", timeout: float = 0.0) -> list[str]:
        """The folder's names as soon as they have another `listing_tag`, or after `timeout` seconds."""
        if not timeout:
            return self._watched.names(folder)
        with self._joined(folder) as watch:
            if watch is None:
                return self._watched.names(folder)
            before = watch.changes  # counted before the listing, so that no change after it is missed
            names = self._watched.names(folder)
            if listing_tag(names) != tag:
                return names
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed.is_set() or (watch.changes > before and watch.names != names),
                    timeout,
                )
                return watch.names if watch.changes > before else names

    def close(self) -> None:
        """End all waits now."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()

    @contextmanager
    def _joined(self, folder: str) -> Iterator[_Watch | None]:
        with self._changed:
            watch = self._watches.get(folder)
            is_full = sum(one.waiting for one in self._watches.values()) >= self._most
            if not is_full and watch is None and len(self._watches) < _MOST_FOLDERS:
                watch = self._watches[folder] = _Watch()
                threading.Thread(target=self._run, args=(folder, watch), daemon=True).start()
            if not is_full and watch is not None:
                watch.waiting += 1
        if is_full or watch is None:
            yield None
            return
        try:
            yield watch
        finally:
            with self._changed:
                watch.waiting -= 1

    def _run(self, folder: str, watch: _Watch) -> None:
        names: list[str] | None = None
        while True:
            try:
                if names is None:
                    names = self._watched.names(folder)
                else:
                    names = self._watched.wait(folder, names, self._slice)
            except OSError as error:
                _log.info("watching %r failed: %s", folder, error)
                names = None
                self._closed.wait(_AFTER_FAILURE)
            with self._changed:
                if not watch.waiting or self._closed.is_set():
                    del self._watches[folder]
                    return
                if names is not None and names != watch.names:
                    watch.names = names
                    watch.changes += 1
                    self._changed.notify_all()
