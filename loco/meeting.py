"""All ranks meet at one point within a time limit, or none of them goes on."""

import time
import uuid

from torch._C._distributed_c10d import Store

from .errors import TransportError

_POLL = 0.02  # seconds


def meet(store: Store, key: str, world: int, timeout: float) -> None:
    """Return once `world` ranks are here at the same time.

    Who gives up takes its arrival back, so that ranks which come again later do not count it twice. The
    store holds "<meetings held>:<ranks waiting>:<who wrote this>" and is changed by compare-and-set only:
    a rank either belongs to a meeting, with all the others, or does not.

    Raises:
        TransportError: not all came within `timeout` seconds.
    """
    store.compare_set(key, "", "0:0:")
    joined = _join(store, key, world)
    deadline = time.monotonic() + timeout
    while True:
        now = store.get(key).decode()
        held, waiting = _parse(now)
        if held != joined:
            return
        if time.monotonic() > deadline and _swap(store, key, now, held, waiting - 1):
            raise TransportError(
                f"reconnecting: {waiting} of {world} ranks came within {timeout:g} s; a round that failed "
                f"is repeated by all ranks together"
            )
        time.sleep(_POLL)


def _join(store: Store, key: str, world: int) -> int:
    """Count this rank in -> the meeting it belongs to. The last rank to come ends it."""
    while True:
        now = store.get(key).decode()
        held, waiting = _parse(now)
        if waiting + 1 == world:
            joined = _swap(store, key, now, held + 1, 0)
        else:
            joined = _swap(store, key, now, held, waiting + 1)
        if joined:
            return held


def _swap(store: Store, key: str, now: str, held: int, waiting: int) -> bool:
    # A value that nobody else writes: the answer tells this rank's success from another's.
    wanted = f"{held}:{waiting}:{uuid.uuid4().hex}"
    return store.compare_set(key, now, wanted).decode() == wanted


def _parse(value: str) -> tuple[int, int]:
    held, waiting, _ = value.split(":")
    return int(held), int(waiting)
