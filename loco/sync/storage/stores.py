"""Where versions of weights are kept: a local folder, an object store, or a server of `loco.sync serve`.

store = open_store("s3://bucket/run-7")
store.write("versions/00000001/changes", data)
names = store.wait("versions", known=[], timeout=60.0)
"""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import fsspec.core

from .folder_store import FolderStore
from .http_store import HttpStore
from .names import AT_ONCE, Buffer, check_folder, check_path, is_path, poll

# fsspec has many more protocols, of which some wrap other stores or run code that a store's files contain.
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oss", "oci", "tos")
FILE_SERVERS = ("hdfs", "webhdfs", "sftp", "ssh", "smb", "memory")

_CHUNK = 4 << 20
_LONGEST_PAUSE = 1.0  # seconds; each listing of an object store is a request that costs money


class Store(Protocol):
    """Files by path. A path is relative and made of plain names; see `names.is_path`.

    Every method raises a ValueError for any other path, and an OSError that names the file and the store for
    whatever else goes wrong.
    """

    url: str  # for messages
    at_once: int  # reads by threads

    def read(self, path: str, most: int) -> bytes:
        """The first `most` bytes of a file, or all of them if it has fewer. No more are held in memory.

        Raises:
            FileNotFoundError: it is not there.
        """
        ...

    def read_chunks(self, path: str) -> Iterator[bytes]:
        """All of a file, without holding all of it in memory."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Make or replace a file, which appears whole or not at all."""
        ...

    def write_chunks(self, path: str, chunks: Iterable[Buffer]) -> None:
        """The same, without holding all of it in memory. If getting a chunk fails, an object store may have a
        part of the file.
        """
        ...

    def create(self, path: str, data: bytes) -> None:
        """
        Raises:
            FileExistsError: it is there already.
        """
        ...

    def names(self, folder: str) -> list[str]:
        """The names of the files that are directly in a folder, sorted; none if there is no such folder."""
        ...

    def delete(self, path: str) -> None:
        """Nothing happens if it is not there."""
        ...

    def wait(self, folder: str, known: list[str], timeout: float) -> list[str]:
        """The folder's `names` as soon as they differ from `known`, or after `timeout` seconds."""
        ...


def open_store(url: str | os.PathLike[str], token: str | None = None, *, timeout: float = 30.0) -> Store:
    """The store at a URL, or in a local folder. Nothing is asked of it yet.

    Args:
        url: see `check_url`.
        token: for a server that asks for one; None: LOCO_SYNC_TOKEN.
        timeout: seconds without a byte after which a server is taken for down.

    Raises:
        ValueError: there is no such kind of store, or it needs a package that is not installed.
    """
    url = os.fspath(url)
    protocol, path = check_url(url)
    if protocol in ("http", "https"):
        return HttpStore(url, token, timeout=timeout)
    return FolderStore(path) if protocol == "file" else FsspecStore(url)


def check_url(url: str) -> tuple[str, str]:
    """Its protocol, "file" for a local folder, and what follows it.

    Args:
        url: a path, file://…, http:// or https:// of a `loco.sync` server, or a URL of one of `OBJECT_STORES`
            or `FILE_SERVERS`.

    Raises:
        ValueError: it has another protocol, or several of fsspec's in a chain.
    """
    protocol, separator, rest = url.partition("://")
    if not separator or protocol in ("file", "local"):
        return "file", rest if separator else url
    fsspecs = (*OBJECT_STORES, *FILE_SERVERS)
    # A chain, as in reference::s3://…, has its other protocols on either side of the first "://".
    if protocol not in ("http", "https") and (protocol not in fsspecs or "::" in url):
        allowed = ", ".join(f"{one}://" for one in ("file", "http", "https", *fsspecs))
        raise ValueError(
            f"the URL of a store must be a path or begin with one of {allowed}, without '::', got {url}"
        )
    return protocol, rest


class FsspecStore:
    """A store in a file system of fsspec's: s3://, gs://, az://, memory:// and others.

    A put to an object store or to memory:// is atomic. Others, as sftp://, may show a file that is still
    being written.

    `create` writes only if there is no such file. s3://, gs:// and az:// check that themselves, so that one
    of several writers wins. For the others fsspec looks first and writes then, which leaves a moment in
    which two writers can both succeed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # fsspec gives each thread an instance of its own, since some of its file systems serve one alone.
        self.at_once = AT_ONCE if url.partition("://")[0] in OBJECT_STORES else 1
        try:
            # An instance of its own, because instances of one URL share a cache of listings.
            self._files, self._root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
        except ImportError as error:
            package = getattr(error.__cause__, "name", None)
            advice = f"pip install {package}" if package else str(error)
            raise ValueError(f"{url} needs a package that is not installed: {advice}") from error
        except ValueError as error:
            raise ValueError(f"{url} is no URL of a store: {error}") from error

    def read(self, path: str, most: int) -> bytes:
        full = self._full(check_path(path))
        with self._naming(path):
            try:
                return self._files.cat_file(full, 0, most)  # without asking for its size first
            except FileNotFoundError:
                raise
            except Exception:
                with suppress(Exception):
                    if self._files.size(full) == 0:
                        return b""  # s3:// has no range of an empty file
                raise

    def read_chunks(self, path: str) -> Iterator[bytes]:
        with self._naming(check_path(path)), self._files.open(self._full(path), "rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def write(self, path: str, data: bytes) -> None:
        self._put(path, data, "overwrite")

    def write_chunks(self, path: str, chunks: Iterable[Buffer]) -> None:
        full = self._full(check_path(path))
        with self._naming(path), self._with_folder(full, partial(self._files.open, full, "wb")) as file:
            for chunk in chunks:
                file.write(chunk)

    def create(self, path: str, data: bytes) -> None:
        self._put(path, data, "create")

    def names(self, folder: str) -> list[str]:
        full = self._full(check_folder(folder))
        with self._naming(folder), suppress(FileNotFoundError, NotADirectoryError):
            self._files.invalidate_cache(full)
            entries = self._files.ls(full, detail=True)
            paths = [entry["name"].rpartition("/") for entry in entries if entry["type"] == "file"]
            # Some stores list a file as if it were a folder that holds itself.
            inside = [name for parent, _, name in paths if parent.strip("/") == full.strip("/")]
            return sorted(name for name in inside if is_path(name))
        return []

    def delete(self, path: str) -> None:
        with self._naming(check_path(path)), suppress(FileNotFoundError):
            self._files.rm_file(self._full(path))

    def wait(self, folder: str, known: list[str], timeout: float) -> list[str]:
        return poll(lambda: self.names(folder), known, timeout, _LONGEST_PAUSE)

    def _put(self, path: str, data: bytes, mode: str) -> None:
        full = self._full(check_path(path))
        with self._naming(path):
            self._with_folder(full, partial(self._files.pipe_file, full, data, mode=mode))

    def _with_folder(self, full: str, write: Callable[[], Any]) -> Any:
        """Write a file, in a file system whose folders must be there first, too."""
        try:
            return write()
        except FileNotFoundError:
            if not self._files.exists(full[: full.find("/", 1)]):
                raise  # a bucket whose name is wrong is not made
            self._files.makedirs(full.rpartition("/")[0], exist_ok=True)
            return write()

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    @contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        """Turn any error into an OSError that names the file. Many file systems raise errors of their own."""
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) and error.errno:
                number, text = error.errno, error.strerror
            else:
                number = next(
                    (number for kind, number in _NUMBERS.items() if isinstance(error, kind)), errno.EIO
                )
                text = f"{os.strerror(number)} ({type(error).__name__}: {error})"
            raise OSError(number, text, f"{self.url}/{path}") from error


# For errors that come without a number.
_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    TimeoutError: errno.ETIMEDOUT,
    ConnectionError: errno.ECONNRESET,
}
