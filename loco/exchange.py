"""The seam between the outer loop and the network.

An exchange takes this site's entries and returns contributions that, added in order, are the sum over all
sites in site order. Dense DiLoCo and PULSELoCo differ only here and in the gate.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from loco.kernels import Encoded, Entries

from .errors import LocoError, NonFiniteError, PeerError, ReplicaError, TransportError, WireError
from .transport import Transport
from .wire import HEADER_BYTES, VOTE, Header, Status, check_header, encode_payload


@dataclass(frozen=True)
class Problem:
    """Why a round can't go on: what travels to the other sites, and what this rank saw of it."""

    status: Status
    subject: int = 0
    seen: Exception | None = None


class Refused(Exception):  # noqa: N818  (it carries an error, and never leaves the library)
    """All ranks refuse the round together, so that all of them are ready to repeat it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Exchange(ABC):
    """One round's conversation, the same for every exchange:

    1. announce: every site's header to all (sizes, θ digest).
    2. vote: does any rank anywhere see a reason to refuse? Then all raise, and no body was sent.
    3. transfer: the bodies.
    4. vote: did all of them arrive whole, everywhere? Then all go on; else all raise, nothing changed.

    Whatever goes wrong on a rank between two messages becomes its vote, so that none is left waiting. Only
    a lost link can't be voted on: if one breaks (or a message is damaged) during the last vote, some ranks
    may go on and others not, and the next round says so.

    Args:
        across: the link to the same place in the other sites.
        inside: the link to the other ranks of this site.
        name_of: a parameter's name by its number, for errors.
    """

    def __init__(self, across: Transport, inside: Transport, name_of: Callable[[int], str]) -> None:
        self.across = across
        self.inside = inside
        self.name_of = name_of

    def contributions(
        self, encoded: Encoded | None, *, round: int, numel: int, problem: Problem | None
    ) -> tuple[list[Entries], int]:
        """What all sites send in this round, and the bytes of this site's payload.

        Args:
            encoded: this site's entries of a vector of `numel` elements, and the digest of its θ; None if
                a problem kept this rank from encoding.
            problem: a reason of this rank's to refuse the round.

        Raises:
            Refused: on every rank of every site, with the error to raise; nothing was applied anywhere.
            TransportError, WireError: a link is lost, or says what no peer would say.
        """
        header, body = Header(codec=VOTE, site=self.across.rank, round=round), None
        if encoded is not None and problem is None:
            try:
                header, body = self._payload(encoded, round, numel)
            except Exception as error:
                problem = Problem(Status.FAILED, seen=error)

        headers, unreadable = self._announce(header, announces=body is not None)
        problem = problem or unreadable or _replica_problem(headers)
        room: dict[int, Tensor] = {}
        if problem is None:
            try:
                room = self._room(headers)
            except Exception as error:
                problem = Problem(Status.FAILED, seen=error)
        self._vote(problem, round, 1)
        assert encoded is not None
        assert body is not None

        contributions: list[Entries] = []
        try:
            contributions, problem = self._transfer(headers, encoded.entries, body, room)
        except TransportError:
            raise
        except Exception as error:
            problem = Problem(Status.FAILED, seen=error)
        self._vote(problem, round, 2)
        return contributions, HEADER_BYTES + header.body_bytes

    def _payload(self, encoded: Encoded, round: int, numel: int) -> tuple[Header, Tensor]:
        header, body = encode_payload(
            encoded.entries, site=self.across.rank, round=round, numel=numel, digest=encoded.digest
        )
        return header, body.to(self.across.device)

    @abstractmethod
    def _room(self, headers: list[Header]) -> dict[int, Tensor]:
        """Memory for what each peer will send, taken while the round can still be refused."""

    @abstractmethod
    def _transfer(
        self, headers: list[Header], own: Entries, body: Tensor, room: dict[int, Tensor]
    ) -> tuple[list[Entries], Problem | None]:
        """Move the bodies; a body that can't be read is a problem, a lost peer raises.

        What raises anything else must have sent and received all its messages before.
        """

    def _announce(self, mine: Header, *, announces: bool) -> tuple[list[Header], Problem | None]:
        """All sites' headers; a site that has a problem announces nothing but its coming vote."""
        phase = f"round {mine.round}, announcement"
        headers: list[Header] = []
        for site, raw in enumerate(self.across.swap_records(mine.pack(), phase=phase)):
            try:
                header = Header.unpack(raw)
                if announces and header.codec != VOTE:
                    check_header(header, site=site, numel=mine.numel, codec=mine.codec)
            except WireError as error:
                return [], unreadable_problem(site, error, mine.round)
            headers.append(header)
        return headers, None

    def _vote(self, problem: Problem | None, round: int, number: int) -> None:
        """All ranks of all sites learn of the first problem and raise, or none does.

        A site's ranks vote among themselves first, so that each then speaks for the whole site.
        """
        problem = problem or Problem(Status.OK)
        vote = Header(
            codec=VOTE,
            site=self.across.rank,
            round=round,
            status=problem.status,
            subject=problem.subject,
            entries=number,
        )
        for transport in (self.inside, self.across):
            phase = f"round {round}, vote {number}"
            raws = transport.swap_records(vote.pack(), phase=phase)
            try:
                votes = [self._read_vote(raw, k, transport, round, number) for k, raw in enumerate(raws)]
            except WireError as error:
                if transport is self.across:
                    raise  # there is no other vote to put it to
                seen = WireError(f"{phase}: {error}")
                problem = Problem(Status.UNREADABLE, self.across.rank, seen)
                vote = replace(vote, status=problem.status, subject=problem.subject)
            else:
                vote = next((v for v in votes if v.status != Status.OK), vote)
        if vote.status == Status.OK:
            return
        if problem.seen is not None:  # what this rank saw itself says more than what travelled
            raise Refused(problem.seen)
        raise Refused(self._reported(vote))

    def _read_vote(self, raw: bytes, member: int, transport: Transport, round: int, number: int) -> Header:
        vote = Header.unpack(raw)
        site = member if transport is self.across else self.across.rank
        # In the first vote a peer may be in another round, which is what the vote is about.
        in_round = round if number == 2 else vote.round
        if (vote.codec, vote.site, vote.entries, vote.round) != (VOTE, site, number, in_round):
            raise WireError(
                f"round {round}, vote {number}: {transport.member} {member} sent another message than its "
                f"vote: the ranks are not at the same point"
            )
        return vote

    def _reported(self, vote: Header) -> LocoError:
        """The error for a problem that another rank saw."""
        where = f"round {vote.round}, site {vote.site}"
        if vote.status == Status.NON_FINITE:
            return NonFiniteError(
                f"{where}: the update of {self.name_of(vote.subject)} is infinite or NaN. Nothing was "
                f"sent and no state has changed; look at that site's loss, gradients and learning rate"
            )
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
        return WireError(f"{where} could not read the message of site {vote.subject}")


def unreadable_problem(site: int, error: WireError, round: int) -> Problem:
    seen = WireError(f"round {round}: the message of site {site} can't be read: {error}")
    return Problem(Status.UNREADABLE, site, seen)


def _replica_problem(headers: list[Header]) -> Problem | None:
    """Every site is in the same round and holds the same θ, or the sites that differ are named.

    A header without a payload, of a site that is about to refuse the round, has no digest.
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
        if header.digest != first.digest and VOTE not in (header.codec, first.codec):
            seen = ReplicaError(
                f"round {first.round}: the sites' anchors differ ({by_digest}): "
                f"resume all from the same checkpoint"
            )
            return Problem(Status.REPLICA, header.site, seen)
    return None
