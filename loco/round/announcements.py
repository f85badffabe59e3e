"""What every site tells all others before a round's entries travel: sizes, θ's digest, its update's norm."""

from ..errors import ReplicaError, WireError
from ..members.view import View
from ..wire.header import Header, Kind, Status
from ..wire.refusal import Problem, unreadable


def announce(view: View, mine: Header) -> tuple[list[Header], Problem | None]:
    """All sites' announcements, by site; or what is wrong with them.

    A site that has a problem announces nothing but its coming vote.

    Raises:
        TransportError: a link is lost.
    """
    headers: list[Header] = []
    across = view.across
    raws = across.swap_records(mine.pack(), phase=f"round {mine.round}, announcement", limit=across.patience)
    for site, raw in enumerate(raws):
        try:
            header = Header.unpack(raw)
            _check(header, mine, site)
        except WireError as error:
            return [], unreadable(site, error, mine.round)
        headers.append(header)
    return headers, _replica_problem(headers) or _missing(headers)


def _check(header: Header, mine: Header, site: int) -> None:
    """Refuse what is not that site's. Rounds and digests are compared once all headers are known."""
    if header.site != site:
        raise WireError(f"a header of site {header.site} on the link of site {site}")
    if Kind.VOTE in (header.kind, mine.kind):
        return
    if header.kind != Kind.ANNOUNCEMENT:
        raise WireError(f"a header of {header.kind.name.lower()} in the place of an announcement")
    if header.numel != mine.numel:
        raise WireError(f"a vector of {header.numel} elements, not {mine.numel}")
    if header.entries > header.numel:
        raise WireError(f"{header.entries} entries of {header.numel} elements")


def _missing(headers: list[Header]) -> Problem | None:
    """A site that announces nothing votes against the round; if it does not, the others do."""
    silent = next((h.site for h in headers if h.kind == Kind.VOTE), None)
    return None if silent is None else Problem(Status.MISSING, silent)


def _replica_problem(headers: list[Header]) -> Problem | None:
    """Every site is in the same round and holds the same θ, or the sites that differ are named.

    The header of a site that is about to refuse the round has no digest.
    """
    by_round = ", ".join(f"site {h.site} in round {h.round}" for h in headers)
    by_digest = ", ".join(f"site {h.site} holds {h.digest:016x}" for h in headers)
    first = headers[0]
    for header in headers:
        if header.round != first.round:
            seen = ReplicaError(
                f"the sites are in different rounds ({by_round}): resume all from the same checkpoint"
            )
            return Problem(Status.REPLICA, header.site, seen)
        if header.digest != first.digest and Kind.VOTE not in (header.kind, first.kind):
            seen = ReplicaError(
                f"round {first.round}: the sites' anchors differ ({by_digest}): "
                f"resume all from the same checkpoint"
            )
            return Problem(Status.REPLICA, header.site, seen)
    return None
