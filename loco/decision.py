"""One verdict on a round for all ranks alike, however the last messages went.

Votes can't decide alone: whoever loses its link during the last vote does not know whether the others had
all votes and went on. So who has them all writes COMMIT before it applies the round, who lost its link writes
ABORT, and the first one to be written counts.
"""

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from .errors import AuthenticationError, TransportError, first_line
from .sealing import Words

COMMIT, ABORT = "commit", "abort"


def decide(store: Store, place: str, wish: str, words: Words) -> str:
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
