"""Connections that can be built again and again, and whose building ends when a rank is lost.

Members find each other by a store: each publishes there the address at which it listens, and two tokens. The
connecting side sends the first token, the listener answers with the second one, so that neither takes a
stranger for a member: another machine's 127.0.0.1 is no error that a network reports.

Nothing here waits without a limit: all sockets are non-blocking, and every wait asks `PatientStore.check`.
"""

import errno
import hmac
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

from ..coordination.store_client import StoreClient
from ..errors import TransportError, first_line
from ..logs import SAY_SOON, Waiting
from .introductions import TOKEN, Card, PatientStore
from .listening import ANYWHERE, Endpoint
from .mesh import Mesh, NoLinks
from .tcp import TcpLinks

_POLL = 0.01  # seconds
_REACHED = 8.0  # seconds in which a member that listens has been reached, or a firewall is in the way
_ASKS = 0.5  # seconds between two looks at whether this one can't be reached
_ANSWER = 60.0  # seconds that a store may take at a start, when all ranks ask it at once
_MEMBER = struct.Struct("<I")
_STRANGERS = 64  # connections that have not said who they are, beside one for each member that is missing
_logger = logging.getLogger(__name__)
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def link(
    store: PatientStore,
    name: str,
    member: int,
    size: int,
    *,
    endpoint: Endpoint = ANYWHERE,
    called: Callable[[int], str] = "member {}".format,
) -> TcpLinks:
    """Connect all members of a group with each other; all do it at once.

    Args:
        store: by which they find each other.
        name: of these links, and of no others that were ever built.
        member: this one, of 0 … size−1.
        endpoint: where this one listens; by default at any port of the address of this machine's name.
        called: names members in errors.

    Raises:
        RuntimeError: a member was lost or can't be reached, or this machine can't listen there.
    """
    try:
        return TcpLinks(name, _connections(store, name, member, size, endpoint, called))
    except OSError as error:  # a member that was lost has hung up, too
        raise RuntimeError(f"links to other ranks: {error}") from error


def link_ranks(
    store: Any,
    name: str,
    rank: int,
    world: int,
    *,
    limit: float,
    endpoint: Endpoint,
    called: Callable[[int], str] = "rank {}".format,
) -> Mesh:
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
            return link(by, name, rank, world, endpoint=endpoint, called=called)
        finally:
            client.close()
    except RuntimeError as error:
        raise TransportError(f"linking {world} ranks: {first_line(error)}", lasting=True) from error


def _connections(
    store: PatientStore, name: str, member: int, size: int, endpoint: Endpoint, called: Callable[[int], str]
) -> dict[int, socket.socket]:
    def listed(members: Iterable[int]) -> str:
        return ", ".join(called(other) for other in sorted(members))

    def give_up(other: int, why: str) -> None:
        """Tell it, which waits for this member."""
        card = cards[other]
        said = (
            f"{called(member)} can't reach {called(other)} at {card.host}:{card.port} ({why}): open that "
            f"port to {called(member)}. LOCO_PORTS=29511-29520 chooses the ports that a machine uses, "
            f"LOCO_ADVERTISE the address that others are told"
        )
        store.set(f"{name}/{other}/unreachable", said)
        raise RuntimeError(said)

    with ExitStack() as opened:
        listener, host, port = endpoint.listen()
        opened.enter_context(listener)
        asked, promised = os.urandom(TOKEN), os.urandom(TOKEN)
        store.set(f"{name}/{member}", f"{host} {port} {asked.hex()} {promised.hex()}")
        keys = [f"{name}/{other}" for other in range(member)]
        cards = [Card.read(*one) for one in zip(keys, store.wait(keys), strict=True)]
        ends: dict[int, socket.socket] = {}
        for other, end in _departures(cards, store, listed, give_up):
            ends[other] = opened.enter_context(end)
            _write(end, cards[other].asked + _MEMBER.pack(member), store)
        told = f"{name}/{member}/unreachable"
        for other, end in _arrivals(listener, asked, range(member + 1, size), store, listed, told):
            ends[other] = opened.enter_context(end)
            _write(end, promised, store)
        for other, card in enumerate(cards):
            with Waiting(_logger, lambda other=other: f"an answer of {called(other)}"):
                answer = _read(ends[other], TOKEN, store)
            if answer != card.promised:
                raise RuntimeError(
                    f"what listens at {card.host}:{card.port} is not {called(other)}: it has another token"
                )
        listener.close()
        opened.pop_all()
        return ends


def _connecting(card: Card) -> socket.socket:
    end = socket.socket(socket.AF_INET6 if ":" in card.host else socket.AF_INET, socket.SOCK_STREAM)
    end.setblocking(False)
    end.connect_ex((card.host, card.port))  # what comes of it is asked for later
    return end


def _departures(
    cards: Sequence[Card],
    store: PatientStore,
    listed: Callable[[Iterable[int]], str],
    give_up: Callable[[int, str], None],
) -> Iterator[tuple[int, socket.socket]]:
    """Connections to the members that listen there, as each is made. They are tried again and again for a
    while: a try that fails may say little."""
    deadline = time.monotonic() + _REACHED
    missing = dict.fromkeys(range(len(cards)), "it does not answer")
    with (
        _selector() as selector,
        Waiting(_logger, lambda: f"connections to {listed(missing)}", first=SAY_SOON),
    ):
        for other, card in enumerate(cards):
            selector.register(_connecting(card), selectors.EVENT_WRITE, other)
        while missing:
            try:
                store.check()
            except RuntimeError as error:
                other = min(missing)
                where = f"{cards[other].host}:{cards[other].port}"
                raise RuntimeError(f"{error}: it listens at {where}, and {missing[other]}") from error
            if time.monotonic() > deadline:
                give_up(other := min(missing), missing[other])
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
    listener: socket.socket,
    asked: bytes,
    members: range,
    store: PatientStore,
    listed: Callable[[Iterable[int]], str],
    told: str,
) -> Iterator[tuple[int, socket.socket]]:
    """Members that connect and prove it. Others are hung up on. Those that say nothing hold up nobody: there
    are so many of them at most, and the one that came first goes first. `told`: the key of the store under
    which a member says that it can't reach this one."""
    missing = set(members)
    said: dict[socket.socket, bytes] = {}  # by those who have not said all
    listener.setblocking(False)
    with (
        _selector() as selector,
        Waiting(_logger, lambda: f"connections of {listed(missing)}", first=SAY_SOON),
    ):
        selector.register(listener, selectors.EVENT_READ)

        def take(end: socket.socket) -> bytes:
            selector.unregister(end)
            return said.pop(end)

        asks = time.monotonic() + _ASKS
        while missing:
            store.check()
            if time.monotonic() > asks:
                store.refuse(told)
                asks = time.monotonic() + _ASKS
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
                    heard = end.recv(TOKEN + _MEMBER.size - len(said[end]))
                except BlockingIOError:
                    continue
                except OSError:
                    heard = b""
                said[end] += heard
                if heard and len(said[end]) < TOKEN + _MEMBER.size:
                    continue
                hello = take(end)
                (member,) = _MEMBER.unpack(hello[TOKEN:]) if heard else (-1,)
                if member in missing and hmac.compare_digest(hello[:TOKEN], asked):
                    missing.remove(member)
                    yield member, end
                else:
                    end.close()
            if said and (is_full or len(said) > _STRANGERS + len(missing)):
                take(oldest := next(iter(said)))
                oldest.close()
            elif is_full:  # of what this process has opened elsewhere
                time.sleep(_POLL)


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
