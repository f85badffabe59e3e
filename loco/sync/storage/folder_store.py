"""A store in a local folder. A file is there whole or not at all, even if the power fails.

folder/versions/a.bin              a file
folder/versions/.partial-…         being written, or left by a writer that was killed
"""

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from .names import AT_ONCE, Buffer, check_folder, check_path, is_path, poll

_PARTIAL = ".partial-"
_ABANDONED = 3600.0  # seconds without a write after which a partial file's writer is taken for dead
_CHUNK = 1 << 20
_LONGEST_PAUSE = 0.1  # seconds; to list a local folder takes microseconds


class FolderStore:
    """A folder of files, for processes of this machine or of all that mount it.

    Args:
        folder: need not be there; the first write makes it.
    """

    at_once = AT_ONCE

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.url = str(self.folder)

    def read(self, path: str, most: int) -> bytes:
        with self.open(path) as file:
            return file.read(most)

    def read_chunks(self, path: str) -> Iterator[bytes]:
        with self.open(path) as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def open(self, path: str) -> BinaryIO:
        """The file as it is now: what is read does not change if it is replaced or deleted meanwhile."""
        found = self._locate(check_path(path))
        if not found.is_file():  # a pipe would be waited for
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(found))
        return open(found, "rb")

    def write(self, path: str, data: bytes) -> None:
        self.put(path, [data])

    def write_chunks(self, path: str, chunks: Iterable[Buffer]) -> None:
        self.put(path, chunks)

    def create(self, path: str, data: bytes) -> None:
        """Of processes that create the same file at once, exactly one succeeds. This takes a file system with
        hard links."""
        self.put(path, [data], replace=False)

    def put(self, path: str, chunks: Iterable[Buffer], *, replace: bool = True) -> None:
        """Write a file of these chunks. If getting one of them fails, nothing of the file is left.

        Raises:
            FileExistsError: the file is there already, and may not be replaced.
        """
        final = self._locate(check_path(path))
        partial = final.with_name(f"{_PARTIAL}{uuid.uuid4().hex}")
        try:
            _make_durable_folder(final.parent)
            _sweep(final.parent)
            with open(partial, "xb") as file:
                _mark_as_written_to(file)
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())  # else the new name could reach the disk before the contents
            if replace:
                os.replace(partial, final)
            else:
                os.link(partial, final)
            _flush_folder(final.parent)
        except OSError as error:
            if error.filename not in (None, str(partial)):
                raise  # of the store that the chunks come from, or it names the right file already
            raise OSError(error.errno, error.strerror, str(final)) from error
        finally:
            with suppress(OSError):
                partial.unlink()

    def names(self, folder: str) -> list[str]:
        """Of files only: neither folders nor links are listed."""
        try:
            with os.scandir(self._locate(check_folder(folder))) as entries:
                return sorted(
                    entry.name
                    for entry in entries
                    if is_path(entry.name) and entry.is_file(follow_symlinks=False)
                )
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            self._locate(check_path(path)).unlink()

    def wait(self, folder: str, known: list[str], timeout: float) -> list[str]:
        return poll(lambda: self.names(folder), known, timeout, _LONGEST_PAUSE)

    def _locate(self, path: str) -> Path:
        """
        Raises:
            PermissionError: the path leads out of the folder, through a link.
        """
        found = self.folder / path
        if not Path(os.path.realpath(found)).is_relative_to(os.path.realpath(self.folder)):
            raise PermissionError(errno.EACCES, "A link that leads out of the store", str(found))
        return found


def _sweep(folder: Path) -> None:
    """Remove what writers that were killed have left."""
    for path in folder.glob(f"{_PARTIAL}*"):
        with suppress(OSError):  # its writer has just finished, or holds the lock, or is another user
            if abs(time.time() - path.stat().st_mtime) < _ABANDONED:  # ahead: of a clock that was wrong
                continue
            with open(path, "rb") as file:
                _mark_as_written_to(file)
                path.unlink()


def _mark_as_written_to(file: BinaryIO) -> None:
    """Lock it until it is closed, or its writer is killed: clocks may be wrong, and writers slow.

    Raises:
        BlockingIOError: somebody else writes to it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF):
            raise  # else this file system has no locks, and the time since the last write must do


def _make_durable_folder(folder: Path) -> None:
    """Create a folder with its missing parents, so that it is still there after a power failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # which would say of the file to be written that it is there
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from error
    for path in reversed(missing):
        with suppress(PermissionError):  # a folder may be writable but not readable
            _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems can't do this for folders
            raise
    finally:
        os.close(descriptor)
