"""A store for other machines, over HTTP: a local folder, or a relay of another store.

server = serve("/data/run-7", host="0.0.0.0", writable=True, token=secret)
relay = serve("/scratch", upstream="http://trainer:8765")      # one download for all workers of this machine
"""

import errno
import ipaddress
import logging
import os
import socket
import socketserver
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import quote

from .bearer import TOKEN_VARIABLE, find_token
from .folder_store import FolderStore
from .relay import Relay
from .request_handler import RequestHandler, Service
from .stores import open_store
from .watches import Watches

DEFAULT_PORT = 8765

_log = logging.getLogger(__name__)
_UPSTREAM_TIMEOUT = 10.0  # seconds: less than a client waits for the relay
_LOCAL_WATCH, _UPSTREAM_WATCH = 1.0, 20.0  # seconds of one wait; upstream each is a request
_CLOSING = 2.0  # seconds for answers that are being sent
_DRAINING = 1.0  # seconds for what a client still sends after the answer that ends its connection


def serve(
    folder: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    upstream: str | None = None,
    writable: bool = False,
    token: str | None = None,
) -> "SyncServer":
    """Serve a folder until the server is closed.

    Args:
        folder: of the files; of a relay: where it keeps what it has downloaded.
        port: 0: any that is free.
        upstream: the URL of a store. The server is a relay of it: it downloads a file once, when the first
            client asks for it, and serves what it has if the upstream is down.
        writable: files may be written and deleted.
        token: what clients must send, and what the upstream is sent; None: LOCO_SYNC_TOKEN. If that is empty,
            too, clients need none.

    Raises:
        ValueError: these can't go together, or one of them is wrong.
        OSError: there is no such folder, or the address is in use or is not this machine's.
    """
    token = find_token(token)
    if upstream is not None and writable:
        raise ValueError("a relay can't be writable: write to its upstream")
    if writable and not token and not _is_loopback(host):
        raise ValueError(
            f"a writable server on {host} needs a token, or anybody who reaches it can replace the weights: "
            f"set {TOKEN_VARIABLE}, on its clients too"
        )
    if not 0 <= port < 1 << 16:
        raise ValueError(f"port must be 0 to 65535, got {port}")
    files, relay = FolderStore(folder), None
    if not files.folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "There is no such folder", files.url)
    if upstream is not None:
        store = open_store(upstream, token, timeout=_UPSTREAM_TIMEOUT)
        # A folder of its own, because a relay deletes what the upstream does not list.
        files = FolderStore(files.folder / quote(store.url, safe=""))
        relay = Relay(files, store)
    watches = Watches(relay, _UPSTREAM_WATCH) if relay else Watches(files, _LOCAL_WATCH)
    return SyncServer(Service(files, relay, watches, writable, token), host, port)


class SyncServer:
    """A server that runs in threads of this process.

    Attributes:
        url: for `open_store` on the machines that reach it.
    """

    def __init__(self, service: Service, host: str, port: int) -> None:
        self._watches = service.watches
        self._listener = _Listener(service, host, port)
        name = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
        self.url = f"http://{f'[{name}]' if ':' in name else name}:{self._listener.server_address[1]}"
        # A short interval: `close` waits for its end.
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more requests, end long polls, and let answers that are being sent end within a moment."""
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()
        self._watches.close()
        self._listener.hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Listener(ThreadingHTTPServer):
    """A listening socket and its connections, each of which has a thread."""

    request_queue_size = 128  # all workers come when a version appears

    def __init__(self, service: Service, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._connections: set[socket.socket] = set()
        self._ended = threading.Condition()
        try:
            super().__init__((host, port), partial(RequestHandler, service))
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"{host}:{port}") from error

    def server_bind(self) -> None:
        """Without HTTPServer's question to the DNS, whose answer nobody needs."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._ended:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._drain(request)
        super().shutdown_request(request)
        with self._ended:
            self._connections.discard(request)
            self._ended.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        level = logging.DEBUG if isinstance(sys.exception(), OSError) else logging.ERROR
        _log.log(level, "the connection of %s ended", client_address, exc_info=True)

    def hang_up(self) -> None:
        """Read no more requests, and cut what is still being sent after a moment."""
        with self._ended:
            self._shut(socket.SHUT_RD)
            if not self._ended.wait_for(lambda: not self._connections, _CLOSING):
                self._shut(socket.SHUT_RDWR)
                self._ended.wait_for(lambda: not self._connections, _CLOSING)

    def _drain(self, connection: socket.socket) -> None:
        """Read what a refused client still sends. Closed before that, TCP would take back the answer, too."""
        until = time.monotonic() + _DRAINING
        with suppress(OSError):  # the client has gone, or sends for too long
            connection.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0:
                connection.settimeout(left)
                if not connection.recv(1 << 16):
                    break

    def _shut(self, how: int) -> None:
        for connection in self._connections:
            with suppress(OSError):  # the client has ended it
                connection.shutdown(how)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
