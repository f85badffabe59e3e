"""Resuming with another number of sites: which site continues which, without losing any update.

θ and m are the same on all sites, so a joining site receives them over the network from site 0. What differs
between sites is the residual, and in the middle of a round the inner steps done since: s = Δ + e. The s of a
leaving site is added exactly to the residuals of the sites that go on, its heirs.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loco import kernels

from ..net.transport import Transport, as_bytes, to_bytes
from ..round.parameters import FlatParameters
from ..round.state import identity
from .protocol import Saveable

_ELEMENTS_AT_ONCE = 1 << 20  # of θ, between the ranks of a joining site: 4 MiB


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
        """
        Args:
            sites, lost: as the user gave them to `Checkpoints.load`.
            old_sites, new_sites: how many there were, and are.

        Raises:
            ValueError: `sites` or `lost` don't match these numbers.
        """
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

    def leaving_ranks(self) -> Iterator[int]:
        for site in self.leaving:
            yield from range(site * self.ranks_per_site, (site + 1) * self.ranks_per_site)

    def readers(self, leaving_rank: int, visible_to: Mapping[int, Sequence[int]]) -> list[int]:
        """The new ranks that see a leaving rank's folder, and hold the slice of θ that it belongs to."""
        rank_in_site = leaving_rank % self.ranks_per_site
        return [r for r in visible_to.get(leaving_rank, ()) if r % self.ranks_per_site == rank_in_site]

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


def update_of(optimizer: Saveable, state: dict[str, Any], old_site: int) -> Tensor:
    """s = Δ + e of a leaving site's state, for this rank's slice.

    Raises:
        ValueError: it is not finite.
    """
    outer, own = optimizer.outer_state, state["loco"]
    pieces = _pieces(own["weights"], outer.parameters, outer.start, outer.stop)
    encoded = kernels.encode(own["anchor"], pieces, own["residual"], None)
    if encoded.first_nonfinite >= 0:
        name = outer.parameters.name_at(outer.start + encoded.first_nonfinite)
        raise ValueError(
            f"the update of {name} that site {old_site} left is infinite or NaN: "
            f"lost=[{old_site}] discards that site's updates"
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
    all_ranks: Transport,
    roster: Roster,
    leaving_site: int,
    reader: int,
    update: Tensor | None,
    residual: Tensor,
) -> int:
    """Pass a leaving site's update from heir to heir, each of which adds what it can hold exactly.

    The ranks that hold the same slice of θ call this together. The first heir rounds what is left at the end.

    Args:
        reader: the rank that has read `update`, which is None on the other ranks.
        residual: of this rank, changed in place.

    Returns:
        How many elements this rank had to round.
    """
    rank_in_site = all_ranks.rank % roster.ranks_per_site
    heirs = [site * roster.ranks_per_site + rank_in_site for site in roster.heirs(leaving_site)]
    phase, holder = f"what site {leaving_site} left", reader
    for heir in [*heirs, heirs[0]]:
        update = _moved(all_ranks, holder, heir, update, residual.numel(), phase)
        holder = heir
        if update is not None and heir == all_ranks.rank:
            update = add_exactly(residual, update)
    if update is None or holder != all_ranks.rank:
        return 0
    residual.add_(update)
    return int((update != 0).sum())


def _moved(
    all_ranks: Transport, source: int, target: int, update: Tensor | None, numel: int, phase: str
) -> Tensor | None:
    """`update` on the rank `target`. If nothing is left of it, only a byte is sent."""
    if source == target or all_ranks.rank not in (source, target):
        return update
    if all_ranks.rank == source:
        assert update is not None
        blob = to_bytes(update) if bool((update != 0).any()) else b"\0"
        all_ranks.send_blob(blob, [target], phase=phase)
        return None
    blob = all_ranks.receive_blob(source, phase=phase)
    return (
        torch.zeros(numel, dtype=torch.float32)
        if len(blob) == 1
        else torch.frombuffer(bytearray(blob), dtype=torch.float32)
    )


def send_to_joining(
    all_ranks: Transport, roster: Roster, tree: dict[str, Any] | None, optimizer: Saveable
) -> dict[str, Any]:
    """Send what the joining sites need from site 0: θ, m, counters, hyperparameters and `extra`. Each rank of
    site 0 sends to the ranks that hold the same slice.

    Returns:
        On a joining rank the tree to load; elsewhere `tree`.
    """
    phase = "state for joining sites"
    site, rank_in_site = divmod(all_ranks.rank, roster.ranks_per_site)
    if site == 0:
        assert tree is not None
        own = tree["optimizer"]["loco"]
        message = {
            "shared": {name: own[name] for name in ("round", "local_step", "anchor", "momentum", "tuner")},
            "param_groups": tree["optimizer"]["param_groups"],
            "extra": tree["extra"],
        }
        file = io.BytesIO()
        torch.save(message, file)
        receivers = [joining * roster.ranks_per_site + rank_in_site for joining in roster.joining]
        all_ranks.send_blob(file.getvalue(), receivers, phase=phase)
    if tree is not None:
        return tree
    blob = all_ranks.receive_blob(rank_in_site, phase=phase)
    message = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    anchor, parameters = message["shared"]["anchor"], optimizer.outer_state.parameters
    own = message["shared"] | {
        "format": 1,
        **identity(optimizer.topology, parameters),
        "settings": vars(optimizer.settings).copy(),
        "residual": None if optimizer.outer_state.residual is None else torch.zeros_like(anchor),
        "weights": _cast_weights(all_ranks, roster.ranks_per_site, parameters, anchor, phase),
        "inner_entries": 0,
    }
    state = {"state": {}, "param_groups": message["param_groups"], "loco": own}
    return {"optimizer": state, "extra": message["extra"]}


def _cast_weights(
    all_ranks: Transport, ranks_per_site: int, parameters: FlatParameters, anchor: Tensor, phase: str
) -> list[Tensor]:
    """w = cast(θ) on a joining rank, once the ranks of its site have sent each other their slices of θ."""
    weights = [
        torch.empty(shape, dtype=dtype)
        for shape, dtype in zip(parameters.shapes, parameters.dtypes, strict=True)
    ]
    site, rank_in_site = divmod(all_ranks.rank, ranks_per_site)
    numel, width = parameters.numel, -(-parameters.numel // ranks_per_site)
    for low in range(0, width, _ELEMENTS_AT_ONCE):
        parts: list[tuple[int, Tensor]] = []  # by rank in this site: where in the flat vector, and θ there
        for k in range(ranks_per_site):
            start = k * width + low
            length = max(min(start + _ELEMENTS_AT_ONCE, (k + 1) * width, numel) - start, 0)
            parts.append((start, torch.empty(length, dtype=torch.float32, device=all_ranks.device)))
        own = parts[rank_in_site][1].copy_(anchor[low : low + _ELEMENTS_AT_ONCE])
        incoming = {site * ranks_per_site + k: as_bytes(values) for k, (_, values) in enumerate(parts)}
        del incoming[all_ranks.rank]
        all_ranks.swap(dict.fromkeys(incoming, as_bytes(own)), incoming, phase=phase)
        for start, values in parts:
            kernels.write_weights(values.cpu(), _pieces(weights, parameters, start, start + len(values)))
    return weights


def _pieces(weights: list[Tensor], parameters: FlatParameters, start: int, stop: int) -> list[Tensor]:
    """The elements `start` to `stop` of the flat vector, in order. Views, where a weight is contiguous."""
    pieces = []
    for weight, begin in zip(weights, parameters.starts, strict=True):
        low, high = max(start, begin), min(stop, begin + weight.numel())
        if low < high:
            pieces.append(weight.reshape(-1)[low - begin : high - begin].contiguous())
    return pieces
