"""One verdict on a round for all ranks alike, however the last messages went.

Votes can't decide alone: whoever loses its link during the last vote does not know whether the others had
all votes and went on. So who has them all writes COMMIT before it applies the round, who lost its link writes
ABORT, and the first one to be written counts.
"""

from contextlib import suppress

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ..errors import AuthenticationError, TransportError, first_line, no_store
from .authentication import StoreSeals

COMMIT, ABORT = "commit", "abort"


class Verdicts:
    """On the rounds over one set of links, one after the other.

    Args:
        place: in the store, of these links only.
        clears_up: one rank removes what nobody can ask for any more.
    """

    def __init__(self, store: Store, words: StoreSeals, place: str, *, clears_up: bool) -> None:
        self._store = store
        self._store_seals = words
        self._place = place
        self._clears_up = clears_up
        self._last = 0  # round that has one

    def prepare(self, number: int) -> None:
        """Before this rank votes on a round. If a state was loaded, the round may have a verdict already; all
        ranks that knew of it remove it before they vote, and so before there can be another one.

        Raises:
            TransportError: the store does not answer.
        """
        if number > self._last:
            return
        try:
            self._store.delete_key(f"{self._place}/round/{number}")
        except RuntimeError as error:
            raise no_store(f"round {number}", error) from error

    def on(self, number: int, wish: str) -> str:
        """As `decide`."""
        verdict = decide(self._store, f"{self._place}/round/{number}", wish, self._store_seals)
        self._last = number
        if self._clears_up and verdict == COMMIT:
            with suppress(RuntimeError):  # a slow store may keep it
                self._store.delete_key(f"{self._place}/round/{number - 1}")
        return verdict


def decide(store: Store, place: str, wish: str, words: StoreSeals) -> str:
    """-> the verdict: this rank's wish, unless another rank was quicker.

    Args:
        place: in the store; of this round only.
        words: seals the verdict, if there is a key.

    Raises:
        TransportError: the store does not answer; the verdict can be asked for again.
        AuthenticationError: somebody without the key has written it.
    """
    try:
        found = store.compare_set(place, "", words.write(place, wish)).decode(errors="replace")
    except RuntimeError as error:
        raise TransportError(
            f"the process group's store does not answer ({first_line(error)}), and only it knows whether all "
            f"ranks had the round when a link was lost. Nothing is lost: the next call asks it again",
            lasting=True,
        ) from error
    verdict = words.read(place, found)
    if verdict not in (COMMIT, ABORT):
        raise AuthenticationError(f"the verdict on a round ({place}) was not written by a rank of this run")
    return verdict
