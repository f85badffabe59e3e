"""One round's transfer of frames: what gathering and owner-reducing share."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from loco import kernels
from loco.kernels import Entries

from ..errors import NonFiniteError, WireError
from ..net.pending import PendingMessages
from ..net.transport import Transport
from ..wire.framing import Frame, Framing, slices_of
from ..wire.records import FrameHeader, Kind, Status
from ..wire.refusal import Problem, overflow_text, unreadable
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
        margin: F·Σ c. Sums of at most this many ulp(θ) stay with their owner. None: none do.

    Attributes:
        kept: such sums of this site's slice, as entries of the whole vector.
    """

    def __init__(
        self,
        across: Transport,
        framing: Framing,
        *,
        problem: Problem | None = None,
        sums: Tensor | None = None,
        margin: float | None = None,
    ) -> None:
        self.across = across
        self.framing = framing
        self.problem = problem
        self.sums = sums
        self.margin = margin
        self.kept: Entries | None = None
        self.missing: int | None = None  # a site that could not send all; its vote should say why

    def phase(self, what: str) -> str:
        return f"round {self.framing.round}, {what}"

    def total(self, contributions: Sequence[Entries], at: slice) -> tuple[Entries, Entries | None]:
        """The sums of some elements: those for all sites, and those that their owner keeps, if any are kept.

        Raises:
            NonFiniteError: finite values add up to infinity.
        """
        if self.margin is None:
            room = None if self.sums is None else self.sums[at]
            sums, kept = kernels.add_up(contributions, at.stop - at.start, room), None
        else:
            anchor = self.framing.known.anchor[at]
            sums, kept = kernels.add_and_split(contributions, anchor, self.margin)
        if not all(kernels.all_finite(part.values) for part in (sums, kept) if part is not None):
            raise NonFiniteError(overflow_text(self.framing.round))
        return sums, kept

    def gathered(self, contributions: list[Entries], numel: int) -> list[Entries]:
        """All sites' entries as they came; or their sums, if small ones stay with their owners."""
        if self.margin is None or not numel:
            return contributions
        sums, kept = self.total(contributions, slice(0, numel))
        if kept is not None:
            self.keep([kept.cut(self._mine(numel))], numel)
        return [sums]

    def keep(self, parts: Sequence[Entries], numel: int) -> None:
        """The sums that stay here, of this site's slice, part by part."""
        self.kept = Entries.join(parts).placed(self._mine(numel), numel)

    def _mine(self, numel: int) -> slice:
        return slices_of(numel, self.across.size)[self.across.rank]

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
                seen = unreadable(f"round {self.framing.round}", self.across.called(site), error)
                self.problem = Problem(Status.UNREADABLE, site, seen)
                return None
            if entries is None:
                self.missing = site
            return entries

        return self.attempt(read)

    def post(self, messages: tuple[Messages, Messages], what: str) -> PendingMessages:
        """Begin to send, and to receive."""
        return self.across.post(*messages, phase=self.phase(what), may_be_shorter=True)

    def wait(self, posted: PendingMessages) -> None:
        posted.wait()

    def verdict(self) -> Problem | None:
        """What to vote."""
        if self.problem is None and self.missing is not None:
            return Problem(Status.MISSING, self.missing)
        return self.problem
