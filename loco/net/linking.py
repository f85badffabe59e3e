"""Connections that can be built again and again, and whose building ends when a rank is lost.

Members find each other by a store: each publishes there the address at which it listens, and two tokens. The
connecting side sends the first token, the listener answers with the second one, so that neither takes a
stranger for a member: another machine's 127.0.0.1 is no error that a network reports.

Nothing here waits without a limit: all sockets are non-blocking, and every wait asks `PatientStore.check`.
"""

import errno
import fcntl
import hmac
import ipaddress
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..coordination.store_client import KeyValueStore, StoreClient
from ..errors import TransportError, first_line
from ..logs import Waiting
from .mesh import Mesh, NoLinks
from .tcp import TcpLinks

_POLL = 0.01  # seconds
_ANSWER = 60.0  # seconds that a store may take at a start, when all ranks ask it at once
_TOKEN = 16  # bytes
_MEMBER = struct.Struct("<I")
_SIOCGIFADDR = 0x8915
_STRANGERS = 64  # connections that have not said who they are, beside one for each member that is missing
_logger = logging.getLogger(__name__)
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class PatientStore:
    """A store by which members find each other, and how long they look.

    Args:
        store: answers at once.
        limit: seconds for all waits together.
        may_still_come: whether no rank that is waited for is lost.
    """

    def __init__(self, store: KeyValueStore, *, limit: float, may_still_come: Callable[[], bool]) -> None:
        self._store = store
        self._deadline = time.monotonic() + limit
        self._may_still_come = may_still_come
        self.written: list[str] = []  # keys

    def set(self, key: str, value: str) -> None:
        self.written.append(key)
        self._store.set(key, value)

    def wait(self, keys: list[str]) -> list[str]:
        """-> what they hold, once all are set

        Raises:
            RuntimeError: somebody will not set one any more.
        """
        with Waiting(_logger, lambda: f"the ranks that are to set {', '.join(keys)} in the store"):
            while keys and not self._store.check(keys):
                self.check()
                time.sleep(_POLL)
        return [self._store.get(key).decode() for key in keys]

    def check(self) -> None:
        """
        Raises:
            RuntimeError: there is nothing left to wait for.
        """
        if not self._may_still_come() or time.monotonic() > self._deadline:
            raise RuntimeError("another rank did not come to build its links")


class _Card(NamedTuple):
    """What a member says in the store: where it listens, what it asks for there, and what it will answer."""

    host: str
    port: int
    asked: bytes
    promised: bytes

    @staticmethod
    def read(key: str, said: str) -> "_Card":
        """
        Raises:
            RuntimeError: it is malformed.
        """
        try:
            host, port, asked, promised = said.split(" ")
            card = _Card(str(ipaddress.ip_address(host)), int(port), *map(bytes.fromhex, (asked, promised)))
            if 0 < card.port < 65536 and len(card.asked) == len(card.promised) == _TOKEN:
                return card
        except ValueError:
            pass
        raise RuntimeError(
            f"{key} in the store must hold an IP address, a port and two tokens of {_TOKEN} bytes, got "
            f"{said[:80]!r} ({len(said):,} characters): somebody else writes to the store"
        )


def link(store: PatientStore, name: str, member: int, size: int, *, address: str = "") -> TcpLinks:
    """Connect all members of a group with each other; all do it at once.

    Args:
        store: by which they find each other.
        name: of these links, and of no others that were ever built.
        member: this one, of 0 … size−1.
        address: by which the others reach this machine; by default that of its name, or that of the interface
            that GLOO_SOCKET_IFNAME names.

    Raises:
        RuntimeError: a member was lost or can't be reached, or this machine can't listen there.
    """
    try:
        return TcpLinks(name, _connections(store, name, member, size, address))
    except OSError as error:  # a member that was lost has hung up, too
        raise RuntimeError(f"links to other ranks: {error}") from error


def link_ranks(store: Any, name: str, rank: int, world: int, *, limit: float, address: str = "") -> Mesh:
    """`link` for all ranks of a run, before they have heartbeats.

    Args:
        store: torch's, or a `RemoteStore`.
        limit: seconds for all of them to come.

    Raises:
        TransportError: a rank did not come, or can't be reached.
    """
    if world == 1:
        return NoLinks()
    try:
        client = StoreClient(store, limit=_ANSWER)
        try:
            by = PatientStore(client, limit=limit, may_still_come=lambda: True)
            return link(by, name, rank, world, address=address)
        finally:
            client.close()
    except RuntimeError as error:
        raise TransportError(f"linking {world} ranks: {first_line(error)}", lasting=True) from error


def _connections(
    store: PatientStore, name: str, member: int, size: int, address: str
) -> dict[int, socket.socket]:
    with ExitStack() as opened:
        listener = opened.enter_context(_listener(address))
        host, port = listener.getsockname()[:2]
        asked, promised = os.urandom(_TOKEN), os.urandom(_TOKEN)
        store.set(f"{name}/{member}", f"{host} {port} {asked.hex()} {promised.hex()}")
        keys = [f"{name}/{other}" for other in range(member)]
        cards = [_Card.read(*one) for one in zip(keys, store.wait(keys), strict=True)]
        ends: dict[int, socket.socket] = {}
        for other, end in _departures(cards, store):
            ends[other] = opened.enter_context(end)
            _write(end, cards[other].asked + _MEMBER.pack(member), store)
        for other, end in _arrivals(listener, asked, range(member + 1, size), store):
            ends[other] = opened.enter_context(end)
            _write(end, promised, store)
        for other, card in enumerate(cards):
            with Waiting(_logger, lambda other=other: f"an answer of {_listed([other])}"):
                answer = _read(ends[other], _TOKEN, store)
            if answer != card.promised:
                raise RuntimeError(f"what listens at the address of member {other} is not that member")
        listener.close()
        opened.pop_all()
        return ends


def _listener(address: str) -> socket.socket:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface:
        address = _address_of(interface)
    failed: list[str] = []
    for host in [address] if address else [socket.gethostname(), "127.0.0.1"]:
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        except OSError as error:
            failed.append(f"{host} ({error})")
            continue
        for family, _, _, _, at in found:
            try:
                return socket.create_server(cast(tuple[str, int], at), family=family, backlog=1024)
            except OSError as error:
                failed.append(f"{at[0]} ({error})")
    raise OSError(f"can't listen at {' or '.join(failed)}")


def _address_of(interface: str) -> str:
    """Raises: OSError: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, _, _, scope, _, name = line.split()
            if (name, scope) == (interface, "00"):  # one that is not of this link only
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    raise OSError(f"GLOO_SOCKET_IFNAME: interface {interface!r} has no address")


def _connecting(card: _Card) -> socket.socket:
    end = socket.socket(socket.AF_INET6 if ":" in card.host else socket.AF_INET, socket.SOCK_STREAM)
    end.setblocking(False)
    end.connect_ex((card.host, card.port))  # what comes of it is asked for later
    return end


def _departures(cards: Sequence[_Card], store: PatientStore) -> Iterator[tuple[int, socket.socket]]:
    """Connections to the members that listen there, as each is made. They are tried again and again: a try
    that fails may say little."""
    missing = dict.fromkeys(range(len(cards)), "it does not answer")
    with _selector() as selector, Waiting(_logger, lambda: f"connections to {_listed(missing)}"):
        for other, card in enumerate(cards):
            selector.register(_connecting(card), selectors.EVENT_WRITE, other)
        while missing:
            try:
                store.check()
            except RuntimeError as error:
                other = min(missing)
                where = f"{cards[other].host}:{cards[other].port}"
                raise RuntimeError(f"{error}: it listens at {where}, and {missing[other]}") from error
            for key, _ in selector.select(_POLL):
                end, other = cast(socket.socket, key.fileobj), cast(int, key.data)
                selector.unregister(end)
                code = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not code and _is_connected(end):
                    del missing[other]
                    yield other, end
                    continue
                end.close()
                missing[other] = os.strerror(code or errno.EHOSTUNREACH)
                time.sleep(_POLL)
                selector.register(_connecting(cards[other]), selectors.EVENT_WRITE, other)


def _is_connected(end: socket.socket) -> bool:
    """What fails at once leaves no error behind."""
    try:
        end.getpeername()
    except OSError:
        return False
    return True


def _arrivals(
    listener: socket.socket, asked: bytes, members: range, store: PatientStore
) -> Iterator[tuple[int, socket.socket]]:
    """Members that connect and prove it. Others are hung up on. Those that say nothing hold up nobody: there
    are so many of them at most, and the one that came first goes first."""
    missing = set(members)
    said: dict[socket.socket, bytes] = {}  # by those who have not said all
    listener.setblocking(False)
    with _selector() as selector, Waiting(_logger, lambda: f"connections of {_listed(missing)}"):
        selector.register(listener, selectors.EVENT_READ)

        def take(end: socket.socket) -> bytes:
            selector.unregister(end)
            return said.pop(end)

        while missing:
            store.check()
            is_full = False
            for key, _ in selector.select(_POLL):
                end = cast(socket.socket, key.fileobj)
                if end is listener:
                    try:
                        end, _ = listener.accept()
                    except OSError as error:  # whoever came may be gone
                        is_full = error.errno in _NO_ROOM
                        continue
                    end.setblocking(False)
                    selector.register(end, selectors.EVENT_READ)
                    said[end] = b""
                    continue
                try:
                    heard = end.recv(_TOKEN + _MEMBER.size - len(said[end]))
                except BlockingIOError:
                    continue
                except OSError:
                    heard = b""
                said[end] += heard
                if heard and len(said[end]) < _TOKEN + _MEMBER.size:
                    continue
                hello = take(end)
                (member,) = _MEMBER.unpack(hello[_TOKEN:]) if heard else (-1,)
                if member in missing and hmac.compare_digest(hello[:_TOKEN], asked):
                    missing.remove(member)
                    yield member, end
                else:
                    end.close()
            if said and (is_full or len(said) > _STRANGERS + len(missing)):
                take(oldest := next(iter(said)))
                oldest.close()
            elif is_full:  # of what this process has opened elsewhere
                time.sleep(_POLL)


def _listed(members: Iterable[int]) -> str:
    return f"members {', '.join(map(str, sorted(members)))} of these links"


def _write(end: socket.socket, data: bytes, store: PatientStore) -> None:
    while data:
        _until(end, selectors.EVENT_WRITE, store)
        with suppress(BlockingIOError):
            data = data[end.send(data) :]


def _read(end: socket.socket, size: int, store: PatientStore) -> bytes:
    data = b""
    while len(data) < size:
        _until(end, selectors.EVENT_READ, store)
        with suppress(BlockingIOError):
            more = end.recv(size - len(data))
            if not more:
                raise RuntimeError("another rank closed its new connection")
            data += more
    return data


def _until(end: socket.socket, event: int, store: PatientStore) -> None:
    with selectors.PollSelector() as selector:
        selector.register(end, event)
        while not selector.select(_POLL):
            store.check()


@contextmanager
def _selector() -> Iterator[selectors.PollSelector]:
    """It needs no descriptor of its own. At its end it closes what is still registered."""
    with selectors.PollSelector() as selector:
        try:
            yield selector
        finally:
            for key in list(selector.get_map().values()):
                cast(socket.socket, key.fileobj).close()
