"""What can go wrong in a round, by name. A wrong argument is a ValueError, as in torch."""

from collections.abc import Iterator
from contextlib import contextmanager

# What a rank tells those who wait for it, and from which they know what to do.
PROGRAM_ENDED = "its program has ended, or dropped its optimizer"
BUILD_ANEW = "build Sites and optimizer anew here, too"
# What to do about a TransportError.
START_AGAIN = "Start all sites again"
SAME_STEPS = (
    "If its training was over, give all sites the same max_steps; if it failed, see its own error, and "
    "restart all sites from their last checkpoint"
)


def first_line(error: BaseException) -> str:
    """What torch says, without its stack and its advice."""
    return str(error).strip().partition("\n")[0].partition(". This is typically")[0]


def seconds(duration: float) -> str:
    """As a person says it: "5 s" for 4.9998."""
    return f"{duration:.0f} s" if duration >= 100 else f"{duration:.3g} s"


class LocoError(RuntimeError):
    """Base of all errors of a round. Unless it says otherwise the state is what it was before the round."""


class AgreementError(LocoError):
    """The sites were built with different parameters or settings."""


class ReplicaError(LocoError):
    """The sites (or the ranks of one site) no longer hold the same bits, or are in different rounds."""


class NonFiniteError(LocoError):
    """An update holds an infinity or a NaN; nothing was sent."""


class WireError(LocoError):
    """A message does not follow the wire format, or is not of this run."""


class AuthenticationError(LocoError):
    """A message is not from who it says, or was changed on its way."""


class TransportError(LocoError):
    """The network failed, or a peer did not answer in time.

    Attributes:
        lasting: a repeat at once would not mend it: a rank is dead, or has been waited for as long as was
            allowed. Otherwise links were lost between ranks that live, as far as is known.
        has_remedy: its text says what to do.
    """

    def __init__(self, text: str, *, lasting: bool = False, has_remedy: bool = False) -> None:
        super().__init__(text)
        self.lasting = lasting
        self.has_remedy = has_remedy

    def advise(self, remedy: str, if_ended: str = "") -> None:
        """Have the text end with what to do, unless it says so. Ranks that quote this error to others do it
        before: each user reads one remedy, that of the call that failed.

        Args:
            if_ended: instead, if a site is missed because its program has ended.
        """
        text = str(self)
        if not self.has_remedy and BUILD_ANEW not in text:
            self.has_remedy = True
            self.args = (f"{text}. {if_ended if if_ended and PROGRAM_ENDED in text else remedy}",)


@contextmanager
def advising(remedy: str, if_ended: str = "") -> Iterator[None]:
    """Around what a user calls: a TransportError that leaves it says what to do, as `advise` has it."""
    try:
        yield
    except TransportError as error:
        error.advise(remedy, if_ended)
        raise


class PeerError(LocoError):
    """Another rank failed in the round, for a reason that only its own error knows."""


class CheckpointError(LocoError):
    """A checkpoint could not be written, or none that all ranks hold can be read, or it is another site's.
    The training's state is what it was, and so are the checkpoints that were there."""
