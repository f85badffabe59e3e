"""What all ranks have measured of the links, put together by site."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .links import Points
from .rounds import Costs

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Network:
    """
    Attributes:
        round_trips: seconds, by pair of sites, the lower one first.
        ahead: seconds by which the clock of the second is ahead.
        rates: bytes a second from the first to the second, of all their ranks.
        together: as of `Measured`.
        store: seconds of a request to the store, of the slowest rank.
    """

    round_trips: Mapping[Pair, Sequence[float]]
    ahead: Mapping[Pair, float]
    rates: Mapping[Pair, float]
    together: Points
    store: float

    @staticmethod
    def of(notes: Sequence[Mapping[str, Any]]) -> "Network":
        """
        Args:
            notes: by rank: `Measured.note`, and its requests to the `store`.
        """
        trips: defaultdict[Pair, list[float]] = defaultdict(list)
        rates: defaultdict[Pair, float] = defaultdict(float)
        ahead: dict[Pair, float] = {}
        for note in notes:
            for a, b, found in note["round_trips"]:
                trips[a, b] += found
            for to, source, rate in note["rates"]:
                rates[source, to] += rate
            for a, b, seconds in note["ahead"]:
                ahead.setdefault((a, b), seconds)
        together = [(size, seconds) for size, seconds in notes[0]["together"]]
        store = max(note["store"] for note in notes)
        return Network(round_trips=trips, ahead=ahead, rates=rates, together=together, store=store)

    def costs(self) -> Costs:
        """Of a round, which waits for the slowest."""
        one_way = max(median(trips) for trips in self.round_trips.values()) / 2
        return Costs(one_way=one_way, store=self.store, together=self.together)
