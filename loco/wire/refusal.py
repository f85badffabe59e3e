"""Why a round can't go on."""

from dataclasses import dataclass

from ..errors import WireError
from .records import Status


@dataclass(frozen=True)
class Problem:
    """What travels to the other sites, and what this rank saw of it."""

    status: Status
    subject: int = 0
    seen: Exception | None = None


class Refused(Exception):  # noqa: N818  (it carries an error, and never leaves the library)
    """All ranks refuse the round together, so that all of them are ready to repeat it.

    failed_here: because a rank of this site could not take part.
    """

    def __init__(self, error: Exception, *, failed_here: bool) -> None:
        super().__init__(error)
        self.error = error
        self.failed_here = failed_here


def unreadable(phase: str, sender: str, error: WireError) -> WireError:
    return WireError(f"{phase}: the message of {sender} can't be read: {error}")


def overflow_text(round: int) -> str:
    """The same whether a rank saw the sum itself or was told of it."""
    return (
        f"round {round}: the sites' updates add up to an infinite one. No state has changed; look at the "
        f"sites' losses, gradients and learning rates"
    )
