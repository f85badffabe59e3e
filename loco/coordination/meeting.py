"""All ranks meet at one point within a time limit, or none of them goes on."""

import time
import uuid
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from ..errors import TransportError

_POLL = 0.02  # seconds


def meet(
    store: Store,
    key: str,
    rank: int,
    world: int,
    timeout: float,
    hopeful: Callable[[], bool] = lambda: True,
) -> int:
    """Return once all `world` ranks are here at the same time -> the meeting's number.

    The store holds "<meetings held>:<ranks that wait>:<token>" and is changed by compare-and-set only: a
    rank either belongs to a meeting, with all the others, or does not. Who gives up, or is interrupted,
    takes its arrival back; and arriving twice is arriving once.

    Raises:
        TransportError: not all came within `timeout` seconds, or `hopeful` says that they never will, or the
            store is gone.
    """
    deadline = time.monotonic() + timeout
    try:
        joined = _arrive(store, key, rank, world)
        try:
            while True:
                now = store.get(key).decode()
                held, waiting = _parse(now)
                if held != joined:
                    return joined
                if (time.monotonic() > deadline or not hopeful()) and _swap(
                    store, key, now, held, waiting - {rank}
                ):
                    raise TransportError(
                        f"reconnecting: {len(waiting)} of {world} ranks came within {timeout:g} s; a round "
                        f"that failed is repeated by all ranks together",
                        lasting=True,
                    )
                time.sleep(_POLL)
        except BaseException:
            _leave(store, key, rank, joined)
            raise
    except TransportError:
        raise
    except RuntimeError as error:
        text = f"reconnecting: the process group's store failed ({error})"
        raise TransportError(text, lasting=True) from error


def is_called(store: Store, key: str) -> bool:
    """Whether ranks wait there to meet."""
    return store.check([key]) and bool(_parse(store.get(key).decode())[1])


def _arrive(store: Store, key: str, rank: int, world: int) -> int:
    """Count this rank in -> the number of the meeting it belongs to. The last rank to come ends it."""
    store.compare_set(key, "", "0::")
    while True:
        now = store.get(key).decode()
        held, waiting = _parse(now)
        everyone = waiting | {rank}
        if len(everyone) == world:
            joined = _swap(store, key, now, held + 1, set())
        else:
            joined = _swap(store, key, now, held, everyone)
        if joined:
            return held


def _leave(store: Store, key: str, rank: int, joined: int) -> None:
    """Take this rank's arrival back, unless the meeting was held."""
    while True:
        now = store.get(key).decode()
        held, waiting = _parse(now)
        if held != joined or rank not in waiting or _swap(store, key, now, held, waiting - {rank}):
            return


def _swap(store: Store, key: str, now: str, held: int, waiting: set[int]) -> bool:
    # A value that nobody else writes: the answer tells this rank's success from another's.
    wanted = f"{held}:{','.join(map(str, sorted(waiting)))}:{uuid.uuid4().hex}"
    return store.compare_set(key, now, wanted).decode() == wanted


def _parse(value: str) -> tuple[int, set[int]]:
    held, waiting, _ = value.split(":")
    return int(held), {int(rank) for rank in waiting.split(",") if rank}
