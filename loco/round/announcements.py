"""What every site tells all others before a round's entries travel: sizes, θ's digest, its update's norm; or
why it refuses the round.

All ranks that exchange entries with each other hear the same, so none of them sends any if one refuses.
"""

from collections.abc import Sequence

from ..errors import ReplicaError, WireError
from ..members.view import View
from ..wire.records import KIND_AT, Announcement, Kind, Status, Vote
from ..wire.refusal import Problem, unreadable


def announce(view: View, mine: Announcement | Vote) -> list[Announcement | Vote]:
    """-> what each site says, by site.

    Raises:
        TransportError: a link is lost.
        WireError: what a site says can't be read. It is heard by this rank alone, so its links are of no use
            any more.
    """
    across = view.across
    phase = f"round {mine.round}, announcement"
    said: list[Announcement | Vote] = []
    for site, raw in enumerate(across.swap_records(mine.pack(), phase=phase, limit=across.patience)):
        try:
            theirs = _read(raw)
            _check(theirs, mine, site)
        except WireError as error:
            raise unreadable(f"round {mine.round}", site, error) from error
        said.append(theirs)
    return said


def _read(raw: bytes) -> Announcement | Vote:
    return Vote.unpack(raw) if raw[KIND_AT] == Kind.VOTE else Announcement.unpack(raw)


def _check(theirs: Announcement | Vote, mine: Announcement | Vote, site: int) -> None:
    """Refuse what is not that site's. Rounds and digests are compared once all are known."""
    if theirs.site != site:
        raise WireError(f"an announcement of site {theirs.site} on the link of site {site}")
    if isinstance(theirs, Vote):
        if theirs.status == Status.OK:
            raise WireError("a vote for a round that has not been announced")
        return
    if isinstance(mine, Announcement) and theirs.numel != mine.numel:
        raise WireError(f"a vector of {theirs.numel} elements, not {mine.numel}")
    if theirs.entries > theirs.numel:
        raise WireError(f"{theirs.entries} entries of {theirs.numel} elements")


def replica_problem(said: Sequence[Announcement | Vote]) -> Problem | None:
    """Every site is in the same round and holds the same θ, or the sites that differ are named.

    A site that refuses the round announces no digest.
    """
    by_round = ", ".join(f"site {one.site} in round {one.round}" for one in said)
    announced = [one for one in said if isinstance(one, Announcement)]
    by_digest = ", ".join(f"site {one.site} holds {one.digest:016x}" for one in announced)
    first = said[0]
    for one in said:
        if one.round != first.round:
            seen = ReplicaError(
                f"the sites are in different rounds ({by_round}): resume all from the same checkpoint"
            )
            return Problem(Status.REPLICA, one.site, seen)
    for one in announced:
        if one.digest != announced[0].digest:
            seen = ReplicaError(
                f"round {first.round}: the sites' anchors differ ({by_digest}): "
                f"resume all from the same checkpoint"
            )
            return Problem(Status.REPLICA, one.site, seen)
    return None
