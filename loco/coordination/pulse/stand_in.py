"""A C thread that sends a rank's next heartbeats when the Python thread can't run.

A program that pickles for seconds, or adds up a long range, holds Python's global interpreter lock, and no
other Python thread runs meanwhile. The program is alive, so its heartbeats must go on. In a process that is
stopped or killed no thread runs, so its heartbeats end.
"""

import socket
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from loco.kernels.cpu.build import BuildError
from loco.kernels.cpu.timed_sends import TimedSends

from ..store_client import RemoteStore, StoreClient
from .store_wire import connected, drain, is_open, set_request

PREPARED = 120  # heartbeats
STEP = 3  # beats between two of them: half of what makes a rank silent
_AGAIN = 10.0  # seconds until a connection is tried again

Beats = Callable[[int], str]  # what the store holds for a heartbeat of this count


class StandIn:
    """Heartbeats of one rank, for `PREPARED` · `STEP` beats' time in which its Python thread sends none.

    Args:
        store: torch's, or a `RemoteStore`.
        client: of the same store: it tells whether that understands what the thread sends.
        every: seconds between two beats.

    Attributes:
        problem: why there is none, so that heartbeats need the interpreter lock; "" if there is one.
    """

    def __init__(self, store: Any, client: StoreClient, every: float) -> None:
        self.problem = ""
        self._store: Any = store
        self._client, self._every = client, every
        while isinstance(self._store, PrefixStore):
            self._store = self._store.underlying_store
        self._end: socket.socket | None = None
        self._failed = -_AGAIN
        self._full_key = ""  # as torch's clients send it
        self._sends: TimedSends | None = None
        if not isinstance(self._store, TCPStore | RemoteStore):
            self.problem = f"the sites' store is a {type(self._store).__name__} and no TCPStore"
            return
        try:
            self._sends = TimedSends()
        except BuildError as error:
            self.problem = str(error)

    def renew(self, latest: int, beat: Beats) -> int:
        """Prepare the beats after the next one, and send none of them for a while.

        Args:
            latest: count of this rank's latest beat, as far as its own thread knows.

        Returns:
            The same, with those that were sent meanwhile; all of these have arrived.
        """
        if self._sends is None or self._end is None:
            return latest
        seconds, known, expected, sent = STEP * self._every, latest, -1, 0
        while sent != expected:  # it may send one while the next ones are written
            expected = sent
            known = latest + sent
            counts = range(known + 2, known + 2 + PREPARED)  # the next one is Python's own
            messages = [set_request(self._full_key, beat(count)) for count in counts]
            sent = self._sends.prepare(
                self._end.fileno(), messages, first=seconds, every=seconds, expected=expected
            )
        if sent:
            try:
                drain(self._end, 2 * seconds)  # the thread sends meanwhile
            except OSError:
                known += 1 + self._disconnect()
        return known

    def reconnect(self, key: str, latest: int, beat: Beats) -> int:
        """Connect, where that is needed and its time has come.

        Args:
            key: of this rank's heartbeats, which the store has.
            latest: as of `renew`.

        Returns:
            As `renew`: a beat proves that the store understands what is sent.
        """
        now = time.monotonic()
        if self._end is not None and not is_open(self._end):
            latest += self._disconnect()
        if self._sends is None or self._end is not None or now - self._failed < _AGAIN:
            return latest
        try:
            self._full_key = self._full_key or self._find(key)
            end = connected(self._store.host, self._store.port, 2 * self._every)
        except (OSError, RuntimeError):
            self._failed = now
            return latest
        try:
            value = beat(latest + 1)
            end.sendall(set_request(self._full_key, value))
            drain(end, 2 * self._every)
            if self._client.get(key) == value.encode():
                self._end = end
            else:
                self.problem = "torch's TCPStore does not understand what this version of loco sends"
                self.close()
        except (OSError, RuntimeError):
            pass
        if self._end is None:
            self._failed = now
            end.close()
        self.renew(latest + 1, beat)
        return latest + 2  # as if Python had sent the one that was left for it

    def close(self) -> int:
        """End the thread: no beat is sent from here any more -> how many were, since the last `renew`."""
        sent = self._disconnect()
        if self._sends is not None:
            self._sends.close()
            self._sends = None
        return sent

    def _disconnect(self) -> int:
        """-> how many beats the thread has sent since it was given any."""
        sent = 0 if self._sends is None else self._sends.clear()
        if self._end is not None:
            self._end.close()
            self._end = None
        return sent

    def _find(self, key: str) -> str:
        """
        Raises:
            RuntimeError: the store does not answer, or has several such keys.
        """
        if isinstance(self._store, RemoteStore):
            return f"/{self._store.prefix}/{key}"
        # torch does not tell a store's prefix; its keys without one do.
        client = StoreClient(self._store, limit=2 * self._every, connect_limit=2 * self._every)
        try:
            found = [one for one in client.list_keys() if one == key or one.endswith(f"/{key}")]
        finally:
            client.close()
        if len(found) != 1:
            raise RuntimeError(f"the sites' store has {len(found)} keys that end with {key}")
        return f"/{found[0]}"
