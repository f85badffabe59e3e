"""Links between the members of one quorum: each rank is linked with those of its number elsewhere."""

import hashlib

from ...coordination.authentication import StoreSeals
from ...coordination.hosted_store import Guests
from ...coordination.store_client import RemoteStore
from ...errors import TransportError
from ...net.listening import Endpoint
from ...net.peers import Peers
from ..meeting import PREFIX
from .quorum import Plan


def link_members(
    plan: Plan,
    me: int,
    rank: int,
    *,
    store: str,
    hosted_by: str,
    endpoint: Endpoint,
    timeout: float,
    dead_after: float,
    within: float,
    key: bytes | None,
) -> Peers:
    """
    Args:
        me: this site's index among the members.
        rank: this one's number in its site.
        store: host:port of the store by which they meet.
        hosted_by: the site that hosts it; "" if none does.
        within: seconds for all to come, and then to link up.

    Raises:
        TransportError: a member did not come, or was lost on the way.
    """
    try:
        return Peers(
            RemoteStore(store, PREFIX, within, hosted_by=hosted_by),
            _name(plan.attempt, rank),
            me,
            called=[member.name for member in plan.members],
            kind="site",
            endpoint=endpoint,
            timeout=timeout,
            patience=timeout,  # whoever is in a quorum has come to its round
            dead_after=dead_after,
            within=within,
            answers=dead_after,
            links_within=within,
            key=key,
            seals=_seals(plan.attempt, key),
        )
    except TransportError as error:
        error.lasting = False  # whoever was lost: the next quorum is without it
        raise


def guests_of(attempt: str, others: list[int], ranks_per_site: int, key: bytes | None) -> list[Guests]:
    """All ranks of these members, for who hosts their store."""
    seals = _seals(attempt, key)
    return [Guests(PREFIX, _name(attempt, rank), others, seals) for rank in range(ranks_per_site)]


def _name(attempt: str, rank: int) -> str:
    return f"{attempt}/rank {rank}"


def _seals(attempt: str, key: bytes | None) -> StoreSeals:
    """Also of what ranks write with which this one is not linked, and has no session."""
    return StoreSeals(key, hashlib.blake2b(attempt.encode(), digest_size=16).digest())
