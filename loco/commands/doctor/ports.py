"""Whether the sites can be connected from either end."""

import uuid

from ...errors import first_line
from ...members.fixed import FixedSites
from ...net.introductions import PatientStore
from ...net.linking import link


def connect_backwards(sites: FixedSites) -> str:
    """Connect all ranks once more, each pair of them from its other end, and hang up. -> why that failed; ""
    if it did not.

    Of two ranks the one of the higher number connects. So the links that the sites have show that one end of
    each pair can be reached; this shows it of the other one, which matters once sites have other names.

    Raises:
        TransportError: a link that the sites have is lost.
    """
    ranks = sites.all_ranks()
    last = ranks.size - 1
    name = ranks.swap_records(uuid.uuid4().bytes, phase="naming", limit=sites.patience)[0].hex()
    limit = max(2 * sites.dead_after, 20 * sites.store.round_trip)
    store = PatientStore(sites.store, limit=limit, may_still_come=lambda: True)
    try:
        link(
            store,
            f"doctor/{name}",
            last - ranks.rank,
            ranks.size,
            endpoint=sites.endpoint,
            called=lambda other: ranks.called(last - other),
        ).close()
    except RuntimeError as error:
        return first_line(error)
    return ""


def port_problems(told: list[str]) -> list[str]:
    """
    Args:
        told: by all ranks, why they could not be connected.
    """
    # Both ends of a closed way say the same. Others only see that their new links are hung up.
    both = sorted({said for said in told if said and told.count(said) > 1})
    note = "Under their present names the sites can do without, but not if their order by name changes"
    return [f"{said}. {note}" for said in both or sorted({said for said in told if said})]
