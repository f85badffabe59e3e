"""Connections that can be built again and again, and whose building ends when a rank is lost.

Members find each other by a store: each says where it listens. Who connects sends what the listener has
asked for in the store, and gets what the listener has promised there, so that neither takes a stranger for a
member: another machine's 127.0.0.1 is no error that a network reports.
"""

import errno
import fcntl
import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, cast

from ..coordination.store_client import KeyValueStore
from .tcp import TcpLinks

_POLL = 0.01  # seconds
_TOKEN = 16  # bytes
_MEMBER = struct.Struct("<I")
_SIOCGIFADDR = 0x8915


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
    def read(said: str) -> "_Card":
        host, port, asked, promised = said.split(" ")
        return _Card(host, int(port), bytes.fromhex(asked), bytes.fromhex(promised))


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


def _connections(
    store: PatientStore, name: str, member: int, size: int, address: str
) -> dict[int, socket.socket]:
    with ExitStack() as opened:
        listener = opened.enter_context(_listener(address))
        host, port = listener.getsockname()[:2]
        asked, promised = os.urandom(_TOKEN), os.urandom(_TOKEN)
        store.set(f"{name}/{member}", f"{host} {port} {asked.hex()} {promised.hex()}")
        cards = [_Card.read(said) for said in store.wait([f"{name}/{other}" for other in range(member)])]
        begun = [opened.enter_context(_connecting(card)) for card in cards]  # all are on their way at once
        ends: dict[int, socket.socket] = {}
        for other, (card, end) in enumerate(zip(cards, begun, strict=True)):
            ends[other] = opened.enter_context(_connected(end, card, store))
            ends[other].sendall(card.asked + _MEMBER.pack(member))
        for other, end in _arrivals(listener, asked, range(member + 1, size), store):
            ends[other] = opened.enter_context(end)
            end.sendall(promised)
        for other, card in enumerate(cards):
            if _read(ends[other], _TOKEN, store) != card.promised:
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


def _connected(end: socket.socket, card: _Card, store: PatientStore) -> socket.socket:
    """A connection to who listens there. It is tried again and again: a try that fails may say little."""
    why = "it does not answer"
    while True:
        try:
            _until(end, selectors.EVENT_WRITE, store)
            code = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not code and _is_connected(end):
                end.setblocking(True)
                return end
            why = os.strerror(code or errno.EHOSTUNREACH)
            store.check()
        except BaseException as error:
            end.close()
            if isinstance(error, RuntimeError):
                where = f"{card.host}:{card.port}"
                raise RuntimeError(f"{error}: it listens at {where}, and {why}") from error
            raise
        end.close()
        time.sleep(_POLL)
        end = _connecting(card)


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
    """Members that connect and prove it. Others are hung up on, and those that say nothing hold up nobody."""
    missing = set(members)
    with ExitStack() as opened, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        said: dict[socket.socket, bytes] = {}
        while missing:
            store.check()
            for key, _ in selector.select(_POLL):
                if key.fileobj is listener:
                    try:
                        end = opened.enter_context(listener.accept()[0])
                    except ConnectionError:  # who came is gone
                        continue
                    selector.register(end, selectors.EVENT_READ)
                    said[end] = b""
                    continue
                end = cast(socket.socket, key.fileobj)
                heard = b""
                with suppress(OSError):
                    heard = end.recv(_TOKEN + _MEMBER.size - len(said[end]))
                said[end] += heard
                if heard and len(said[end]) < _TOKEN + _MEMBER.size:
                    continue
                selector.unregister(end)
                hello = said.pop(end)
                (member,) = _MEMBER.unpack(hello[_TOKEN:]) if heard else (-1,)
                if member in missing and hmac.compare_digest(hello[:_TOKEN], asked):
                    missing.remove(member)
                    yield member, socket.socket(fileno=end.detach())
                else:
                    end.close()


def _read(end: socket.socket, size: int, store: PatientStore) -> bytes:
    data = b""
    while len(data) < size:
        _until(end, selectors.EVENT_READ, store)
        more = end.recv(size - len(data))
        if not more:
            raise RuntimeError("another rank closed its new connection")
        data += more
    return data


def _until(end: socket.socket, event: int, store: PatientStore) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(end, event)
        while not selector.select(_POLL):
            store.check()
