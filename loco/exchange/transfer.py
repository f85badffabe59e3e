"""One round's transfer of frames: what gathering and owner-reducing share."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from loco.kernels import Entries

from ..errors import NonFiniteError, WireError
from ..net.transport import PendingMessages, Transport
from ..wire.framing import Frame, Framing
from ..wire.records import FrameHeader, Kind, Status
from ..wire.refusal import Problem, unreadable
from .stream import Messages

T = TypeVar("T")


class Transfer:
    """What a rank does to frames, and what goes wrong with it.

    All messages are exchanged whatever happens here in between, since the peers wait for them: what fails
    becomes a `problem` for the vote, and a frame that can't be made is replaced by one that says so.

    Args:
        problem: what went wrong before.
        sums: where the sums of all elements are put, as FP32; may be the memory that this site's entries are
            sent from. None: they get memory of their own.
    """

    def __init__(
        self,
        across: Transport,
        framing: Framing,
        *,
        problem: Problem | None = None,
        sums: Tensor | None = None,
    ) -> None:
        self.across = across
        self.framing = framing
        self.problem = problem
        self.sums = sums
        self.missing: int | None = None  # a site that could not send all; its vote should say why
        self.seconds = 0.0  # from the first message to the last
        self._began: float | None = None

    def phase(self, what: str) -> str:
        return f"round {self.framing.round}, {what}"

    def attempt(self, do: Callable[[], T]) -> T | None:
        """None if it failed, or something before it did."""
        if self.problem is not None or self.missing is not None:
            return None
        try:
            return do()
        except NonFiniteError as error:
            self.problem = Problem(Status.OVERFLOW, seen=error)
        except Exception as error:
            self.problem = Problem(Status.FAILED, seen=error)
        return None

    def seal(self, entries: Callable[[], Entries], at: slice, number: int, kind: Kind) -> Frame:
        frame = self.attempt(lambda: self.framing.seal(entries(), at, number, kind))
        return frame or self.framing.failed(at, number, kind)

    def open(self, site: int, header: FrameHeader, body: Tensor, at: slice) -> Entries | None:
        def read() -> Entries | None:
            try:
                entries = self.framing.open(header, body, at)
            except WireError as error:
                seen = unreadable(f"round {self.framing.round}", site, error)
                self.problem = Problem(Status.UNREADABLE, site, seen)
                return None
            if entries is None:
                self.missing = site
            return entries

        return self.attempt(read)

    def post(self, streams: Sequence[tuple[Messages, Messages]], what: str) -> PendingMessages:
        self._began = self._began or time.monotonic()
        outgoing = [message for sends, _ in streams for message in sends]
        incoming = [message for _, receives in streams for message in receives]
        return self.across.post(outgoing, incoming, phase=self.phase(what))

    def wait(self, posted: PendingMessages) -> None:
        posted.wait()
        self.seconds = time.monotonic() - (self._began or 0.0)

    def verdict(self) -> Problem | None:
        """What to vote."""
        if self.problem is None and self.missing is not None:
            return Problem(Status.MISSING, self.missing)
        return self.problem
