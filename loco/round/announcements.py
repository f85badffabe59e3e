"""What every site tells all others before a round's entries travel: sizes, θ's digest, its update's norm."""

from ..errors import ReplicaError, WireError
from ..members.view import View
from ..wire.records import Announcement, Status
from ..wire.refusal import Problem, unreadable


def announce(view: View, mine: Announcement) -> tuple[list[Announcement], Problem | None]:
    """All sites' announcements, by site; or what is wrong with them.

    Raises:
        TransportError: a link is lost.
    """
    announced: list[Announcement] = []
    across = view.across
    raws = across.swap_records(mine.pack(), phase=f"round {mine.round}, announcement", limit=across.patience)
    for site, raw in enumerate(raws):
        try:
            theirs = Announcement.unpack(raw)
            _check(theirs, mine, site)
        except WireError as error:
            return [], unreadable(site, error, mine.round)
        announced.append(theirs)
    return announced, _replica_problem(announced) or _missing(announced)


def _check(theirs: Announcement, mine: Announcement, site: int) -> None:
    """Refuse what is not that site's. Rounds and digests are compared once all are known."""
    if theirs.site != site:
        raise WireError(f"an announcement of site {theirs.site} on the link of site {site}")
    if theirs.refuses or mine.refuses:
        return
    if theirs.numel != mine.numel:
        raise WireError(f"a vector of {theirs.numel} elements, not {mine.numel}")
    if theirs.entries > theirs.numel:
        raise WireError(f"{theirs.entries} entries of {theirs.numel} elements")


def _missing(announced: list[Announcement]) -> Problem | None:
    """A site that announces nothing votes against the round; if it does not, the others do."""
    silent = next((one.site for one in announced if one.refuses), None)
    return None if silent is None else Problem(Status.MISSING, silent)


def _replica_problem(announced: list[Announcement]) -> Problem | None:
    """Every site is in the same round and holds the same θ, or the sites that differ are named.

    A site that is about to refuse the round announces no digest.
    """
    by_round = ", ".join(f"site {one.site} in round {one.round}" for one in announced)
    by_digest = ", ".join(f"site {one.site} holds {one.digest:016x}" for one in announced)
    first = announced[0]
    for one in announced:
        if one.round != first.round:
            seen = ReplicaError(
                f"the sites are in different rounds ({by_round}): resume all from the same checkpoint"
            )
            return Problem(Status.REPLICA, one.site, seen)
        if one.digest != first.digest and not (one.refuses or first.refuses):
            seen = ReplicaError(
                f"round {first.round}: the sites' anchors differ ({by_digest}): "
                f"resume all from the same checkpoint"
            )
            return Problem(Status.REPLICA, one.site, seen)
    return None
