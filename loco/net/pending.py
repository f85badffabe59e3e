"""Messages on their way: the wait for them, and what is proved and counted once they have come."""

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ..errors import TransportError, first_line
from ..logs import Waiting
from .mesh import Work

if TYPE_CHECKING:
    from .transport import Transport

_logger = logging.getLogger(__name__)


class SealedMessage(NamedTuple):
    """A message on its way to this rank, and what will prove that it is the expected one."""

    sender: int
    message: Tensor
    seal: Tensor
    number: int


class PendingMessages:
    """Messages on their way."""

    def __init__(
        self,
        transport: "Transport",
        works: Sequence[Work],
        order: list[int],
        sent: int,
        received: int,
        sealed: list[SealedMessage],
        phase: str,
    ) -> None:
        self._transport = transport
        self._works = works
        self._order = order
        self._sealed = sealed
        self._phase = phase
        self.sent, self.received = sent, received  # bytes

    def wait(self, limit: float | None = None, *, watching: Sequence[int] = ()) -> None:
        """
        Args:
            limit: seconds from now, the transport's timeout by default.
            watching: members on whom these messages depend, beside those who send or receive them.

        Raises:
            TransportError: a peer is dead, stopped, cut off or gone, or alive but not here in time; names it,
                the phase and the limit.
            AuthenticationError: a message is not genuine.
        """
        if not self._works:
            return
        transport, peer = self._transport, -1
        limit = transport.timeout if limit is None else limit
        deadline = time.monotonic() + limit

        def all_of_them() -> None:
            nonlocal peer
            for k, work in enumerate(self._works):
                peer = self._order[k] if len(self._works) == len(self._order) else -1
                left = max(deadline - time.monotonic(), 0.001)
                work.wait(timedelta(seconds=left))

        def missing() -> str:
            return (
                f"{self._phase}: {transport.member} {peer}" if peer >= 0 else f"{self._phase}: its messages"
            )

        try:
            peers = sorted({*self._order, *watching})
            with Waiting(_logger, missing), transport.vigil(peers, phase=self._phase) as alarm:
                transport.await_all(all_of_them, alarm)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, TransportError):
                raise
            # torch cuts timeouts to whole milliseconds, so a wait can end a little before the deadline.
            late = time.monotonic() >= deadline - 0.01
            who = transport.not_here(peer, limit if late else None)
            raise TransportError(f"{self._phase}: {who} ({first_line(error)})", lasting=late) from error
        transport.check_seals(self._sealed, phase=self._phase)
        transport.sent_bytes += self.sent
        transport.received_bytes += self.received
