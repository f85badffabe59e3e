"""One verdict on a round for all ranks alike, however the last messages went.

Votes can't decide alone: a rank that loses its link during the last vote does not know whether the others had
all votes and went on. So a rank that has all votes writes COMMIT before it applies the round, a rank that
lost its link writes ABORT, and the first to be written counts.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress

from ..errors import AuthenticationError, TransportError, first_line
from .authentication import StoreSeals
from .compare_and_set import CompareAndSetKey
from .liveness import Liveness
from .store_client import KeyValueStore

COMMIT, ABORT = "commit", "abort"
_logger = logging.getLogger(__name__)


class Verdicts:
    """On the rounds over one set of links, one after the other.

    Each verdict has a store key that is used once: `name` is never used for other links, and verdicts over
    one set of links are counted. All ranks count alike: over links that hold, all ranks cast the same votes
    in the same order, and a rank that loses its links gets new ones together with all others. So no state
    that is loaded, and nobody who writes an old verdict into the store again, makes a verdict pass for that
    on another vote.

    If the ranks share a key, the store is not believed when it says ABORT, because somebody may have removed
    a COMMIT: a rank that has committed says so in its heartbeats, and this rank waits for one of each other
    rank.

    Args:
        name: of the links; no other links ever have it.
        clears_up: whether this rank removes what no rank can ask for any more: of all ranks, one.
        liveness, others: by which ranks confirm what they have committed; None: the store is believed.
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
        """Before this rank votes, once it has the verdict on what it voted on before."""
        self._is_new = True

    def on(self, number: int, wish: str) -> str:
        """-> the verdict on this rank's latest vote, as `decide`. It can be asked for again, until `prepare`.

        Args:
            number: of the round, for messages to people.
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
        """All ranks have met to build other links, so none asks for these verdicts any more."""
        if self._clears_up:
            # The last one may be one that only others have asked for.
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
        AuthenticationError: somebody without the key has written it.
    """
    try:
        verdict = CompareAndSetKey(store, key, seals).settle(wish)
    except AuthenticationError:
        raise
    except RuntimeError as error:
        raise TransportError(
            f"the sites' store does not answer ({first_line(error)}), and only it knows whether all "
            f"ranks had the round when a link was lost. Nothing is lost: the next call asks it again",
            lasting=True,
        ) from error
    if verdict not in (COMMIT, ABORT):
        raise AuthenticationError(f"the verdict on a round ({key}) was not written by a rank of this run")
    return verdict
