"""Sites that come and go between two runs: who continues whom, and how nothing of who left is lost.

θ and m are the same on all sites, so whoever joins takes them over the network from site 0. What is a site's
own is its residual, and inside a round what its inner steps have done: s = Δ + e. Of a site that leaves, s is
added to the residuals of those that go on, exactly.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loco import kernels

from ..net.transport import Transport, as_bytes
from ..round.outer_state import OuterState
from ..round.state import identity


@dataclass(frozen=True)
class Roster:
    """Who continues whom."""

    sites: tuple[int | None, ...]  # by new site: the old one that it continues; None: it joins
    leaving: tuple[int, ...]  # old sites that nobody continues, whose updates are handed over
    ranks_per_site: int

    @staticmethod
    def of(
        sites: Sequence[int | None] | None, lost: Sequence[int], *, old: int, new: int, each: int
    ) -> "Roster":
        """
        Args:
            sites, lost: as the user gave them to `Checkpoints.load`.
            old, new: numbers of sites.
            each: ranks per site.

        Raises:
            ValueError: they don't fit.
        """
        if sites is None:
            sites = [k if k < old else None for k in range(new)]
        continued = [k for k in sites if k is not None]
        if len(sites) != new:
            raise ValueError(
                f"sites must name an old site (or None) for each of {new} sites, got {list(sites)}"
            )
        if len(set(continued)) < len(continued) or any(not 0 <= k < old for k in continued):
            raise ValueError(
                f"sites must name each of the old sites 0 to {old - 1} at most once, got {list(sites)}"
            )
        if sites[0] is None:
            raise ValueError(
                f"site 0 must continue an old site, because others take θ from it: got {list(sites)}"
            )
        left = [k for k in range(old) if k not in continued]
        if strangers := [k for k in lost if k not in left]:
            raise ValueError(f"lost names old sites that leave, of which there are {left}: got {strangers}")
        return Roster(tuple(sites), tuple(k for k in left if k not in lost), each)

    def old_rank(self, rank: int) -> int | None:
        """Whose folder this new rank continues."""
        site = self.sites[rank // self.ranks_per_site]
        return None if site is None else site * self.ranks_per_site + rank % self.ranks_per_site

    @property
    def joining(self) -> list[int]:
        return [k for k, old in enumerate(self.sites) if old is None]

    def heirs(self, leaver: int) -> list[int]:
        """The sites to which an old site's update is offered, in order. Those that leave begin with different
        ones; who joins is last, and holds anything exactly, since its residual is empty."""
        staying = [k for k, old in enumerate(self.sites) if old is not None]
        first = self.leaving.index(leaver) % len(staying)
        return staying[first:] + staying[:first] + self.joining


def update_of(outer: OuterState, state: dict[str, Any], old_site: int) -> Tensor:
    """s = Δ + e of another site's state, for this rank's slice.

    Raises:
        ValueError: it is not finite.
    """
    own, weights = state["loco"], []
    for w, begin in zip(own["weights"], outer.parameters.starts, strict=True):
        low, high = max(outer.start, begin), min(outer.stop, begin + w.numel())
        if low < high:
            weights.append(w.reshape(-1)[low - begin : high - begin].contiguous())
    encoded = kernels.encode(own["anchor"], weights, own["residual"], None)
    if encoded.first_nonfinite >= 0:
        name = outer.parameters.name_at(outer.start + encoded.first_nonfinite)
        raise ValueError(
            f"site {old_site} left an update of {name} that is infinite or NaN: "
            f"lost=[{old_site}] leaves it behind"
        )
    return encoded.entries.values


def add_exactly(residual: Tensor, extra: Tensor) -> Tensor:
    """Add to `residual`, in place, the elements of `extra` whose sum FP32 holds exactly -> the others.

    TwoSum: with t = fl(e + x), the rounding error of t is (e − (t − b)) + (x − b) for b = fl(t − e), exactly.
    """
    total = residual + extra
    back = total - residual
    error = (residual - (total - back)) + (extra - back)
    exact = (error == 0) & total.isfinite() & (extra != 0)
    residual.copy_(torch.where(exact, total, residual))
    return torch.where(exact, 0.0, extra)


def hand_over(
    everyone: Transport, roster: Roster, leaver: int, reader: int, extra: Tensor | None, residual: Tensor
) -> int:
    """Pass a leaver's update from heir to heir, each of which adds what it can hold exactly.

    All ranks of one place call this together. What nobody holds is rounded at the first.

    Args:
        reader: the rank that has read `extra`; None elsewhere.
        residual: of this rank, changed in place.

    Returns:
        How many elements this rank had to round.
    """
    each, place = roster.ranks_per_site, everyone.rank % roster.ranks_per_site
    heirs = [site * each + place for site in roster.heirs(leaver)]
    phase, rounded, holder = f"what site {leaver} left", 0, reader
    for heir in [*heirs, heirs[0]]:
        extra = _moved(everyone, holder, heir, extra, residual.numel(), phase)
        holder = heir
        if extra is not None and heir == everyone.rank:
            extra = add_exactly(residual, extra)
    if extra is not None and holder == everyone.rank:
        rounded = int((extra != 0).sum())
        residual.add_(extra)
    return rounded


def _moved(
    everyone: Transport, source: int, target: int, extra: Tensor | None, numel: int, phase: str
) -> Tensor | None:
    """`extra` at the target. Nothing travels, but a byte that says so, when there is nothing left of it."""
    if source == target or everyone.rank not in (source, target):
        return extra
    if everyone.rank == source:
        assert extra is not None
        some = bool((extra != 0).any())
        everyone.swap({target: everyone.message(bytes([some]))}, {}, phase=phase)
        if some:
            everyone.swap({target: as_bytes(extra).to(everyone.device)}, {}, phase=phase)
        return None
    some = torch.zeros(1, dtype=torch.uint8, device=everyone.device)
    everyone.swap({}, {source: some}, phase=phase)
    values = torch.zeros(numel, dtype=torch.float32, device=everyone.device)
    if bool(some):
        everyone.swap({}, {source: as_bytes(values)}, phase=phase)
    return values.cpu()


def send_to_joining(
    everyone: Transport, roster: Roster, tree: dict[str, Any] | None, outer: OuterState
) -> Any:
    """What a joining rank takes from that of its place in site 0, which sends it: θ, m, and `extra`, counters
    and hyperparameters. -> on a joining rank the state to load and `extra`; elsewhere `tree`."""
    phase, each = "state for sites that join", roster.ranks_per_site
    site, place = divmod(everyone.rank, each)
    if site == 0:
        assert tree is not None
        joining = [k * each + place for k in roster.joining]
        own = tree["optimizer"]["loco"]
        shared = {name: own[name] for name in ("round", "local_step", "anchor", "momentum", "tuner")}
        file = io.BytesIO()
        torch.save(
            {"shared": shared, "param_groups": tree["optimizer"]["param_groups"], "extra": tree["extra"]},
            file,
        )
        everyone.send_blob(file.getvalue(), joining, phase=phase)
    if tree is not None:
        return tree
    blob = everyone.receive_blob(place, phase=phase)
    taken = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    own = taken["shared"] | {
        "format": 1,
        **identity(outer),
        "settings": vars(outer.settings).copy(),
        "residual": None if outer.residual is None else torch.zeros_like(taken["shared"]["anchor"]),
        "weights": [p.detach() for p in outer.parameters.params],  # until they are cast from θ
        "inner_entries": 0,
    }
    inner = {"state": {}, "param_groups": taken["param_groups"]}
    return {"optimizer": inner | {"loco": own}, "extra": taken["extra"]}
