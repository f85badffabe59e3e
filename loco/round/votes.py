"""All ranks of all sites learn of the first problem and raise, or none does."""

from collections.abc import Callable
from dataclasses import replace

from ..errors import LocoError, NonFiniteError, PeerError, ReplicaError, WireError
from ..members.view import View
from ..net.transport import Transport
from ..wire.records import Status, Vote
from ..wire.refusal import Problem, Refused, overflow_text


def vote(
    view: View, problem: Problem | None, *, round: int, number: int, name_of: Callable[[int], str]
) -> None:
    """Vote for the round, or against it because of `problem`.

    The ranks of a site vote among themselves first, so that each then speaks for the whole site.

    Args:
        number: 1 before entries are sent, 2 once they have arrived.
        name_of: a parameter's name by its number, for errors.

    Raises:
        Refused: on every rank of every site, with the error to raise.
        TransportError, WireError: a link is lost; other ranks may have all votes.
    """
    problem = problem or Problem(Status.OK)
    mine = Vote(site=view.site, round=round, number=number, status=problem.status, subject=problem.subject)
    for transport in (view.inside, view.across):
        phase = f"round {round}, vote {number}"
        raws = transport.swap_records(mine.pack(), phase=phase)
        try:
            votes = [
                read_vote(raw, k if transport is view.across else view.site, transport, k, round, number)
                for k, raw in enumerate(raws)
            ]
        except WireError as error:
            if transport is view.across or number == 2:
                raise  # there is no other vote to put it to, and others may have all votes
            problem = Problem(Status.UNREADABLE, view.site, WireError(f"{phase}: {error}"))
            mine = replace(mine, status=problem.status, subject=problem.subject)
        else:
            against = [vote for vote in votes if vote.status != Status.OK]
            # A site that misses something from a site that fails knows less about it than that site.
            told = (vote for vote in against if vote.status != Status.MISSING)
            mine = next(told, next(iter(against), mine))
    if mine.status == Status.OK:
        return
    if problem.seen is not None:  # what this rank saw itself says more than what travelled
        raise Refused(problem.seen)
    raise Refused(_reported(mine, name_of))


def read_vote(raw: bytes, site: int, transport: Transport, member: int, round: int, number: int) -> Vote:
    """
    Args:
        site: whose vote it must be.
        transport, member: over which, and from which of its members, it came.

    Raises:
        WireError: it is not that vote.
    """
    vote = Vote.unpack(raw)
    # In the first vote a peer may be in another round, which is what the vote is about.
    expected_round = round if number == 2 else vote.round
    if (vote.site, vote.number, vote.round) != (site, number, expected_round):
        raise WireError(
            f"round {round}, vote {number}: {transport.member} {member} sent another message than its "
            f"vote: the ranks are not at the same point"
        )
    return vote


def _reported(vote: Vote, name_of: Callable[[int], str]) -> LocoError:
    """The error for a problem that another rank saw."""
    where = f"round {vote.round}, site {vote.site}"
    if vote.status == Status.NON_FINITE:
        return NonFiniteError(
            f"{where}: the update of {name_of(vote.subject)} is infinite or NaN. Nothing was "
            f"sent and no state has changed; look at that site's loss, gradients and learning rate"
        )
    if vote.status == Status.OVERFLOW:
        return NonFiniteError(overflow_text(vote.round))
    if vote.status == Status.REPLICA:
        return ReplicaError(
            f"{where} reports that site {vote.subject} is in another round or holds another anchor"
        )
    if vote.status == Status.SITE_DRIFT:
        return ReplicaError(
            f"{where}: its ranks hold different weights. Wrap the model of a site of several ranks "
            f"in DistributedDataParallel(process_group=topology.site_group)"
        )
    if vote.status == Status.FAILED:
        return PeerError(
            f"{where} failed, and its own error says why. No state has changed; once it is mended, "
            f"all ranks can repeat the round"
        )
    if vote.status == Status.MISSING:
        return WireError(f"{where} did not receive all of site {vote.subject}, which gives no reason")
    return WireError(f"{where} could not read the message of site {vote.subject}")
