"""Stores that this process hosts for other sites, and serves for a while after its own program has ended."""

import atexit
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, TCPStore

from ..errors import first_line
from .authentication import StoreSeals
from .liveness import await_end

_LINGER = 30.0  # seconds that a host serves others that live, when its own program has ended
_QUIET = 5.0  # of these, until it says so
_logger = logging.getLogger(__name__)

_hosted: dict[int, "HostedStore"] = {}  # by the port that was asked for, until this process ends


class Guests(NamedTuple):
    """Processes that use the store, by their heartbeats in it (see `Liveness`).

    prefix: of the store's keys. name, ranks, seals: as of their `Liveness`.
    """

    prefix: str
    name: str
    ranks: list[int]
    seals: StoreSeals


class HostedStore:
    """A store that this process hosts until it ends.

    What became of the last round may be known only to this store and to those who have ended already. So when
    its program ends, the process serves the guests until they have ended, too.
    """

    def __init__(self, store: TCPStore) -> None:
        self.store = store
        self.port: int = store.port
        self._guests: dict[str, list[Guests]] = {}
        self._leave: dict[str, Callable[[], object]] = {}
        atexit.register(self._serve_guests)

    def serve(self, host: str, guests: list[Guests], leave: Callable[[], object] = lambda: None) -> None:
        """
        Args:
            host: a name for these guests, which replace earlier ones of the same name.
            leave: called when the program ends, before the guests are served.
        """
        self._guests[host], self._leave[host] = guests, leave

    def _serve_guests(self) -> None:
        for leave in self._leave.values():
            leave()
        guests = [one for each in self._guests.values() for one in each]
        if _await_end(self.store, guests, _QUIET):
            return
        _logger.warning(
            "this program has ended, and serves the others for %g s more: the store of all sites is in it",
            _LINGER,
        )
        _await_end(self.store, guests, _LINGER)


def _await_end(store: TCPStore, guests: list[Guests], limit: float) -> bool:
    deadline = time.monotonic() + limit
    each = [
        await_end(
            PrefixStore(one.prefix, store),
            one.name,
            one.ranks,
            seals=one.seals,
            limit=deadline - time.monotonic(),
        )
        for one in guests
    ]
    return all(each)


def host_at(host: str, port: int) -> HostedStore | None:
    """Host a store at an address, if this machine has it and no other process was quicker; None otherwise.

    Raises:
        ValueError: the address can't be looked up.
    """
    if port in _hosted:
        return _hosted[port]
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"the sites' address {host}:{port} can't be looked up: {error}") from error
    # Of its own, torch would listen at all addresses of this machine.
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
            listener.listen()
        except OSError:
            return None  # another machine's address; or in use, by another store or by what won't answer
        store = TCPStore(
            str(where[0]), port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    _hosted[port] = HostedStore(store)
    return _hosted[port]


def host_at_port(ports: Sequence[int]) -> HostedStore:
    """Host a store at all addresses of this machine, at the first of these ports that is free; none: at any.

    Raises:
        ValueError: all are in use.
    """
    failed = ""
    for port in ports or [0]:
        if port in _hosted:
            return _hosted[port]
        try:
            store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            failed = failed or f"port {port} can't be used for this site's store: {first_line(error)}"
            continue
        _hosted[port] = HostedStore(store)
        return _hosted[port]
    raise ValueError(failed)
