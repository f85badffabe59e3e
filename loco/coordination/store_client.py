"""A store connection on which every request is answered, or given up, within a time limit.

torch's own client waits without limit if the store's host is stopped or the link to it is cut. So a thread
makes the request, and the caller waits for the thread. Nor does torch's client reconnect: a router that drops
a connection which was idle during the inner steps would cut this rank off for good.
"""

import math
import socket
import threading
import time
import weakref
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ..errors import TransportError, first_line, seconds
from .pulse.store_wire import ping, validate

_Asked = SimpleQueue["tuple[Future[Any], float, str, tuple[Any, ...]] | None"]
_PATIENT = 5.0  # seconds, for all threads to come back from the store when the program ends
_NONCE = b"\r\n\r\n"  # ends a line, so that an HTTP server answers it, too, in HTTP
_AGAIN = 60.0  # seconds until a thread that waits without end is replaced a second time


class KeyValueStore(Protocol):
    """What coordination needs of a store. torch's stores provide it; a client of etcd could.

    No request waits for a key: `get` and `multi_get` are called only for keys that exist. Every request
    raises a RuntimeError if the store does not answer.
    """

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def check(self, keys: list[str], /) -> bool:
        """Whether all of them are there."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set the key if its value is `expected`, or if it is absent and that is "" -> its value now."""
        ...

    def delete_key(self, key: str, /) -> object:
        """Delete a key that nobody asks for any more. It may be gone only later."""
        ...


class StoreClient:
    """A `KeyValueStore` over a connection of its own, for requests that the store can answer at once.

    A store serves one request of a connection at a time; requests over another connection need not wait for
    it. A request that was given up may still be carried out later, or twice, so it must be idempotent.

    Args:
        store: the process group's, or a PrefixStore over it.
        limit: seconds, after which a request raises a RuntimeError; more over a slow link.
        connect_limit: seconds for the first connection, which takes several round trips, longer where host
            names are looked up slowly, and a minute where a packet is lost four times (3 + 6 + 12 + 24 s).

    Attributes:
        store: of which this is a client.
        round_trip: seconds that the quickest request took.

    Raises:
        RuntimeError: the store's host does not answer.
    """

    def __init__(self, store: Any, *, limit: float, connect_limit: float = 120.0) -> None:
        self.store = store
        self._limit = limit
        self._replaced = -_AGAIN
        self.round_trip = math.inf
        self._start()
        try:
            self._ask("", limit=max(limit, connect_limit))
            self._ask("check", ["any"], limit=max(limit, connect_limit))
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._asked: _Asked = SimpleQueue()
        thread = threading.Thread(
            target=_answer,
            args=(self.store, self._asked),
            name="loco store client",
            daemon=True,
        )
        thread.start()
        _threads.add(thread)
        self._end = weakref.finalize(self, _hang_up, self._asked, thread)

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._ask("get", key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are there."""
        return self._ask("multi_get", keys)

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._ask("compare_set", key, expected_value, desired_value)

    def list_keys(self) -> list[str]:
        """All of the store's, as long as it is no PrefixStore."""
        return self._ask("list_keys")

    def delete_key(self, key: str) -> None:
        """Returns before the store answers; if it does not, the key stays."""
        self._asked.put((Future(), self._limit, "delete_key", (key,)))

    def close(self) -> None:
        """End the thread, and with it the connection."""
        self._end()

    def _ask(self, question: str, *args: Any, limit: float | None = None) -> Any:
        if limit is None:  # a new connection, and a request over it, take some five round trips
            limit = max(self._limit, 6 * self.round_trip)
        answer: Future[Any] = Future()
        began = time.monotonic()
        self._asked.put((answer, limit, question, args))
        try:
            found = answer.result(limit)
        except TimeoutError:
            answer.cancel()  # if its turn has not come yet
            self._replace()
            raise RuntimeError(f"no answer within {seconds(limit)}") from None
        if question not in ("", "set"):  # which waits for no answer
            self.round_trip = min(self.round_trip, time.monotonic() - began)
        return found

    def _replace(self) -> None:
        """Give up a thread that may never get an answer, and start another one."""
        now = time.monotonic()
        if now - self._replaced >= _AGAIN:
            self._replaced = now
            self._end.detach()
            self._asked.put(None)
            self._start()


class RemoteStore:
    """A store that another process hosts. The thread of a `StoreClient` connects to it, since torch waits
    without limit for a host that is stopped.

    Args:
        address: host:port.
        prefix: of all keys.
        timeout: seconds to connect.
        hosted_by: the site whose process that is, for errors; "" if it is not known.
    """

    def __init__(self, address: str, prefix: str, timeout: float, *, hosted_by: str = "") -> None:
        self.host, self.port = host_and_port(address)
        self.address, self.hosted_by = address, hosted_by
        self.prefix = prefix
        self._timeout = timeout

    def clone(self) -> PrefixStore:
        # torch tries a host that refuses until its time is over, and logs pages about it.
        check_store(self.host, self.port, self._timeout)
        limit = timedelta(seconds=self._timeout)
        return PrefixStore(self.prefix, TCPStore(self.host, self.port, is_master=False, timeout=limit))


def no_store(phase: str, store: Any, error: RuntimeError) -> TransportError:
    """For who asked this store, and had this instead of an answer."""
    why = whereabouts(store, first_line(error))
    return TransportError(f"{phase}: the sites' store does not answer ({why})", lasting=True)


def whereabouts(store: Any, why: str) -> str:
    """Who hosts a store that does not answer, and where, as far as that is known; and why it does not."""
    while isinstance(store, StoreClient | PrefixStore):
        store = store.store if isinstance(store, StoreClient) else store.underlying_store
    if isinstance(store, TCPStore):
        address, host = f"{store.host}:{store.port}", "torchrun's first node, or rank 0,"
    elif isinstance(store, RemoteStore):
        address, host = store.address, store.hosted_by and f"site {store.hosted_by}"
    else:
        return why
    at = "" if address in why else f" at {address}"
    if host:
        return f"{host} hosts it{at}: {why}"
    return f"it is{at}: {why}" if at else why


def host_and_port(address: str) -> tuple[str, int]:
    """
    Raises:
        ValueError: it is not host:port.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"an address is host:port, such as 10.0.0.1:29510; got {address!r}")
    return host.strip("[]"), int(port)


def _answer(store: Any, asked: _Asked) -> None:
    connection: Any = None
    while (one := asked.get()) is not None:
        answer, limit, question, args = one  # no question: only connect
        if not answer.set_running_or_notify_cancel():
            continue
        try:
            try:
                connection = connection or _connected(store, limit)
                found = getattr(connection, question)(*args) if question else None
            except dist.DistNetworkError:
                connection = None
                connection = _connected(store, limit)
                found = getattr(connection, question)(*args) if question else None
            answer.set_result(found)
        except BaseException as error:
            answer.set_exception(error)
        # An error's traceback holds the caller, and with it the client that is to end once nobody holds it.
        del one, answer, question, args


def _connected(store: Any, limit: float) -> Any:
    """A new connection. torch's own would try for the process group's timeout, and log each time."""
    at = store
    while isinstance(at, PrefixStore):
        at = at.underlying_store
    if isinstance(at, TCPStore):
        check_reachable(at.host, at.port, limit)
    return store.clone()


def check_reachable(host: str, port: int, limit: float) -> None:
    """
    Raises:
        RuntimeError: nobody listens there.
    """
    _connection(host, port, limit).close()


def address_towards(host: str, port: int, limit: float) -> str:
    """This machine's address on the way there: by it the others who go there reach this machine, too.

    Raises:
        RuntimeError: nobody listens there.
    """
    with _connection(host, port, limit) as connection:
        return connection.getsockname()[0]


def check_store(host: str, port: int, limit: float) -> None:
    """
    Raises:
        RuntimeError: no store answers there; one may do so later.
        TransportError: another program does.
    """
    answer = b""
    with _connection(host, port, limit) as connection:
        try:
            connection.sendall(validate() + ping(_NONCE))
            while len(answer) < len(_NONCE) and (more := connection.recv(64)):
                answer += more
        except OSError as error:
            raise RuntimeError(
                f"what listens at {host}:{port} does not answer a store's ping: {error}"
            ) from error
    if not _NONCE.startswith(answer):
        raise TransportError(
            f"what listens at {host}:{port} is no store of loco's: it says {answer!r}. Is another program "
            f"using the port? Choose another one (LOCO_AT)",
            lasting=True,
            has_remedy=True,
        )
    if answer != _NONCE:
        raise RuntimeError(f"what listens at {host}:{port} closes the connection and does not answer")


def _connection(host: str, port: int, limit: float) -> socket.socket:
    try:
        return socket.create_connection((host, port), limit)
    except OSError as error:
        raise RuntimeError(f"{host}:{port} can't be reached: {error}") from error


def _hang_up(asked: _Asked, thread: threading.Thread) -> None:
    asked.put(None)
    if thread is not threading.current_thread():
        thread.join(0.5)


def _await_threads() -> None:
    """At the interpreter's exit, which must find no thread inside the store.

    One that returns from torch's C++ while the interpreter ends aborts the process, and a launcher then
    starts again what is over.
    """
    deadline = time.monotonic() + _PATIENT
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


_threads = weakref.WeakSet[threading.Thread]()  # also those that were given up, or whose client is gone
weakref.finalize(_threads, _await_threads)  # of all that this module makes the first, so called last
