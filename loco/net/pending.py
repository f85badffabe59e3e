"""Messages on their way: the wait for them, and what is proved and counted once they have come."""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Protocol

from ..errors import TransportError, WireError, first_line
from ..logs import Waiting
from .mesh import Parcel, Work

_logger = logging.getLogger(__name__)


class Watch(Protocol):
    """What a wait needs of its `Transport`, and what it counts there."""

    timeout: float
    sent_bytes: int
    received_bytes: int

    def vigil(self, peers: Sequence[int], *, phase: str) -> AbstractContextManager[None]: ...

    def called(self, *members: int) -> str: ...

    def not_here(self, peer: int, limit: float | None) -> str: ...

    def check_seal(self, parcel: Parcel, size: int, number: int, *, phase: str) -> None: ...


class PendingMessages:
    """Messages on their way.

    Args:
        works: of the parcels, the received ones first.
        numbers: of the received ones: which of their senders' messages each must be.

    Attributes:
        sent: bytes, with their seals.
    """

    def __init__(
        self,
        transport: Watch,
        works: Sequence[Work],
        receives: Sequence[Parcel],
        sends: Sequence[Parcel],
        numbers: Sequence[int],
        *,
        phase: str,
        may_be_shorter: bool,
    ) -> None:
        self._transport = transport
        self._works = works
        self._receives = receives
        self._numbers = numbers
        self._order = [one.member for one in (*receives, *sends)]
        self._phase = phase
        self._may_be_shorter = may_be_shorter
        self.sent = sum(one.data.numel() + _seal_bytes(one) for one in sends)

    def wait(self, limit: float | None = None, *, watching: Sequence[int] = ()) -> None:
        """
        Args:
            limit: seconds from now, the transport's timeout by default.
            watching: members on whom these messages depend, beside those who send or receive them.

        Raises:
            TransportError: a peer is dead, stopped, cut off or gone, or alive but not here in time; names it,
                the phase and the limit.
            AuthenticationError: a message is not genuine.
            WireError: a message does not fill the room for it.
        """
        if not self._works:
            return
        transport, peer = self._transport, -1
        limit = transport.timeout if limit is None else limit
        deadline = time.monotonic() + limit
        try:
            peers = sorted({*self._order, *watching})
            waiting = Waiting(_logger, lambda: f"{self._phase}: {transport.called(peer)}")
            with waiting, transport.vigil(peers, phase=self._phase):
                for k, work in enumerate(self._works):
                    peer = -1 if work.is_shared else self._order[k]
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except (RuntimeError, ValueError) as error:
            if isinstance(error, TransportError):
                raise
            # torch cuts timeouts to whole milliseconds, so a wait can end a little before the deadline.
            late = time.monotonic() >= deadline - 0.01
            who = transport.not_here(peer, limit if late else None)
            raise TransportError(f"{self._phase}: {who} ({first_line(error)})", lasting=late) from error
        received = 0
        sizes = [work.size for work in self._works[: len(self._receives)]]
        for parcel, size, number in zip(self._receives, sizes, self._numbers, strict=True):
            transport.check_seal(parcel, size, number, phase=self._phase)
            received += size + _seal_bytes(parcel)
            if size < parcel.data.numel() and not self._may_be_shorter:
                raise WireError(
                    f"{self._phase}: {transport.called(parcel.member)} sent {size:,} bytes where "
                    f"{parcel.data.numel():,} were expected: the members are not at the same point"
                )
        transport.sent_bytes += self.sent
        transport.received_bytes += received


def _seal_bytes(parcel: Parcel) -> int:
    return 0 if parcel.seal is None else parcel.seal.numel()
