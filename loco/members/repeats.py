"""How often a round that failed is tried again."""

import logging
from collections.abc import Callable, Sequence

from ..errors import NonFiniteError, PeerError, TransportError, WireError
from ..logs import warn_once_per_machine

_logger = logging.getLogger(__name__)


class Repeats:
    """A round whose links broke is tried again over new ones, so many times in a row among the same members.

    Where members may go, another attempt is without those who are lost, so it also helps after the loss of a
    member for good, and after the error of one, which may end by it.

    Args:
        most: times.
        leave: gives up the links of the latest attempt -> its members; None: they are always the same.
        stop: called with the error before it is raised, if links were lost: others may go on trying.
    """

    def __init__(
        self,
        most: int,
        leave: Callable[[], Sequence[str]] | None = None,
        *,
        stop: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._most = most
        self._leave = leave
        self._stop = stop
        self._members: Sequence[str] = ()  # of the latest attempt
        self._failed = 0  # attempts in a row among these

    def failed(self, error: Exception, *, linked: bool, refused: bool, own_fault: bool) -> None:
        """Return if the round is to be tried again.

        Args:
            linked: there was a view; otherwise none could be formed.
            refused: all ranks refused the round together; otherwise links were lost.
            own_fault: this rank itself could not take part.

        Raises:
            Exception: the error, if it is not.
        """
        lasts = isinstance(error, TransportError) and error.lasting
        if self._leave is None:
            helps = isinstance(error, TransportError | WireError) and not lasts and not refused
        else:
            may_go = isinstance(error, TransportError | WireError | NonFiniteError | PeerError)
            helps = may_go and not own_fault and (linked or not lasts)
        if helps:
            members = () if self._leave is None else self._leave()
            self._failed = self._failed + 1 if members == self._members else 1
            self._members = members
        if not helps or self._failed > self._most:
            if isinstance(error, TransportError | WireError) and not refused:
                self._stop(error)
            raise error from None
        warn_once_per_machine(_logger, "%s. It is tried again over new links", error)
