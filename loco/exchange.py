"""The seam between the outer loop and the network.

An exchange takes this site's entries and returns contributions that, added in order, are the sum over all
sites in site order. Dense DiLoCo and PULSELoCo differ only here and in the gate.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from loco.kernels import Encoded, Entries

from .codec import WholeFloat32
from .errors import LocoError, NonFiniteError, ReplicaError, WireError
from .transport import Transport, as_bytes
from .wire import VOTE, Header, Status, check_header, decode_payload, encode_payload


@dataclass(frozen=True)
class Problem:
    """Why a round can't go on: what travels to the other sites, and what this rank saw of it."""

    status: Status
    subject: int = 0
    seen: LocoError | None = None


class Exchange(ABC):
    """One round's conversation, the same for every exchange:

    1. announce: every site's header to all (sizes, θ digest).
    2. vote: does any rank anywhere see a reason to refuse? Then all raise, and no body was sent.
    3. transfer: the bodies.
    4. vote: did all of them arrive whole, everywhere? Then all go on; else all raise, nothing changed.

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
        self, encoded: Encoded, *, round: int, numel: int, problem: Problem | None
    ) -> tuple[list[Entries], int]:
        """What all sites send in this round, and the bytes of this site's payload.

        Args:
            encoded: this site's entries of a vector of `numel` elements, and the digest of its θ.
            problem: a reason of this rank's to refuse the round.

        Raises:
            LocoError: the same on every rank of every site, and nothing was applied anywhere; or a
                TransportError on those that lost a peer.
        """
        header, body = encode_payload(
            encoded.entries,
            site=self.across.rank,
            round=round,
            numel=numel,
            digest=encoded.digest,
        )
        body = body.to(self.across.device)

        headers, unreadable = self._announce(header)
        self._vote(problem or unreadable or _replica_problem(headers), round)

        contributions, problem = self._transfer(headers, encoded.entries, body)
        self._vote(problem, round)
        return contributions, len(header.pack()) + body.numel()

    @abstractmethod
    def _transfer(
        self, headers: list[Header], own: Entries, body: Tensor
    ) -> tuple[list[Entries], Problem | None]:
        """Move the bodies; a body that can't be read is a problem, a lost peer raises."""

    def _announce(self, mine: Header) -> tuple[list[Header], Problem | None]:
        phase = f"round {mine.round}, announcement"
        headers: list[Header] = []
        for site, raw in enumerate(self.across.swap_records(mine.pack(), phase=phase)):
            try:
                header = Header.unpack(raw)
                check_header(header, site=site, numel=mine.numel, codec=mine.codec)
            except WireError as error:
                return headers, _unreadable(site, error, mine.round)
            headers.append(header)
        return headers, None

    def _vote(self, problem: Problem | None, round: int) -> None:
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
        )
        for transport in (self.inside, self.across):
            raws = transport.swap_records(vote.pack(), phase=f"round {round}, vote")
            votes = [Header.unpack(raw) for raw in raws]
            vote = next((v for v in votes if v.status != Status.OK), vote)
        if vote.status == Status.OK:
            return
        if problem.seen is not None and problem.status == vote.status:
            raise problem.seen
        raise self._reported(vote)

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
        return WireError(f"{where} could not read the message of site {vote.subject}")


class GatherExchange(Exchange):
    """Each site's payload to all sites, in its own size. Sends (R−1) payloads."""

    def _transfer(
        self, headers: list[Header], own: Entries, body: Tensor
    ) -> tuple[list[Entries], Problem | None]:
        across = self.across
        bodies = {
            site: torch.empty(headers[site].body_bytes, dtype=torch.uint8, device=across.device)
            for site in across.peers
        }
        round = headers[across.rank].round
        across.swap(dict.fromkeys(across.peers, body), bodies, phase=f"round {round}, payloads")

        contributions: list[Entries] = []
        for site, header in enumerate(headers):
            if site == across.rank:
                contributions.append(own)
                continue
            try:
                entries = decode_payload(header, bodies.pop(site).to(own.values.device))
            except WireError as error:
                return [], _unreadable(site, error, round)
            contributions.append(entries)
        return contributions, None


class DenseExchange(Exchange):
    """Each site sums one slice in site order, then the slices are gathered.

    Sends 2(R−1)/R · 4 bytes per element, as a ring all-reduce does, but the order of the sum, and so its
    bits, do not depend on a ring.
    """

    def _transfer(
        self, headers: list[Header], own: Entries, body: Tensor
    ) -> tuple[list[Entries], Problem | None]:
        across, numel, round = self.across, own.values.numel(), headers[0].round
        assert headers[0].codec == WholeFloat32.id
        width = -(-numel // across.size)
        slices = [slice(min(k * width, numel), min((k + 1) * width, numel)) for k in range(across.size)]
        values = body.view(torch.float32)
        mine = slices[across.rank]

        received = {peer: torch.empty_like(values[mine]) for peer in across.peers}
        across.swap(
            {peer: as_bytes(values[slices[peer]]) for peer in across.peers},
            {peer: as_bytes(part) for peer, part in received.items()},
            phase=f"round {round}, slices to their owners",
        )
        total = torch.empty_like(values)
        total[mine] = 0.0
        for site in range(across.size):
            total[mine] += values[mine] if site == across.rank else received.pop(site)

        across.swap(
            {peer: as_bytes(total[mine]) for peer in across.peers},
            {peer: as_bytes(total[slices[peer]]) for peer in across.peers},
            phase=f"round {round}, sums to all",
        )
        return [Entries(None, total.to(own.values.device))], None


def _unreadable(site: int, error: WireError, round: int) -> Problem:
    seen = WireError(f"round {round}: the message of site {site} can't be read: {error}")
    return Problem(Status.UNREADABLE, site, seen)


def _replica_problem(headers: list[Header]) -> Problem | None:
    """Every site is in the same round and holds the same θ, or the sites that differ are named."""
    first = headers[0]
    by_round = ", ".join(f"site {h.site} in round {h.round}" for h in headers)
    by_digest = ", ".join(f"site {h.site} holds {h.digest:016x}" for h in headers)
    for header in headers:
        if header.round != first.round:
            seen = ReplicaError(
                f"the sites are in different rounds ({by_round}): resume all from the same checkpoint"
            )
            return Problem(Status.REPLICA, header.site, seen)
        if header.digest != first.digest:
            seen = ReplicaError(
                f"round {first.round}: the sites' anchors differ ({by_digest}): "
                f"resume all from the same checkpoint"
            )
            return Problem(Status.REPLICA, header.site, seen)
    return None
