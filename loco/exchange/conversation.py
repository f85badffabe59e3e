"""The seam between the outer loop and the network.

An exchange takes this site's entries and returns contributions that, added in order, are the sum over all
sites in site order. How they travel (gathered, or summed by slices; in which code) changes no bit of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from loco.kernels import Encoded, Entries, Known

from ..errors import LocoError, NonFiniteError, PeerError, ReplicaError, WireError
from ..net.transport import Transport
from ..wire.codecs import DENSE, SPARSE, WHOLE, Codec
from ..wire.framing import Framing
from ..wire.header import Header, Kind, Status, fp32_bits, fp32_of
from ..wire.refusal import Problem, Refused, unreadable
from .gather import gather
from .outliers import outliers
from .owner_reduce import owner_reduce
from .transfer import Transfer
from .tuning import EXCHANGES, ExchangeTuner, predicted_bytes


@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """How entries travel. No choice changes a result, but those of DENSE that round what is sent."""

    codec: str
    exchange: str

    @staticmethod
    def of_entries(codec: str, exchange: str, *, gate: str) -> "WireConfig":
        """What PULSELoCo can be told."""
        _one_of("wire", codec, ("auto", *SPARSE))
        _one_of("exchange", exchange, EXCHANGES)
        why = "exchange='dense'" if exchange == "dense" else "gate='open'" if gate == "open" else ""
        if why and (codec != "auto" or exchange not in ("auto", "dense")):
            raise ValueError(
                f"{why} sends every element as FP32: leave wire at 'auto' (got {codec!r}) and exchange at "
                f"'auto' or 'dense' (got {exchange!r})"
            )
        return WireConfig(codec=codec, exchange=exchange)

    @staticmethod
    def of_all(codec: str) -> "WireConfig":
        """What DiLoCo can be told."""
        _one_of("wire", codec, tuple(DENSE))
        return WireConfig(codec=codec, exchange="dense")

    def agreement(self) -> dict[str, str]:
        """What all sites must have chosen alike."""
        return {"exchange": self.exchange} | ({"wire": self.codec} if self.codec in DENSE else {})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a round brought, and how."""

    own: Entries  # what this site sent
    contributions: list[Entries]
    exchange: str
    codec: str
    payload_bytes: int  # of this site's coded entries
    norms: tuple[float, ...]  # by site, of what it would have sent
    left_out: tuple[int, ...]  # the sites that sent nothing for it
    problem: Problem | None  # why this rank will vote against it


class Exchange:
    """One round's conversation:

    1. announce: every site's header to all (sizes, θ digest).
    2. vote: does any rank anywhere see a reason to refuse? Then all raise, and no body was sent.
    3. transfer: the frames, gathered or owner-reduced.
    4. vote: did all of them arrive whole, everywhere? Then all go on; else all raise, nothing changed.

    Whatever goes wrong on a rank between two messages becomes its vote, so that none is left waiting. Only
    a lost link can't be voted on: if one breaks (or a header is damaged) some ranks raise at once and the
    others when they miss them; during the last vote some may not know what the others know (`decision`).

    Args:
        across: the link to the same place in the other sites.
        inside: the link to the other ranks of this site.
        name_of: a parameter's name by its number, for errors.
        wire: what the user asked for.
        tuner: what earlier rounds were like; outlives a reconnection.
    """

    def __init__(
        self,
        across: Transport,
        inside: Transport,
        name_of: Callable[[int], str],
        wire: WireConfig,
        tuner: ExchangeTuner,
    ) -> None:
        self.across = across
        self.inside = inside
        self.name_of = name_of
        self.wire = wire
        self.tuner = tuner

    def run(
        self,
        encoded: Encoded | None,
        known: Known,
        *,
        norm: float,
        outlier_factor: float | None,
        round: int,
        problem: Problem | None,
    ) -> Outcome:
        """What all sites send in this round, which `confirm` must follow.

        Args:
            encoded: this site's entries and the digest of its θ; None if a problem kept this rank from
                encoding.
            known: θ and m before the round, and the gate.
            norm: of what the whole site would send.
            outlier_factor: above the median of the others', leaves a site out.
            problem: a reason of this rank's to refuse the round.

        Raises:
            Refused: on every rank of every site, with the error to raise; nothing was applied anywhere.
            TransportError, WireError: a link is lost, or says what no peer would say.
        """
        numel = known.anchor.numel()
        mine, codec = Header(kind=Kind.VOTE, site=self.across.rank, round=round), WHOLE
        if encoded is not None and problem is None:
            try:
                codec, mine = self._announcement(encoded, norm, round, numel)
            except Exception as error:
                problem = Problem(Status.FAILED, seen=error)
        headers, unread = self._announce(mine)
        self._vote(problem or unread or _replica_problem(headers) or _missing(headers), round, 1)
        assert encoded is not None

        norms = tuple(fp32_of(header.subject) for header in headers)
        left_out = outliers(norms, outlier_factor)
        own = encoded.entries
        if self.across.rank in left_out:
            own = Entries.at(own.values.new_empty(0, dtype=torch.int64), own.values[:0], numel)
        name = self._chosen(headers, own)
        if name == "dense" and codec.name not in DENSE:
            codec = WHOLE
        framing = Framing(self.across, codec, known, round=round, digest=encoded.digest)
        work = Transfer(self.across, framing)
        contributions = (gather if name == "gather" else owner_reduce)(work, own, numel)
        # What can fail must have been done before all sites count on this round.
        work.attempt(lambda: self.tuner.learn(codec, work, contributions, own))
        return Outcome(
            own=own,
            contributions=contributions,
            exchange=name,
            codec=codec.name,
            payload_bytes=framing.coded_bytes,
            norms=norms,
            left_out=left_out,
            problem=work.verdict(),
        )

    def confirm(self, outcome: Outcome, *, round: int) -> None:
        """The last vote: has everything arrived, everywhere?

        Raises:
            Refused: on every rank of every site.
            TransportError, WireError: a link is lost; other ranks may have all votes.
        """
        self._vote(outcome.problem, round, 2)

    def _announcement(self, encoded: Encoded, norm: float, round: int, numel: int) -> tuple[Codec, Header]:
        """The code of this site's frames, and its announcement."""
        entries = encoded.entries
        if entries.starts is None:
            codec = DENSE.get(self.wire.codec, WHOLE)
            expected = codec.most_bytes(numel, numel), codec.most_bytes(numel, numel)
        else:
            codec = self.tuner.codec()
            expected = self.tuner.announced(codec, entries.values.numel(), numel)
        return codec, Header(
            kind=Kind.ANNOUNCEMENT,
            site=self.across.rank,
            round=round,
            subject=fp32_bits(norm),
            codec=codec.id,
            numel=numel,
            entries=entries.values.numel(),
            body_bytes=expected[0],
            digest=encoded.digest,
            checksum=expected[1],
        )

    def _chosen(self, headers: list[Header], own: Entries) -> str:
        """The exchange of this round, the same on all sites."""
        if own.starts is None:
            return "dense"  # DiLoCo, or an open gate
        if self.wire.exchange != "auto":
            return self.wire.exchange
        predicted = predicted_bytes(headers)
        return min(predicted, key=lambda name: predicted[name])

    def _announce(self, mine: Header) -> tuple[list[Header], Problem | None]:
        """All sites' headers; a site that has a problem announces nothing but its coming vote."""
        phase = f"round {mine.round}, announcement"
        headers: list[Header] = []
        raws = self.across.swap_records(mine.pack(), phase=phase, limit=self.across.patience)
        for site, raw in enumerate(raws):
            try:
                header = Header.unpack(raw)
                _check_announcement(header, mine, site)
            except WireError as error:
                return [], unreadable(site, error, mine.round)
            headers.append(header)
        return headers, None

    def _vote(self, problem: Problem | None, round: int, number: int) -> None:
        """All ranks of all sites learn of the first problem and raise, or none does.

        A site's ranks vote among themselves first, so that each then speaks for the whole site.
        """
        problem = problem or Problem(Status.OK)
        vote = Header(
            kind=Kind.VOTE,
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
                if transport is self.across or number == 2:
                    raise  # there is no other vote to put it to, and others may have all votes
                seen = WireError(f"{phase}: {error}")
                problem = Problem(Status.UNREADABLE, self.across.rank, seen)
                vote = replace(vote, status=problem.status, subject=problem.subject)
            else:
                bad = [v for v in votes if v.status != Status.OK]
                # Who misses something from a site that fails knows less about it than that site.
                vote = next((v for v in bad if v.status != Status.MISSING), next(iter(bad), vote))
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
        if (vote.kind, vote.site, vote.entries, vote.round) != (Kind.VOTE, site, number, in_round):
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
        if vote.status == Status.MISSING:
            return WireError(f"{where} did not receive all of site {vote.subject}, which gives no reason")
        return WireError(f"{where} could not read the message of site {vote.subject}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _check_announcement(header: Header, mine: Header, site: int) -> None:
    """Refuse what is not that site's. Rounds and digests are compared by who sees all sites' headers."""
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
    """A site that announces nothing votes against the round; if it does not, others do."""
    silent = next((h.site for h in headers if h.kind == Kind.VOTE), None)
    return None if silent is None else Problem(Status.MISSING, silent)


def _replica_problem(headers: list[Header]) -> Problem | None:
    """Every site is in the same round and holds the same θ, or the sites that differ are named.

    That of a site which is about to refuse the round has no digest.
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
