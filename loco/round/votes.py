"""All ranks of all sites learn of the first problem and raise, or none does."""

from collections.abc import Callable, Sequence

from ..errors import LocoError, NonFiniteError, PeerError, ReplicaError, WireError
from ..members.view import View
from ..net.transport import Transport
from ..wire.records import Status, Vote
from ..wire.refusal import Problem, Refused, overflow_text

NameOf = Callable[[int], str]  # a parameter's name by its number, for errors


def vote_of(view: View, problem: Problem | None, round: int) -> Vote:
    problem = problem or Problem(Status.OK)
    return Vote(site=view.site, round=round, status=problem.status, subject=problem.subject)


def refuse(view: View, problem: Problem | None, told: Sequence[Vote], *, round: int, name_of: NameOf) -> None:
    """Before entries are sent: refuse the round if this rank sees a reason, or has been told of one.

    What one rank of a site was told, the site's other ranks may not have been: they tell each other.

    Args:
        told: the votes that came in the place of announcements.

    Raises:
        Refused: on every rank of every site, with the error to raise.
        TransportError, WireError: a link is lost.
    """
    mine = _worst(vote_of(view, problem, round), told)
    inside = view.inside
    if inside.size > 1:
        phase = f"round {round}, refusals inside the site"
        mine = _worst(mine, [Vote.unpack(raw) for raw in inside.swap_records(mine.pack(), phase=phase)])
    _raise(view, mine, problem, name_of)


def vote(view: View, mine: Vote, problem: Problem | None, *, name_of: NameOf) -> list[Vote]:
    """Vote for the round, or against it because of `problem`, once all entries have arrived.

    The ranks of a site vote among themselves first, so that each then speaks for the whole site.

    Returns:
        The votes of all ranks of this site.

    Raises:
        Refused: on every rank of every site, with the error to raise.
        TransportError, WireError: a link is lost; other ranks may have all votes.
    """
    of_site, round = [mine], mine.round
    for transport in (view.inside, view.across):
        if transport.size == 1:
            continue
        # Also this rank's own: if it says something else than it means, all notice together.
        votes = [
            read_vote(raw, k if transport is view.across else view.site, transport, k, round)
            for k, raw in enumerate(transport.swap_records(mine.pack(), phase=f"round {round}, vote"))
        ]
        mine = _worst(mine, votes)
        if transport is view.inside:
            of_site = votes
    _raise(view, mine, problem, name_of)
    return of_site


def read_vote(raw: bytes, site: int, transport: Transport, member: int, round: int) -> Vote:
    """
    Args:
        site: whose vote it must be.
        transport, member: over which, and from which of its members, it came.

    Raises:
        WireError: it is not that vote.
    """
    vote = Vote.unpack(raw)
    if (vote.site, vote.round) != (site, round):
        raise WireError(
            f"round {round}, vote: {transport.called(member)} sent another message than its vote: the ranks "
            f"are not at the same point"
        )
    return vote


def _worst(mine: Vote, votes: Sequence[Vote]) -> Vote:
    """The first one against the round; `mine`, if there is none."""
    against = [vote for vote in votes if vote.status != Status.OK]
    # A site that misses something from a site that fails knows less about it than that site.
    told = (vote for vote in against if vote.status != Status.MISSING)
    return next(told, next(iter(against), mine))


def _raise(view: View, vote: Vote, problem: Problem | None, name_of: NameOf) -> None:
    if vote.status == Status.OK:
        return
    failed_here = vote.site == view.site and vote.status in (Status.NON_FINITE, Status.FAILED)
    if problem is not None and problem.seen is not None:  # it says more than what travelled
        raise Refused(problem.seen, failed_here=failed_here)
    raise Refused(_reported(view, vote, name_of), failed_here=failed_here)


def not_finite(where: str, parameter: str) -> NonFiniteError:
    return NonFiniteError(
        f"{where}: the update of {parameter} is infinite or NaN. Nothing of it was sent; look at that site's "
        f"loss, gradients and learning rate"
    )


def _reported(view: View, vote: Vote, name_of: NameOf) -> LocoError:
    """The error for a problem that another rank saw."""
    called = view.across.called
    where = f"round {vote.round}, {called(vote.site)}"
    if vote.status == Status.NON_FINITE:
        return not_finite(where, name_of(vote.subject))
    if vote.status == Status.OVERFLOW:
        return NonFiniteError(overflow_text(vote.round))
    if vote.status == Status.REPLICA:
        return ReplicaError(
            f"{where} reports that {called(vote.subject)} is in another round or holds another anchor"
        )
    if vote.status == Status.SITE_DRIFT:
        return ReplicaError(
            f"{where}: its ranks hold different weights. Wrap the model of a site of several ranks "
            f"in DistributedDataParallel(process_group=topology.site_group); with FSDP2 average the "
            f"gradients of parameters that are not sharded"
        )
    if vote.status == Status.FAILED:
        return PeerError(
            f"{where} failed, and its own error says why. No state has changed; once it is mended, "
            f"all ranks can repeat the round"
        )
    if vote.status == Status.MISSING:
        return WireError(f"{where} did not receive all of {called(vote.subject)}, which gives no reason")
    return WireError(f"{where} could not read the message of {called(vote.subject)}")
