"""A server's connections: how many there may be, and how long each may take.

A connection has a thread. A client that has not sent a whole request with the token can't keep it: it is cut
when the time for the request is up, or earlier, the oldest first, when there is no room for a new connection.
"""

import errno
import logging
import math
import os
import resource
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .headers import SLOWEST_LINK

QUIET = 30.0  # seconds without a byte from the client, or to it

_log = logging.getLogger(__name__)
_MOST = 1024  # connections, each of which has a thread
_DESCRIPTORS = 3  # of a connection: its own, that of the file, and that of its folder while it is flushed
_SPARE = 16  # descriptors for a relay's downloads and for what else opens files
_HEAD = 10.0  # seconds for a request up to its body, and for the pause before it
_WINDOW = 1 << 20  # bytes of a body that must move in QUIET seconds and what SLOWEST_LINK takes for them
_LOOKING = 0.25  # seconds between two looks for connections whose time is up
_GRACE = 0.2  # seconds for a request for which a connection is not cut, though there is no room for others
_MAKING_ROOM = 0.5  # seconds for a connection to end, so that there is room
_CLOSING = 2.0  # seconds for answers that are being sent
_DRAINING = 1.0  # seconds for what a client still sends after the answer that ends its connection
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 31\r\nConnection: close\r\n\r\n"
_FULL += b"the server has too many clients"


def most_connections() -> int:
    """As many as this process may still open files for."""
    left = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd")) - _SPARE
    return max(2, min(_MOST, left // _DESCRIPTORS))


class Connection:
    """
    Attributes:
        is_busy: it has sent a whole request with the token, which is being answered.
        deadline: when it is cut.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.was_busy = False
        self.await_request()

    def await_request(self) -> None:
        self.is_busy, self.since = False, time.monotonic()
        self.deadline = self.since + _HEAD

    def begin_request(self) -> None:
        """Of a client that has the token: what the server does for it takes as long as it takes."""
        self.is_busy = self.was_busy = True
        self.deadline = math.inf

    def begin_window(self) -> None:
        """Another part of a body is about to be sent or received."""
        self._moved = 0
        self.deadline = time.monotonic() + QUIET + _WINDOW / SLOWEST_LINK

    def moved(self, size: int) -> None:
        self._moved += size
        if self._moved >= _WINDOW:
            self.begin_window()

    def cut(self, how: int = socket.SHUT_RDWR) -> None:
        with suppress(OSError):  # the client has ended it
            socket.socket.shutdown(self.socket, how)  # not TLS's, whose state is another thread's


class Listener(ThreadingHTTPServer):
    """
    Args:
        answer: makes what answers the requests of one connection, and has answered them when it is made.
        most: connections at once.
    """

    request_queue_size = 128  # all workers come when a version appears

    def __init__(
        self,
        answer: Callable[..., BaseHTTPRequestHandler],
        host: str,
        port: int,
        most: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._answer, self._most, self._tls = answer, most, tls
        self._connections: dict[socket.socket, Connection] = {}
        self._ended = threading.Condition()
        self._looked, self._is_full = 0.0, False
        try:
            super().__init__((host, port), BaseHTTPRequestHandler)
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"{host}:{port}") from error

    def server_bind(self) -> None:
        """Without HTTPServer's question to the DNS, whose answer nobody needs."""
        socketserver.TCPServer.server_bind(self)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _SHORT:  # at once it would fail again
                with self._ended:
                    self._make_room(_DESCRIPTORS, str(error.strerror))
                    self._ended.wait(_MAKING_ROOM)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._ended:
            if is_accepted := self._has_room():
                self._connections[request] = Connection(request)
        if is_accepted:
            super().process_request(request, client_address)
            return
        with suppress(OSError):  # the client has gone
            request.setblocking(False)
            if self._tls is None:
                request.send(_FULL)
        self.close_request(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        connection = self._connections[request]
        if self._tls is not None:
            connection.socket = self._tls.wrap_socket(
                request, server_side=True, do_handshake_on_connect=False
            )
            connection.socket.settimeout(_HEAD)
            connection.socket.do_handshake()  # pyright: ignore[reportAttributeAccessIssue]
        self._answer(connection, connection.socket, client_address, self)

    def shutdown_request(self, request: Any) -> None:
        connection = self._connections[request]
        connection.await_request()
        self._drain(connection.socket)
        self.close_request(connection.socket)
        with self._ended:
            del self._connections[request]
            self._ended.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        level = logging.DEBUG if isinstance(sys.exception(), OSError) else logging.ERROR
        _log.log(level, "the connection of %s ended", client_address, exc_info=True)

    def service_actions(self) -> None:
        """Called by the listening thread every now and then."""
        if (now := time.monotonic()) - self._looked < _LOOKING:
            return
        self._looked = now
        with self._ended:
            for connection in self._connections.values():
                if connection.deadline < now:
                    connection.cut()

    def hang_up(self) -> None:
        """Read no more requests, and cut what is still being sent after a moment."""
        with self._ended:
            for how in (socket.SHUT_RD, socket.SHUT_RDWR):
                for connection in self._connections.values():
                    connection.cut(how)
                if self._ended.wait_for(lambda: not self._connections, _CLOSING):
                    return

    def _has_room(self) -> bool:
        until = time.monotonic() + _MAKING_ROOM
        if len(self._connections) < self._most // 2:
            self._is_full = False
        while len(self._connections) >= self._most:
            if not self._make_room(1, f"{self._most} connections") or time.monotonic() > until:
                return False
            self._ended.wait(_GRACE / 4)
        return True

    def _make_room(self, count: int, why: str) -> bool:
        """Cut the connections that have waited longest for a request; first those that never sent any.

        -> whether there are any
        """
        if not self._is_full:
            _log.warning("the server is full (%s): the oldest connections without a request are cut", why)
        self._is_full = True
        idle = [one for one in self._connections.values() if not one.is_busy]
        for one in sorted(idle, key=lambda one: (one.was_busy, one.since))[:count]:
            if one.since < time.monotonic() - _GRACE:
                one.cut()
        return bool(idle)

    def _drain(self, connection: socket.socket) -> None:
        """Read what a refused client still sends. Closed before that, TCP would take back the answer, too."""
        until = time.monotonic() + _DRAINING
        with suppress(OSError, ValueError):  # the client has gone, or sends for too long
            socket.socket.shutdown(connection, socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0:
                connection.settimeout(left)
                if not socket.socket.recv(connection, 1 << 16):
                    break
