"""What members tell each other in a store before there are connections between them."""

import ipaddress
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from ..coordination.store_client import KeyValueStore
from ..logs import Waiting

TOKEN = 16  # bytes
_POLL = 0.01  # seconds
_logger = logging.getLogger(__name__)


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

    def refuse(self, key: str) -> None:
        """
        Raises:
            RuntimeError: what this key holds, if it is set.
        """
        if self._store.check([key]):
            raise RuntimeError(self._store.get(key).decode())

    def check(self) -> None:
        """
        Raises:
            RuntimeError: there is nothing left to wait for.
        """
        if not self._may_still_come() or time.monotonic() > self._deadline:
            raise RuntimeError("another rank did not come to build its links")


class Card(NamedTuple):
    """What a member says in the store: where it listens, what it asks for there, and what it will answer."""

    host: str
    port: int
    asked: bytes
    promised: bytes

    @staticmethod
    def read(key: str, said: str) -> "Card":
        """
        Raises:
            RuntimeError: it is malformed.
        """
        try:
            host, port, asked, promised = said.split(" ")
            card = Card(str(ipaddress.ip_address(host)), int(port), *map(bytes.fromhex, (asked, promised)))
            if 0 < card.port < 65536 and len(card.asked) == len(card.promised) == TOKEN:
                return card
        except ValueError:
            pass
        raise RuntimeError(
            f"{key} in the store must hold an IP address, a port and two tokens of {TOKEN} bytes, got "
            f"{said[:80]!r} ({len(said):,} characters): somebody else writes to the store"
        )
