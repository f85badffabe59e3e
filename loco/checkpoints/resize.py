"""Resuming with another number of sites: which site continues which, without losing any update.

θ and m are the same on all sites, so a joining site receives them over the network from site 0. What differs
between sites is the residual, and in the middle of a round the inner steps done since: s = Δ + e. The s of a
leaving site is added exactly to the residuals of the sites that go on, its heirs.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from loco import kernels

from ..config import checked_weight
from ..net.transport import Transport
from ..round.outer.outer_state import OuterState


@dataclass(frozen=True)
class Roster:
    """Which new site continues which old one."""

    sites: tuple[int | None, ...]  # by new site: the old one that it continues; None: it joins
    leaving: tuple[int, ...]  # old sites that no new one continues, whose updates are handed over
    ranks_per_site: int

    @staticmethod
    def of(
        sites: Sequence[int | None] | None,
        lost: Sequence[int],
        *,
        old_sites: int,
        new_sites: int,
        ranks_per_site: int,
    ) -> "Roster":
        """`sites` and `lost` are those of `Checkpoints.load`; a ValueError if they don't fit the numbers."""
        if sites is None:
            sites = [site if site < old_sites else None for site in range(new_sites)]
        continued = [site for site in sites if site is not None]
        if len(sites) != new_sites:
            raise ValueError(
                f"sites must name an old site (or None) for each of {new_sites} sites, got {list(sites)}"
            )
        if len(set(continued)) < len(continued) or any(not 0 <= site < old_sites for site in continued):
            raise ValueError(
                f"sites must name each of the old sites 0 to {old_sites - 1} at most once, got {list(sites)}"
            )
        if sites[0] is None:
            raise ValueError(
                f"site 0 must continue an old site, from which joining sites receive θ: got {list(sites)}"
            )
        left = [site for site in range(old_sites) if site not in continued]
        if unknown := [site for site in lost if site not in left]:
            raise ValueError(f"lost must name old sites that leave, which are {left}: got {unknown}")
        return Roster(tuple(sites), tuple(site for site in left if site not in lost), ranks_per_site)

    def old_rank(self, rank: int) -> int | None:
        """The old rank whose folder this new rank continues from; None if it joins."""
        site = self.sites[rank // self.ranks_per_site]
        return None if site is None else site * self.ranks_per_site + rank % self.ranks_per_site

    @property
    def joining(self) -> list[int]:
        return [site for site, old_site in enumerate(self.sites) if old_site is None]

    def heirs(self, leaving_site: int) -> list[int]:
        """The sites to which a leaving site's update is offered, in order.

        Each leaving site starts with another one, to spread the updates. Joining sites are last: their
        residuals are empty, so they can hold anything exactly.
        """
        staying = [site for site, old_site in enumerate(self.sites) if old_site is not None]
        first = self.leaving.index(leaving_site) % len(staying)
        return staying[first:] + staying[:first] + self.joining


def update_of(outer: OuterState, tree: dict[str, Any]) -> Tensor:
    """s = Δ + e of what a rank of a leaving site saved. A ValueError if it is not finite."""
    own = tree["optimizer"]["loco"]
    for name in ("anchor", "residual"):
        if own[name] is not None:
            check_vector(own[name], outer.numel, f"the {name} that site {own['site']} left")
    with outer.parameters.over(own["weights"]).pieces(outer.start, outer.stop) as weights:
        encoded = kernels.encode(
            own["anchor"], weights, own["residual"], None, checked_weight(own.get("weight", 1.0))
        )
    if encoded.first_nonfinite >= 0:
        name = outer.name_at(encoded.first_nonfinite)
        raise ValueError(
            f"the update of {name} that site {own['site']} left is infinite or NaN: "
            f"lost=[{own['site']}] discards that site's updates"
        )
    return encoded.entries.values


def add_exactly(residual: Tensor, update: Tensor) -> Tensor:
    """Add to `residual`, in place, the elements of `update` whose sum FP32 holds exactly -> the others.

    TwoSum: with t = fl(e + x), the rounding error of t is (e − (t − b)) + (x − b) for b = fl(t − e), exactly.
    """
    total = residual + update
    back = total - residual
    error = (residual - (total - back)) + (update - back)
    exact = (error == 0) & total.isfinite() & (update != 0)
    residual.copy_(torch.where(exact, total, residual))
    return torch.where(exact, 0.0, update)


def hand_over(
    all_ranks: Transport, ranks: Sequence[int], update: Tensor | None, residual: Tensor, phase: str
) -> int:
    """Pass a leaving site's update from heir to heir, each of which adds what it can hold exactly to its
    residual. The first heir rounds what is left at the end.

    Args:
        ranks: the one that has read `update`, which is None on the others, and then its heirs.

    Returns:
        How many elements this rank had to round.
    """
    first = ranks[1]
    for source, target in pairwise([*ranks, first]):
        if all_ranks.rank == source != target:
            assert update is not None
            _send(all_ranks, update if bool(update.any()) else None, [target], phase)
        elif all_ranks.rank == target != source:
            update = _receive(all_ranks, source, phase)
        if all_ranks.rank == target:
            update = torch.zeros_like(residual) if update is None else add_exactly(residual, update)
    if update is None or all_ranks.rank != first:
        return 0
    residual.add_(update)
    return int((update != 0).sum())


def send_to_joining(all_ranks: Transport, roster: Roster, tree: Any, outer: OuterState) -> Any:
    """Send what the joining sites need from site 0: θ, m, counters, hyperparameters and `extra`. Each rank of
    site 0 sends to the ranks that hold the same slice.

    Returns:
        On a joining rank the tree to load; elsewhere `tree`.
    """
    phase, each = "state for joining sites", roster.ranks_per_site
    site, rank_in_site = divmod(all_ranks.rank, each)
    if site == 0:
        own = tree["optimizer"]["loco"] | {"residual": None, "weights": None, "inner_entries": 0}
        own.pop("weight", None)  # each site's own
        shared = tree | {"optimizer": tree["optimizer"] | {"state": {}, "loco": own}}
        _send(all_ranks, shared, [joining * each + rank_in_site for joining in roster.joining], phase)
    if site not in roster.joining:
        return tree
    tree = _receive(all_ranks, rank_in_site, phase)
    own = tree["optimizer"]["loco"]
    own["residual"] = None if outer.residual is None else torch.zeros(outer.numel)
    own["weights"] = [torch.empty_like(t, device="cpu") for t in outer.parameters.tensors]
    weights, slices = outer.parameters.over(own["weights"]), outer.part.slices
    for k, at in slices.items():  # w = cast(θ), once the ranks that share a θ have sent each other theirs
        anchor = own["anchor"]
        if k == rank_in_site:
            _send(all_ranks, anchor, [site * each + other for other in slices if other != k], phase)
        else:
            anchor = _receive(all_ranks, site * each + k, phase)
        check_vector(anchor, at.stop - at.start, f"{phase}: the θ that came")
        with weights.pieces(at.start, at.stop, write=True) as pieces:
            kernels.write_weights(anchor, pieces)
    return tree


def check_vector(found: Any, numel: int, what: str) -> None:
    """Kernels trust what they are given: a ValueError unless this is an FP32 vector of so many elements."""
    whole = isinstance(found, Tensor) and found.dtype == torch.float32 and tuple(found.shape) == (numel,)
    if not whole or not found.is_contiguous():
        raise ValueError(f"{what} is no vector of {numel} FP32 elements")


def _send(all_ranks: Transport, tree: Any, receivers: Sequence[int], phase: str) -> None:
    file = io.BytesIO()
    torch.save(tree, file)
    all_ranks.send_blob(file.getvalue(), receivers, phase=phase)


def _receive(all_ranks: Transport, sender: int, phase: str) -> Any:
    blob = all_ranks.receive_blob(sender, phase=phase)
    return torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
