"""What is done once all sites have met: they tell each other what they are, measure, and predict."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from ...members.fixed import FixedSites
from ...members.sites import Sites
from .facts import Facts, clock_offsets, clock_problems, version_problems
from .links import PINGS, LinkMeasurement
from .methods import METHODS
from .network import Network
from .ports import connect_backwards, port_problems
from .rounds import Prediction, predict
from .work import Work, measure_work, slowest


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found, the same on all ranks.

    Attributes:
        sites: in their order.
        ranks: of each site.
        parameters: of the model whose rounds are predicted.
        problems: sentences, each with what to do.
        network: None: nothing was measured.
        clocks: seconds by which each site's is ahead of most.
        work: of the slowest rank, by method.
        rounds: of one rank, by method.
        sent_bytes: by this rank, to measure.
    """

    sites: Sequence[Facts]
    ranks: int
    parameters: int
    problems: Sequence[str]
    network: Network | None = None
    clocks: Sequence[float] = ()
    work: Mapping[str, Work] | None = None
    rounds: Sequence[Prediction] = ()
    sent_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "sites": [asdict(one) for one in self.sites],
            "clocks": list(self.clocks),
            "findings": list(self.problems),
        }
        if self.network is not None:
            names = [one.name for one in self.sites]
            found |= {
                "links": [
                    {"from": names[a], "to": names[b], "bytes_per_second": rate}
                    | {"round_trips": self.network.round_trips[min(a, b), max(a, b)]}
                    for (a, b), rate in self.network.rates.items()
                ],
                "costs": asdict(self.network.costs()),
                "work": {name: asdict(one) for name, one in (self.work or {}).items()},
                "rounds": [asdict(one) | {"total": one.total} for one in self.rounds],
            }
        return found


def examine(
    sites: Sites, mine: Facts, *, parameters: int, limit: float, say: Callable[[str], object]
) -> Examination:
    """All ranks do it together.

    Args:
        parameters: of the model whose rounds are predicted.
        limit: megabytes that a site may send; of all sites' the least counts.
        say: a line of progress.

    Raises:
        ValueError: there is only one site.
        LocoError: a site is lost, or does something else.
    """
    if sites.num_sites < 2:
        raise ValueError("LOCO_SITES must be 2 or more: one site has nobody to meet")
    fixed, each, number = sites.fixed, sites.ranks_per_site, sites.rank_in_site
    assert fixed is not None

    def exchange(note: dict[str, Any], what: str) -> list[dict[str, Any]]:
        return sites.rendezvous.exchange_notes(note, f"doctor: {what}")

    mine = replace(mine, address=fixed.endpoint.advertised or fixed.endpoint.host)
    told = exchange({"facts": asdict(mine), "limit": limit}, "facts")
    facts = [Facts.read(one["facts"]) for one in told[::each]]
    names = [one.name for one in facts]
    problems = [problem for one in facts for problem in one.problems]
    if differing := version_problems(facts):
        problems += [*differing, "the links were not measured, since the versions differ"]
        return Examination(sites=facts, ranks=each, parameters=parameters, problems=problems)

    unreachable = connect_backwards(fixed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own_work = {method.name: measure_work(method, device) for method in METHODS}
    limit = min(one["limit"] for one in told)
    say(f"measuring the links: each site sends {limit:,.4g} MB at most, in less than a minute")
    transport = fixed.all_ranks()
    measurement = LinkMeasurement(
        transport,
        range(number, transport.size, each),
        sites.site,
        most_bytes=int(limit * 1e6 / each),
        told=say,
        names=names,
    )
    note = measurement.run().note() | {"store": _store_seconds(fixed), "unreachable": unreachable}
    note["work"] = {name: asdict(one) for name, one in own_work.items()}
    notes = exchange(note, "figures")

    network = Network.of(notes)
    clocks = clock_offsets(network.ahead, len(names))
    problems += port_problems([one["unreachable"] for one in notes]) + clock_problems(names, clocks)
    work = {name: slowest([Work.read(one["work"][name]) for one in notes]) for name in own_work}
    numel, costs = -(-parameters // each), network.costs()
    return Examination(
        sites=facts,
        ranks=each,
        parameters=parameters,
        problems=problems,
        network=network,
        clocks=clocks,
        work=work,
        rounds=[predict(method, numel, len(names), costs, work[method.name]) for method in METHODS],
        sent_bytes=transport.sent_bytes,
    )


def _store_seconds(sites: FixedSites) -> float:
    """Of a request to the store that is answered, as that for a round's verdict is."""
    found: list[float] = []
    for _ in range(PINGS):
        began = time.perf_counter()
        sites.store.check(["any"])
        found.append(time.perf_counter() - began)
    return median(found)
