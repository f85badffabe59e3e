"""A store for other machines, over HTTP: a local folder, or a relay of another store.

server = serve("/data/run-7", host="0.0.0.0", writable=True, token=secret)
relay = serve("/scratch", upstream="http://trainer:8765")      # one download for all workers of this machine
"""

import errno
import ipaddress
import os
import socket
import ssl
import threading
from functools import partial
from typing import Self
from urllib.parse import quote

from .folder_store import FolderStore
from .headers import TOKEN_VARIABLE, find_token
from .listener import Listener, most_connections
from .metrics import Metrics
from .relay import Relay
from .request_handler import RequestHandler, Service
from .stores import open_store
from .watches import Watches

DEFAULT_PORT = 8765

_UPSTREAM_TIMEOUT = 10.0  # seconds: less than a client waits for the relay
_LOCAL_WATCH, _UPSTREAM_WATCH = 1.0, 20.0  # seconds of one wait; upstream each is a request


def serve(
    folder: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    upstream: str | None = None,
    writable: bool = False,
    token: str | None = None,
    certfile: str | os.PathLike[str] | None = None,
    keyfile: str | os.PathLike[str] | None = None,
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
        certfile, keyfile: a certificate with its chain, and its key if that is not in the same file, as PEM.
            The server then speaks HTTPS.

    Raises:
        ValueError: these can't go together, or one of them is wrong.
        OSError: there is no such folder or file, or the address is in use or is not this machine's.
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
    tls = _tls(certfile, keyfile)
    if upstream is not None:
        store = open_store(upstream, token, timeout=_UPSTREAM_TIMEOUT)
        # A folder of its own, because a relay deletes what the upstream does not list.
        files = FolderStore(files.folder / quote(store.url, safe=""))
        relay = Relay(files, store)
    most = most_connections()
    # Half of the connections may wait for changes, so that the others can always be answered.
    watches = Watches(relay or files, _UPSTREAM_WATCH if relay else _LOCAL_WATCH, most // 2)
    return SyncServer(Service(files, relay, watches, writable, token, Metrics()), host, port, most, tls)


class SyncServer:
    """A server that runs in threads of this process.

    Attributes:
        url: for `open_store` on the machines that reach it.
    """

    def __init__(self, service: Service, host: str, port: int, most: int, tls: ssl.SSLContext | None) -> None:
        self._watches = service.watches
        self._listener = Listener(partial(RequestHandler, service), host, port, most, tls)
        name = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://{f'[{name}]' if ':' in name else name}:{self._listener.server_address[1]}"
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


def _tls(
    certfile: str | os.PathLike[str] | None, keyfile: str | os.PathLike[str] | None
) -> ssl.SSLContext | None:
    if certfile is None:
        if keyfile is not None:
            raise ValueError("a keyfile needs the certfile that it belongs to")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile)
    except ssl.SSLError as error:
        raise ValueError(
            f"{certfile} has no certificate as PEM, or not the one of its key: {error}"
        ) from error
    except OSError as error:
        raise OSError(
            error.errno, error.strerror, f"{certfile}, {keyfile}" if keyfile else f"{certfile}"
        ) from error
    return context


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
