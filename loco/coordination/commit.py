"""Verdicts: whether a round counts, decided once for all ranks by a key of the store.

Votes can't decide alone: a rank that loses its link during the last vote does not know whether the others got
all votes and went on. So a rank that has all votes writes COMMIT before it applies the round, a rank that
lost its link writes ABORT, and the first value that is written stands.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress

from ..errors import AuthenticationError, TransportError, first_line
from .authentication import StoreSeals
from .compare_and_set import CompareAndSetKey
from .liveness import Liveness
from .store_client import KeyValueStore, whereabouts

COMMIT, ABORT = "commit", "abort"
_logger = logging.getLogger(__name__)


class Verdicts:
    """The verdicts on the rounds over one set of links, one after the other.

    Each verdict has a store key that is used once: no other links have this `name`, and the votes over one
    set of links are numbered. All ranks number them alike, because all cast the same votes in the same order
    as long as the links hold, and a rank that loses its links gets new ones together with all others. So an
    old verdict is never taken for that on another vote, whatever state is loaded, and whoever writes it into
    the store again.

    If the ranks share a key, an ABORT in the store is not trusted, because somebody may have removed a
    COMMIT. A rank that has committed says so in its heartbeats, so this rank first waits for new heartbeats
    of the other ranks.

    Args:
        name: of the links; no other links ever have it.
        clears_up: whether this rank removes verdicts that no rank can ask for any more; one rank does.
        liveness, others: the heartbeats and ranks that confirm a COMMIT; None: the store is trusted.
    """

    def __init__(
        self,
        store: KeyValueStore,
        seals: StoreSeals,
        name: str,
        *,
        clears_up: bool,
        liveness: Liveness | None = None,
        others: Sequence[int] = (),
    ) -> None:
        self._store = store
        self._seals = seals
        self._name = name
        self._clears_up = clears_up
        self._liveness = liveness if seals.are_used else None
        self._others = others
        self._vote = 0  # the latest that this rank has asked for
        self._is_new = True  # the next question is about the vote after it

    def prepare(self, number: int) -> None:
        """Call it before each vote, when the verdict on the previous one is known."""
        self._is_new = True

    def on(self, number: int, wish: str) -> str:
        """-> the verdict on this rank's latest vote: see `decide`. Until `prepare` it can be asked for again.

        Args:
            number: of the round, for the log.
        """
        if self._is_new:
            self._vote, self._is_new = self._vote + 1, False
        key = self._key(self._vote)
        verdict = decide(self._store, key, wish, self._seals)
        if self._liveness is not None:
            if verdict == ABORT and self._liveness.is_confirmed(self._others, key):
                _logger.warning(
                    "round %d: the store says that it was given up, another rank that it was committed, so "
                    "somebody has changed the store: the round counts",
                    number,
                )
                verdict = COMMIT
            if verdict == COMMIT:
                self._liveness.confirm(self, key)
        if self._clears_up and verdict == COMMIT:
            self._remove(self._vote - 1)
        return verdict

    def close(self) -> None:
        """Remove what is left: all ranks have met to build new links, so none asks for these again."""
        if self._clears_up:
            # Other ranks may have asked for one more than this rank.
            for vote in range(self._vote - 1, self._vote + 2):
                self._remove(vote)

    def _remove(self, vote: int) -> None:
        if vote > 0:
            with suppress(RuntimeError):  # a slow store may keep it
                self._store.delete_key(self._key(vote))

    def _key(self, vote: int) -> str:
        return f"{self._name}/vote/{vote}"


def decide(store: KeyValueStore, key: str, wish: str, seals: StoreSeals) -> str:
    """-> the verdict: this rank's wish, unless another rank was quicker.

    Args:
        key: in the store; of this vote only.
        seals: of the verdict, if the ranks share a key.

    Raises:
        TransportError: the store does not answer; the verdict can be asked for again.
        AuthenticationError: it was written without the key.
    """
    try:
        verdict = CompareAndSetKey(store, key, seals).settle(wish)
    except AuthenticationError:
        raise
    except RuntimeError as error:
        raise TransportError(
            f"the sites' store does not answer ({whereabouts(store, first_line(error))}), and only it knows "
            f"whether all ranks had the round when a link was lost. Nothing is lost: the next call asks it "
            f"again; if its host has died, restart all sites from their last checkpoint",
            lasting=True,
            has_remedy=True,
        ) from error
    if verdict not in (COMMIT, ABORT):
        raise AuthenticationError(f"the verdict on a round ({key}) was not written by a rank of this run")
    return verdict
