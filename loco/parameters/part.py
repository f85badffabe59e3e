"""Which elements of its flat parameters a rank exchanges, and which ranks of its site hold the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from loco.kernels import Entries


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Some ranks of a site, and the parameters, by number, of which they all hold the same elements."""

    ranks: tuple[int, ...]
    params: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a rank exchanges of its flat parameters, across the sites with the ranks of the same number.

    If every rank of a site holds all parameters, the ranks share the work: each exchanges a slice, and gives
    the others its new θ. If any parameter is sharded, a rank's flat parameters are what it holds itself, and
    it exchanges all of that; nothing is gathered inside the site.

    Attributes:
        rank: this one, in its site.
        slices: of this rank's flat parameters: who in the site exchanges what. Equal in length, but the last
            ones may be shorter. A rank that shards has only its own.
        copies: of the whole site: whose weights must be equal.
        exchanged_by: by parameter, how many ranks of the site exchange each of its elements.
    """

    rank: int
    slices: dict[int, slice]
    copies: tuple[Copies, ...]
    exchanged_by: tuple[int, ...]

    @staticmethod
    def of_whole(rank: int, ranks: int, sizes: Sequence[int]) -> "Part":
        """A slice of parameters of these sizes, which `ranks` ranks hold whole."""
        numel = sum(sizes)
        width = -(-numel // ranks)
        edges = [min(k * width, numel) for k in range(ranks + 1)]
        slices = {k: slice(edges[k], edges[k + 1]) for k in range(ranks)}
        everything = Copies(ranks=tuple(range(ranks)), params=tuple(range(len(sizes))))
        return Part(
            rank=rank,
            slices=slices,
            copies=(everything,) if ranks > 1 else (),
            exchanged_by=(1,) * len(sizes),
        )

    @staticmethod
    def of_shards(rank: int, shards: Sequence[Sequence[Any]], numel: int) -> "Part":
        """All that this rank holds.

        Args:
            shards: by rank of the site, which part it holds of each parameter.
            numel: of this rank.
        """
        holders = [
            [tuple(other for other, theirs in enumerate(shards) if theirs[k] == shard) for shard in column]
            for k, column in enumerate(zip(*shards, strict=True))
        ]
        params: dict[tuple[int, ...], list[int]] = {}
        for k, by_rank in enumerate(holders):
            for ranks in sorted(set(by_rank)):
                params.setdefault(ranks, []).append(k)
        return Part(
            rank=rank,
            slices={rank: slice(0, numel)},
            copies=tuple(
                Copies(ranks=ranks, params=tuple(held)) for ranks, held in params.items() if len(ranks) > 1
            ),
            exchanged_by=tuple(len(by_rank[rank]) for by_rank in holders),
        )

    @property
    def own(self) -> slice:
        return self.slices[self.rank]

    def norm(self, entries: Entries, starts: Sequence[int]) -> float:
        """The share of this rank's part in the norm of what the site would send: together, the ranks of a
        site count each element once, as a site of one rank does.

        Args:
            entries: of the whole part.
            starts: where the parameters begin in the flat parameters.
        """
        if len(set(self.exchanged_by)) <= 1:
            counted = self.exchanged_by[0] if self.exchanged_by else 1
            return float(torch.linalg.vector_norm(entries.values)) / math.sqrt(counted)
        found = []
        for counted, run in groupby(range(len(starts)), key=lambda k: self.exchanged_by[k]):
            found.append((next(run), counted))
        edges = torch.tensor([starts[first] for first, _ in found] + [self.own.stop])
        if entries.starts is not None:
            edges = torch.searchsorted(entries.indices(), edges.to(entries.values.device))
        bounds = edges.tolist()
        norms = [
            float(torch.linalg.vector_norm(entries.values[low:high])) / math.sqrt(counted)
            for low, high, (_, counted) in zip(bounds[:-1], bounds[1:], found, strict=True)
        ]
        return math.hypot(*norms)
