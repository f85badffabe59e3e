"""A relay: downloads each file of an upstream store once for all clients, and keeps it in a folder."""

import errno
import io
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import BinaryIO

from .folder_store import FolderStore
from .names import may_change
from .stores import Store

_log = logging.getLogger(__name__)
_LARGEST_STATE = 16 << 20  # bytes of a file that may change, which is held in memory
_KEEP_ALIVE = 3.0  # seconds between two interim answers, so that no client takes the relay for down


class Relay:
    """Downloads what is asked for, once; drops what the upstream has deleted.

    Args:
        kept: no one else's folder, because what the upstream does not list is deleted from it.
        upstream: its files must never change, except those that `names.may_change`, which are not kept.
    """

    def __init__(self, kept: FolderStore, upstream: Store) -> None:
        self._kept, self._upstream = kept, upstream
        self._downloads: dict[str, Future[None]] = {}
        self._lock = threading.Lock()
        self._is_up = True

    def open(self, path: str, still_waiting: Callable[[], None]) -> BinaryIO:
        """The file, after its download if it is not kept yet.

        Args:
            still_waiting: called every few seconds during a download.

        Raises:
            OSError: the upstream has no such file, or does not answer, or the file can't be kept.
        """
        if may_change(path):
            state = self._upstream.read(path, _LARGEST_STATE + 1)
            if len(state) > _LARGEST_STATE:
                text = f"The file has more than {_LARGEST_STATE:,} bytes, so no relay sends it"
                raise OSError(errno.EFBIG, text, f"{self._upstream.url}/{path}")
            return io.BytesIO(state)
        if download := self._download(path):
            while not wait([download], _KEEP_ALIVE).done:
                still_waiting()
            download.result()
        return self._kept.open(path)

    def names(self, folder: str) -> list[str]:
        """What the upstream lists; while it is down what is kept, which is all that can be served."""
        kept = self._kept.names(folder)
        try:
            names = self._upstream.names(folder)
        except PermissionError:
            raise
        except OSError as error:
            if may_change(folder):
                raise
            self._log_change(error)
            return kept
        return self._drop(folder, kept, names)

    def wait(self, folder: str, known: list[str], timeout: float) -> list[str]:
        kept = self._kept.names(folder)
        return self._drop(folder, kept, self._upstream.wait(folder, known, timeout))

    def _drop(self, folder: str, kept: list[str], names: list[str]) -> list[str]:
        """Delete what was kept when the upstream was asked, and is not among the names that it gave."""
        self._log_change(None)
        for name in set(kept).difference(names):
            self._kept.delete(f"{folder}/{name}" if folder else name)
        return names

    def _log_change(self, error: OSError | None) -> None:
        with self._lock:  # requests are served by threads, and one of them says it
            was_up, self._is_up = self._is_up, error is None
        if was_up and error:
            _log.warning("the upstream is down, so only what is kept here is served (%s)", error)
        elif error is None and not was_up:
            _log.warning("the upstream %s is up again", self._upstream.url)

    def _download(self, path: str) -> Future[None] | None:
        """The running download of a file, which is begun if there is none; None if the file is kept."""
        with self._lock:
            if running := self._downloads.get(path):
                return running
            with suppress(FileNotFoundError):
                self._kept.open(path).close()
                return None
            # In a thread of its own, so that it goes on if the client that asked first hangs up.
            download = Future[None]()
            threading.Thread(target=self._run, args=(path, download), daemon=True).start()
            self._downloads[path] = download  # not before: what no thread ends, all would wait for
            return download

    def _run(self, path: str, download: Future[None]) -> None:
        error = None
        try:
            self._kept.put(path, self._upstream.read_chunks(path))
        except Exception as problem:
            error = problem
        with self._lock:
            del self._downloads[path]
        if error:
            download.set_exception(error)
        else:
            download.set_result(None)
