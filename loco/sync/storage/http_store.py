"""A store behind an HTTP server: `python -m loco sync serve`, or a relay of one.

GET versions/a.bin       the file; with Range a part of it
PUT versions/a.bin       write it; with If-None-Match: * create it, or 412
DELETE versions/a.bin
GET versions/            the names in a folder, as JSON. With If-None-Match: <tag> and Prefer: wait=<seconds>
                         it is answered once the names have another tag, or with 304 after that time
"""

import errno
import http.client
import io
import json
import socket
import ssl
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from urllib.parse import quote, urlsplit

from .headers import SLOWEST_LINK, authorization, find_token
from .names import AT_ONCE, Buffer, check_folder, check_path, is_path, listing_tag, poll

_CONNECTING = 5.0  # seconds
_LONGEST_WAIT = 30.0  # seconds of one request; routers and proxies forget connections that are quiet for long
_BETWEEN_WAITS = 0.2  # seconds, at most, so that a server that does not wait is not asked all the time
_RESUMING = (0.1, 0.2, 0.5, 1.0, 2.0)  # seconds before each request for the rest of a body that was cut off
_LONGEST_DOWNLOAD = 3600.0  # seconds for which a relay may say that it is still downloading
_LARGEST_LISTING = 16 << 20  # bytes: hundreds of thousands of names
_SLOWEST_DISK = 50e6  # bytes per second; a server flushes a file to disk before it answers
_CHUNK = 1 << 20
_FULL = HTTPStatus.SERVICE_UNAVAILABLE

_NUMBERS: dict[int, int] = {
    HTTPStatus.UNAUTHORIZED: errno.EACCES,
    HTTPStatus.FORBIDDEN: errno.EACCES,
    HTTPStatus.NOT_FOUND: errno.ENOENT,
    HTTPStatus.CONFLICT: errno.ENOTDIR,
    HTTPStatus.PRECONDITION_FAILED: errno.EEXIST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: errno.EFBIG,
    HTTPStatus.BAD_GATEWAY: errno.ECONNABORTED,
    HTTPStatus.SERVICE_UNAVAILABLE: errno.ECONNABORTED,
    HTTPStatus.GATEWAY_TIMEOUT: errno.ECONNABORTED,
    HTTPStatus.INSUFFICIENT_STORAGE: errno.ENOSPC,
}


class _FullError(ConnectionAbortedError):
    """The server has too many clients."""


class HttpStore:
    """The store of one server. Each request has a connection of its own; no proxy and no redirect is used.

    Args:
        url: has a path if something in front of the server adds one.
        token: None: LOCO_SYNC_TOKEN. Over http:// anybody on the way can read it.
        timeout: seconds without a byte after which the server is taken for down. A whole answer that is no
            file must arrive within this time, and each MiB of a file within 32 s more.

    Raises:
        ValueError: the URL cannot be a server's, or the token is none.
    """

    at_once = AT_ONCE // 2  # each has a connection, of which a server bears so many

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 30.0) -> None:
        self.url, self._timeout = url.rstrip("/"), timeout
        try:
            parts = urlsplit(self.url)
            host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"{url} is no URL of a server: {error}") from error
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or "@" in url:
            raise ValueError(f"the URL of a server must be http://host:port or https://host:port, got {url}")
        self._host, self._prefix = host, quote(parts.path, safe="/%")
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = authorization(find_token(token)) | {"Connection": "close"}

    def read(self, path: str, most: int) -> bytes:
        return b"".join(self._chunks(path, most, self._timeout + most / SLOWEST_LINK))

    def read_chunks(self, path: str) -> Iterator[bytes]:
        return self._chunks(path, sys.maxsize, _LONGEST_DOWNLOAD)

    def _chunks(self, path: str, most: int, longest: float) -> Iterator[bytes]:
        """The first `most` bytes of a file. A body that is cut off is resumed where it was cut, and a server
        that is full is asked again, a few times.

        Args:
            longest: seconds in which a relay must have the file, which it downloads before it sends it.
        """
        done, size, end, tag, pauses = 0, -1, -1, "", list(_RESUMING)
        while done != end:
            rest = {"Range": f"bytes={done}-", "If-Range": tag} if done else {}
            try:
                with self._request("GET", check_path(path), rest, longest=longest) as response:
                    if not done:
                        size, tag = response.length or 0, response.headers.get("ETag", "")
                        end = min(size, most)
                    elif response.headers.get("Content-Range") != f"bytes {done}-{size - 1}/{size}":
                        raise self._error(errno.ESTALE, "It was replaced while it was read", path)
                    seconds = self._timeout + _CHUNK / SLOWEST_LINK
                    while chunk := response.read_within(seconds, min(_CHUNK, end - done)):
                        done += len(chunk)
                        yield chunk
            except ConnectionError as error:
                if end < 0 and not (pauses and isinstance(error, _FullError)):
                    raise
            if done != end:
                if not pauses:
                    text = f"The connection was cut again and again, after {done:,} bytes"
                    raise self._error(errno.ECONNABORTED, text, path)
                time.sleep(pauses.pop(0))

    def write(self, path: str, data: bytes) -> None:
        self._put(path, data, {})

    def write_chunks(self, path: str, chunks: Iterable[Buffer]) -> None:
        """In HTTP's chunks, since the length is not known before the end."""
        with self._request("PUT", check_path(path), {}, chunks):
            pass

    def create(self, path: str, data: bytes) -> None:
        self._put(path, data, {"If-None-Match": "*"})

    def names(self, folder: str) -> list[str]:
        return self._list(folder, {})

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError), self._request("DELETE", check_path(path)):
            pass

    def wait(self, folder: str, known: list[str], timeout: float) -> list[str]:
        deadline = time.monotonic() + timeout

        def names() -> list[str]:
            wait = max(0.0, min(deadline - time.monotonic(), _LONGEST_WAIT))
            headers = {"If-None-Match": listing_tag(known), "Prefer": f"wait={wait:.3f}"}
            return self._list(folder, headers, known, patience=wait)

        return poll(names, known, timeout, _BETWEEN_WAITS)

    def _put(self, path: str, data: bytes, headers: Mapping[str, str]) -> None:
        headers = {**headers, "Content-Length": str(len(data))}
        # In blocks, each of which has a timeout of its own.
        blocks = (data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK))
        with self._request("PUT", check_path(path), headers, blocks):
            pass

    def _list(
        self, folder: str, headers: Mapping[str, str], known: list[str] | None = None, patience: float = 0.0
    ) -> list[str]:
        path = f"{check_folder(folder)}/" if folder else ""
        with self._request("GET", path, headers, patience=patience) as response:
            if response.status == HTTPStatus.NOT_MODIFIED and known is not None:
                return known
            if (size := response.length or 0) > _LARGEST_LISTING:
                text = f"The listing has {size:,} bytes, and at most {_LARGEST_LISTING:,} may be read of it"
                raise self._error(errno.EFBIG, text, path)
            try:
                names = json.loads(response.read_within(self._timeout))
                if all(is_path(name) and "/" not in name for name in names):
                    return names
            except (ValueError, TypeError):
                pass
        text = "The answer is no list of names, so this is no server of loco.sync"
        raise self._error(errno.EPROTO, text, path)

    @contextmanager
    def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: Iterable[Buffer] | None = None,
        patience: float = 0.0,
        longest: float = 0.0,
    ) -> Iterator["_Answer"]:
        """The answer, if it is no refusal.

        Args:
            patience: seconds that the server may take beyond the usual.
            longest: seconds for which it may put the answer off, as long as it says something.

        Raises:
            ConnectionError: there is no answer, or reading it failed.
            OSError: the server refused.
        """
        sent = 0

        def counted(body: Iterable[Buffer]) -> Iterator[Buffer]:
            nonlocal sent
            for block in body:
                yield block
                sent += len(block)

        connection = self._connect(self._host, self._port, timeout=_CONNECTING, blocksize=_CHUNK)
        try:
            try:
                connection.connect()
            except (ConnectionResetError, ssl.SSLEOFError) as error:  # in TLS's handshake it can't say why
                text = "The server has too many clients, or speaks no TLS"
                raise _FullError(errno.ECONNABORTED, text, f"{self.url}/{path}") from error
            connection.sock.settimeout(self._timeout + patience)
            # A server that refuses may close before it has read the body; then its answer says why.
            with suppress(BrokenPipeError, ConnectionResetError):
                target = f"{self._prefix}/{quote(path)}"
                blocks = None if body is None else counted(body)
                connection.request(method, target, blocks, {**self._headers, **(headers or {})})
            quiet = self._timeout + patience + sent / _SLOWEST_DISK
            with _Answer(connection.sock, method, quiet, max(quiet, longest)) as response:
                if response.status >= 300 and response.status != HTTPStatus.NOT_MODIFIED:
                    raise self._refusal(response, path)
                if response.length is None:  # http.client takes a header that is cut off for a whole one
                    raise self._error(errno.ECONNABORTED, "The answer was cut off, or has no length", path)
                yield response
        except TimeoutError as error:
            raise ConnectionError(errno.ETIMEDOUT, "No answer in time", f"{self.url}/{path}") from error
        except http.client.HTTPException as error:
            text = f"{type(error).__name__}: {error}"
            raise ConnectionError(errno.ECONNABORTED, text, f"{self.url}/{path}") from error
        except OSError as error:
            if error.filename is not None:
                raise
            number, text = error.errno or errno.ECONNABORTED, error.strerror or str(error)
            raise ConnectionError(number, text, f"{self.url}/{path}") from error
        finally:
            connection.close()

    def _refusal(self, response: "_Answer", path: str) -> OSError:
        text = response.read_within(self._timeout, 1000).decode("utf-8", "replace")
        sentence = text.strip().partition("\n")[0]
        number = _NUMBERS.get(response.status, errno.EIO)
        error = self._error(number, sentence or f"{response.status} {response.reason}", path)
        return _FullError(*error.args, error.filename) if response.status == _FULL else error

    def _error(self, number: int, text: str, path: str) -> OSError:
        return OSError(number, text, f"{self.url}/{path}")


class _Answer(http.client.HTTPResponse):
    """An answer that must arrive in time as a whole, where a socket's own timeout begins anew with each byte.

    Args:
        quiet: seconds without a byte after which the server is taken for down.
        longest: seconds until all headers are there.
    """

    def __init__(self, sock: socket.socket, method: str, quiet: float, longest: float) -> None:
        super().__init__(sock, method=method)
        self.fp.close()
        self._incoming = _Incoming(sock, quiet, longest)
        self.fp = io.BufferedReader(self._incoming)
        self.begin()

    def read_within(self, seconds: float, size: int | None = None) -> bytes:
        self._incoming.deadline = time.monotonic() + seconds
        return self.read(size)


class _Incoming(io.RawIOBase):
    def __init__(self, sock: socket.socket, quiet: float, longest: float) -> None:
        self._socket, self._quiet = sock, quiet
        self._raw = sock.makefile("rb", buffering=0)
        self.deadline = time.monotonic() + longest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(min(left, self._quiet))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
