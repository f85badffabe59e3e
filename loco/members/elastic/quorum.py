"""Who does what in a round, when sites come and go: a pure function of what the sites of one quorum say.

Every site of a quorum is handed the same list, so that all reach the same decision without another word.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...errors import AgreementError


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a site says of itself.

    round: rounds done.
    digest: of its θ.
    ready: it has come to run a round; otherwise it has come for θ alone.
    links: the name of the links it holds, "" if none.
    committed: the attempt that made its last round, "" if this process made none.
    doubt: an attempt of which it has everything but the last vote, "" if there is none.
    setup: of parameters and settings; sites of different setups don't belong together.
    belongs: it was a member of an earlier quorum of the run.
    """

    round: int
    digest: str
    ready: bool
    links: str = ""
    committed: str = ""
    doubt: str = ""
    setup: str = ""
    belongs: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def of_site(claims: Sequence[Claim]) -> Claim:
    """What a site says of itself, by what each of its ranks does. Where they differ, as when a link broke
    while they were given θ, the site holds nothing whole: it is given θ.

    Raises:
        AgreementError: they have come for different things.
    """
    holds_one = len({(claim.round, claim.committed, claim.doubt) for claim in claims}) == 1
    for rank, claim in enumerate(claims):
        if claim.ready != claims[0].ready and holds_one:
            ready, other = (0, rank) if claims[0].ready else (rank, 0)
            raise AgreementError(
                f"rank {ready} of this site has come for a round, rank {other} for θ alone: build the "
                f"optimizer, load and call step() or sync() on all ranks of a site alike"
            )

    def common(field: str, otherwise: Any) -> Any:
        told = {getattr(claim, field) for claim in claims}
        return told.pop() if len(told) == 1 else otherwise

    digest = hashlib.blake2b(" ".join(claim.digest for claim in claims).encode(), digest_size=8).hexdigest()
    return Claim(
        round=common("round", -1),
        digest=digest,
        ready=all(claim.ready for claim in claims),
        links=common("links", ""),
        committed=common("committed", ""),
        doubt=common("doubt", ""),
        setup=claims[0].setup,
    )


@dataclass(frozen=True, kw_only=True)
class Member:
    """A site of a quorum.

    id: of this process; the sites are numbered in its order.
    name: of the site, which outlives its processes.
    store: where the store that it hosts is reached.
    where: the process, for people.
    """

    id: str
    name: str
    store: str
    claim: Claim
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the sites of a quorum do.

    attempt: the quorum's name, which no other quorum has.
    members: all that are linked, by id.
    workers: indices in `members` of those that hold the run's θ and are ready: they run the round, and the
        order of their indices is that of the sites.
    newcomers: the index of each member that is given θ, and of the one that gives it.
    runs: there is a round.
    keep_links: all members hold the same links, which join just them.
    strangers: members left out, because they were set up differently.
    namesakes: members left out, because another one has their name.
    """

    attempt: str
    members: tuple[Member, ...]
    workers: tuple[int, ...]
    newcomers: dict[int, int]
    runs: bool
    keep_links: bool
    strangers: tuple[Member, ...]
    namesakes: tuple[Member, ...] = ()

    def to_json(self) -> list[Any]:
        """What `plan` made it of."""
        candidates = [*self.members, *self.strangers, *self.namesakes]
        return [self.attempt, [asdict(member) for member in candidates]]

    @staticmethod
    def of_json(told: list[Any]) -> "Plan":
        attempt, members = told
        return plan(attempt, [Member(**one | {"claim": Claim(**one["claim"])}) for one in members])

    def index_of(self, id: str) -> int:
        """A member's index; −1 for one that is left out."""
        return next((k for k, member in enumerate(self.members) if member.id == id), -1)


def plan(attempt: str, quorum: Sequence[Member]) -> Plan:
    """
    1. A site in doubt about an attempt that another has committed will commit it too: it counts as done, and
       so do the inner steps that the site has come with. It is not ready for another round.
    2. Of several processes with one name the one that trained before takes part, or the first.
    3. The run is what most of the sites that are ready hold, of those who are furthest: rounds first, then
       numbers, then the first site. If none that is ready has done a round (a start, or a restart), of all:
       a site that has lost its checkpoints may be ready before the others have brought theirs.
    4. Ready sites that hold it run a round. All others are given its result: that of the round, if there is
       one, so that who has done no steps is not counted among the R of a round.
    """
    candidates, namesakes = _one_of_each_name(_settled(sorted(quorum, key=lambda member: member.id)))
    ready = [member for member in candidates if member.claim.ready]
    lead = _furthest([member for member in ready if member.claim.round > 0] or candidates)
    members = tuple(member for member in candidates if member.claim.setup == lead.setup)
    strangers = tuple(member for member in candidates if member.claim.setup != lead.setup)

    holding = [k for k, member in enumerate(members) if _state(member.claim) == _state(lead)]
    at_work = [k for k in holding if members[k].claim.ready]
    workers = at_work or holding  # and nobody who holds θ already needs it
    others = [k for k in range(len(members)) if k not in workers]
    return Plan(
        attempt=attempt,
        members=members,
        workers=tuple(workers),
        newcomers={index: workers[k % len(workers)] for k, index in enumerate(others)},
        runs=bool(at_work),
        keep_links=bool(lead.links) and {member.claim.links for member in members} == {lead.links},
        strangers=strangers,
        namesakes=namesakes,
    )


def _one_of_each_name(members: list[Member]) -> tuple[list[Member], tuple[Member, ...]]:
    """-> those who take part, in order, and those who can't. A process that has just died, and was started
    again, may be in a quorum with the new one: it is not in the next."""
    chosen: dict[str, Member] = {}
    for member in members:
        before = chosen.setdefault(member.name, member)
        if (member.claim.belongs, member.claim.round) > (before.claim.belongs, before.claim.round):
            chosen[member.name] = member
    return (
        [member for member in members if chosen[member.name] is member],
        tuple(member for member in members if chosen[member.name] is not member),
    )


def _settled(members: list[Member]) -> list[Member]:
    committed = {member.claim.committed: member.claim for member in members if member.claim.committed}
    settled = []
    for member in members:
        outcome = committed.get(member.claim.doubt)
        if outcome is not None:
            claim = replace(member.claim, round=outcome.round, digest=outcome.digest, ready=False)
            member = replace(member, claim=claim)
        settled.append(member)
    return settled


def _furthest(members: list[Member]) -> Claim:
    """Of equals, who is ready; then what most of them hold; then the first."""
    claims = [member.claim for member in members]
    states = [_state(claim) for claim in claims]
    return max(claims, key=lambda claim: (claim.round, claim.ready, states.count(_state(claim))))


def _state(claim: Claim) -> tuple[int, str, str]:
    return claim.round, claim.digest, claim.setup
