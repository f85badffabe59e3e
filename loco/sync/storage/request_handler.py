"""What a server answers to each request; `http_store` lists the requests."""

import errno
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, BinaryIO
from urllib.parse import unquote

from .folder_store import FolderStore
from .headers import TOKEN_VARIABLE, file_tag, is_authorized, parse_range, preferred_wait
from .listener import QUIET, Connection
from .metrics import CONTENT_TYPE, PATH, Metrics
from .names import check_folder, check_path, encode_listing, listing_tag, may_change
from .relay import Relay
from .watches import Watches

_log = logging.getLogger(__name__)
_CHUNK = 1 << 20
_LARGEST_BODY = 1 << 40  # bytes; a larger one is a mistake
_LONGEST_WAIT = 60.0  # seconds

_STATUS = {
    errno.ENOENT: HTTPStatus.NOT_FOUND,
    errno.EEXIST: HTTPStatus.PRECONDITION_FAILED,
    errno.ENOTDIR: HTTPStatus.CONFLICT,
    errno.EISDIR: HTTPStatus.CONFLICT,
    errno.ENAMETOOLONG: HTTPStatus.BAD_REQUEST,
    errno.EACCES: HTTPStatus.FORBIDDEN,
    errno.EPERM: HTTPStatus.FORBIDDEN,
    errno.EROFS: HTTPStatus.FORBIDDEN,
    errno.ENOSPC: HTTPStatus.INSUFFICIENT_STORAGE,
    errno.EDQUOT: HTTPStatus.INSUFFICIENT_STORAGE,
}


@dataclass(frozen=True)
class Service:
    """What requests are answered from.

    relay: if there is one, it fills `files`.
    """

    files: FolderStore
    relay: Relay | None
    watches: Watches
    is_writable: bool
    token: str
    metrics: Metrics


class _RefusalError(Exception):
    """The answer is this status and sentence."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _ClientLostError(Exception):
    """The connection to the client failed, so nobody is left to answer."""


class RequestHandler(BaseHTTPRequestHandler):
    """The requests of one connection, one after the other, in a thread of their own."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # of a request that is no HTTP, so that the refusal is
    server_version, sys_version = "loco.sync", ""
    timeout = QUIET
    disable_nagle_algorithm = True  # else a header and a short body wait for each other

    def __init__(self, service: Service, client: Connection, *args: Any) -> None:
        self._service, self._client, self._count = service, client, service.metrics.add
        self._count("connections")
        try:
            super().__init__(*args)  # which answers them
        finally:
            self._count("connections", -1)

    def handle_one_request(self) -> None:
        self._client.await_request()
        super().handle_one_request()

    def do_GET(self) -> None:
        with self._refusing():
            path = self._path()
            if path == PATH:
                headers = {"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"}
                self._answer(HTTPStatus.OK, headers, self._service.metrics.text())
            elif path.endswith("/") or not path:
                self._send_listing(path.removesuffix("/"))
            else:
                with self._open(path) as file:
                    self._send_file(path, file)

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        with self._refusing():
            path, is_new = self._path_to_write(), self.headers.get("If-None-Match") == "*"
            self._service.files.put(path, self._body(), replace=not is_new)
            self._answer(HTTPStatus.NO_CONTENT, {})

    def do_DELETE(self) -> None:
        with self._refusing():
            self._service.files.delete(self._path_to_write())
            self._answer(HTTPStatus.NO_CONTENT, {})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse in a sentence, not in a page. The connection ends, since a body may not have been read."""
        headers = {"Content-Type": "text/plain; charset=utf-8", "Connection": "close"}
        if code == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        sentence = message or HTTPStatus(code).phrase
        self._answer(code, headers, f"{sentence}\n".encode("utf-8", "replace"))

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("%s: %s", self.address_string(), format % args)

    def _path(self) -> str:
        """The path of the file that is asked for, or of a folder, with a slash at its end."""
        if not is_authorized(self.headers.get("Authorization"), self._service.token):
            reason = f"the server asks for a token, which clients take from {TOKEN_VARIABLE}"
            raise _RefusalError(HTTPStatus.UNAUTHORIZED, reason)
        self._client.begin_request()
        path = unquote(self.path, errors="strict")
        # An encoded slash is part of a name, and no name has one.
        if not path.startswith("/") or path.count("/") != self.path.count("/") or "?" in self.path:
            raise _RefusalError(HTTPStatus.BAD_REQUEST, "the path must be /name/of/a/file, and have no query")
        check_folder(path[1:].removesuffix("/"))
        return path[1:]

    def _path_to_write(self) -> str:
        path = self._path()
        if not self._service.is_writable:
            reason = "a relay can't be written to" if self._service.relay else "the server is not --writable"
            raise _RefusalError(HTTPStatus.FORBIDDEN, reason)
        return check_path(path)

    def _open(self, path: str) -> BinaryIO:
        relay = self._service.relay
        return relay.open(path, self._still_waiting) if relay else self._service.files.open(path)

    def _body(self) -> Iterator[bytes]:
        length, coding = self.headers.get("Content-Length", ""), self.headers.get("Transfer-Encoding")
        if coding is None and re.fullmatch(r"[0-9]{1,18}", length):
            return self._received(self._sized(_checked_size(int(length))))
        if coding == "chunked" and not length:
            return self._received(self._chunked())
        raise _RefusalError(HTTPStatus.LENGTH_REQUIRED, "a PUT must give its Content-Length, or be chunked")

    def _received(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """A client that sends slower than at `SLOWEST_LINK` is cut."""
        self._client.begin_window()
        for chunk in chunks:
            self._client.moved(len(chunk))
            self._count("received_bytes_total", len(chunk))
            yield chunk
        self._client.begin_request()  # what is left is done by the disk

    def _chunked(self) -> Iterator[bytes]:
        """A body of chunks, each behind its size in hexadecimal digits. The last one is empty."""
        size, done = 1, 0
        while size:
            size = int(self._line(rb"[0-9a-fA-F]{1,12}\r\n"), 16)
            done = _checked_size(done + size)
            yield from self._sized(size)
            self._line(rb"\r\n")

    def _line(self, pattern: bytes) -> bytes:
        with self._of_client():
            line = self.rfile.readline(16)
            if not line:
                raise ConnectionError("the body ended early")
        if not re.fullmatch(pattern, line):
            raise ValueError("the body is not chunked as HTTP says, or has trailers")
        return line

    def _sized(self, length: int) -> Iterator[bytes]:
        with self._of_client():
            while length:
                chunk = self.rfile.read(min(length, _CHUNK))
                if not chunk:
                    raise ConnectionError("the body ended early")
                length -= len(chunk)
                yield chunk

    def _send_listing(self, folder: str) -> None:
        tag = self.headers.get("If-None-Match", "").removeprefix("W/")  # as a proxy that compresses marks it
        wait = min(preferred_wait(self.headers.get("Prefer", "")), _LONGEST_WAIT)
        names = self._service.watches.names(folder, tag, wait)
        headers = {
            "Content-Type": "application/json",
            "ETag": listing_tag(names),
            "Cache-Control": "no-store",
        }
        if tag == listing_tag(names):
            self._answer(HTTPStatus.NOT_MODIFIED, headers)
        else:
            self._answer(HTTPStatus.OK, headers, encode_listing(names))

    def _send_file(self, path: str, file: BinaryIO) -> None:
        size, tag = file.seek(0, os.SEEK_END), file_tag(file)
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": tag}
        if may_change(path):
            headers["Cache-Control"] = "no-store"
        # The rest of a file is no use to a client that has the start of another one.
        wanted = self.headers.get("Range", "") if self.headers.get("If-Range", tag) == tag else ""
        part = parse_range(wanted, size)
        if part is None:
            status, part = HTTPStatus.OK, range(size)
        elif part:
            status = HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
        else:
            status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
            headers["Content-Range"] = f"bytes */{size}"
        headers["Content-Length"] = str(len(part))
        self._answer(status, headers)
        if part and self.command != "HEAD":
            with self._of_client():
                file.seek(part.start)  # sendfile of what is no file of the system starts there
                self._client.begin_window()
                for start in range(part.start, part.stop, _CHUNK):
                    size = min(_CHUNK, part.stop - start)
                    if self.connection.sendfile(file, start, size) < size:
                        raise ConnectionError(f"{path} has become shorter")
                    self._client.moved(size)
                    self._count("sent_bytes_total", size)

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes | None = None) -> None:
        method = self.command if hasattr(self, f"do_{self.command}") else "other"
        self._count("requests_total", labels=f'{{method="{method}",status="{status:d}"}}')
        with self._of_client():
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if body is not None:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if body and self.command != "HEAD":
                self.wfile.write(body)
                self._count("sent_bytes_total", len(body))

    def _still_waiting(self) -> None:
        """Clients skip any number of these, and take no server for down that sends them."""
        if self.request_version >= "HTTP/1.1":
            with self._of_client():
                self.send_response_only(HTTPStatus.CONTINUE)
                self.end_headers()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Answer an error with its status and a sentence."""
        try:
            # A body that is not read would be taken for the next request.
            has_body = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
            self.close_connection |= has_body and self.command != "PUT"
            try:
                yield
            except _RefusalError as refusal:
                self.send_error(refusal.status, str(refusal))
            except ValueError as error:
                self.send_error(HTTPStatus.BAD_REQUEST, str(error))
            except (ConnectionError, TimeoutError) as error:
                self.send_error(HTTPStatus.BAD_GATEWAY, f"the upstream does not answer: {error}")
            except OSError as error:
                status = _STATUS.get(error.errno or 0, HTTPStatus.INTERNAL_SERVER_ERROR)
                self.send_error(status, error.strerror)
        except _ClientLostError as lost:
            _log.debug("%s: %s", self.address_string(), lost.__cause__)
            self.close_connection = True

    @contextmanager
    def _of_client(self) -> Iterator[None]:
        """An error in here is of the connection to the client, not of a file or the upstream."""
        try:
            yield
        except OSError as error:
            raise _ClientLostError from error


def _checked_size(size: int) -> int:
    if size > _LARGEST_BODY:
        raise _RefusalError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the file is too large")
    return size
