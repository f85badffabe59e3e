"""The outer loop: the state that the sites share, and a round as its numbered steps (DESIGN's §2)."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from loco import kernels
from loco.kernels import Gate, OuterStep

from .agreement import agree_on_setup
from .errors import LocoError, ReplicaError
from .exchange import Exchange, Problem
from .layout import Layout
from .report import SyncReport
from .topology import Topology
from .wire import VERSION, Status

GATHER_ELEMENTS = 1 << 20  # of the anchor at a time inside a site: 4 MiB from each of its ranks


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all sites must have in common. Checked here, compared at construction, kept in checkpoints."""

    kind: str  # the optimizer's name
    sync_every: int  # H
    outer_lr: float  # α
    outer_momentum: float  # μ
    nesterov: bool
    gate: str  # "bf16", or "open": every entry is sent
    gate_gain: float  # γ

    def __post_init__(self) -> None:
        if self.sync_every < 1 or self.sync_every != int(self.sync_every):
            raise ValueError(f"sync_every must be a whole number >= 1, got {self.sync_every}")
        if not 0 < self.outer_lr < float("inf"):
            raise ValueError(f"outer_lr must be > 0 and finite, got {self.outer_lr}")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum}")
        if self.gate not in ("bf16", "open"):
            raise ValueError(f"gate must be 'bf16' or 'open', got {self.gate!r}")
        if not 0 < self.gate_gain < float("inf"):
            raise ValueError(f"gate_gain must be > 0 and finite, got {self.gate_gain}")


class OuterLoop:
    """Anchor θ, outer momentum m and residual e of this rank's slice, and the rounds over them.

    Args:
        layout: the parameters as one flat vector; a site's ranks hold a slice of the state each.
        settings: equal on all sites.
        topology: who the sites are.
        exchange: the exchange's class.

    Raises:
        ValueError, AgreementError: the parameters can't be synchronised, or the sites differ.
    """

    def __init__(
        self, layout: Layout, settings: Settings, topology: Topology, exchange: type[Exchange]
    ) -> None:
        self.layout = layout
        self.settings = settings
        self.topology = topology
        self.rounds = 0  # rounds done
        self._torn = False

        self._across, self._inside = topology.transports(layout.device)
        self._exchange = exchange(self._across, self._inside, lambda k: layout.names[k])
        self._gate = Gate(gain=settings.gate_gain) if settings.gate == "bf16" else None
        self._step = OuterStep(
            num_sites=topology.num_sites,
            lr=settings.outer_lr,
            momentum=settings.outer_momentum,
            nesterov=settings.nesterov,
        )
        _check_denormals(layout.device)
        self._everyone = topology.everyone(layout.device)
        setup = {"wire version": VERSION, "sites": topology.num_sites}
        setup |= vars(settings) | {"parameters": layout.describe()}
        agree_on_setup(self._everyone, topology.ranks_per_site, setup)

        # The ranks of a site share the flat state in equal slices, the last ones possibly shorter.
        self._width = -(-layout.numel // topology.ranks_per_site)
        edges = [min(topology.place * self._width + k, layout.numel) for k in (0, self._width)]
        self.start, self.stop = edges
        zeros = torch.zeros(self.stop - self.start, dtype=torch.float32, device=layout.device)
        self.anchor = torch.empty_like(zeros)
        self.momentum = torch.zeros_like(zeros) if settings.outer_momentum else None
        self.residual = zeros if self._gate is not None else None
        self._start_alike()

    @torch.no_grad()
    def round(self) -> SyncReport:
        """Steps 2 to 8 (step 1 is the caller's H inner steps).

        Until every site has confirmed that it received everything, nothing is written: a round that fails
        leaves θ, m, e and w as they were, and can be repeated.
        """
        self.check_whole()
        sent, received, inside = self._bytes()
        encoding = time.perf_counter()
        with self.layout.pieces(self.start, self.stop, write=True) as weights:
            # 2. Δ = float(cast(θ)) − float(w)   3. s = Δ + e   4. visible?   5. what to send
            encoded = kernels.encode(self.anchor, weights, self.residual, self._gate)
            # Both are asked always: a rank that skipped the second would leave its site waiting.
            problems = self._non_finite(encoded.first_nonfinite), self._site_drift()

            exchanging = time.perf_counter()
            contributions, payload_bytes = self._exchange.contributions(
                encoded,
                round=self.rounds + 1,
                numel=self.stop - self.start,
                problem=problems[0] or problems[1],
            )

            # 5. e = what was not sent   6. g = Σ / R   7. m and θ   8. w = cast(θ)
            applying = time.perf_counter()
            self._torn = True
            kernels.apply(
                self.anchor,
                self.momentum,
                weights,
                self.residual,
                encoded.entries,
                contributions,
                self._step,
            )
        self._share_anchor_in_site()
        self._torn = False
        self.rounds += 1
        done = time.perf_counter()

        numel, entries = self.stop - self.start, encoded.entries.values.numel()
        sent, received, inside = (
            now - before for now, before in zip(self._bytes(), (sent, received, inside), strict=True)
        )
        sites = self.topology.num_sites
        return SyncReport(
            round=self.rounds,
            numel=numel,
            entries=entries,
            density=entries / numel if numel else 0.0,
            payload_bytes=payload_bytes,
            sent_bytes=sent,
            received_bytes=received,
            site_bytes=inside,
            dense_bytes=2 * (sites - 1) * 4 * numel // sites,
            residual_norm=0.0 if self.residual is None else kernels.norm(self.residual),
            seconds={
                "encode": exchanging - encoding,
                "exchange": applying - exchanging,
                "apply": done - applying,
            },
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything of this rank, by reference: plain numbers, strings and tensors.

        The working weights are part of it: between rounds each site has its own, and a model file that
        one rank wrote for all would lose the others'.
        """
        self.check_whole()
        return {
            "format": 1,
            **self._identity(),
            "settings": vars(self.settings).copy(),
            "round": self.rounds,
            "anchor": self.anchor,
            "momentum": self.momentum,
            "residual": self.residual,
            "weights": [p.detach() for p in self.layout.params],
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that is not this rank's, before anything is changed."""
        if state.get("format") != 1:
            raise ValueError(f"a loco state of format {state.get('format')!r}; this is format 1")
        for key, mine in (self._identity() | {"settings": vars(self.settings)}).items():
            _check_same(key, state.get(key), mine)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `check_state` has passed, weights included."""
        self.rounds = int(state["round"])
        for mine, saved in (
            (self.anchor, state["anchor"]),
            (self.momentum, state["momentum"]),
            (self.residual, state["residual"]),
            *zip(self.layout.params, state["weights"], strict=True),
        ):
            if mine is not None:
                mine.copy_(saved)
        self._torn = False

    def check_whole(self) -> None:
        """Refuse to go on, or to save, after a round was stopped (Ctrl-C) while it was being applied.

        Raises:
            LocoError: the state is half of one round and half of the next.
        """
        if self._torn:
            raise LocoError(
                f"round {self.rounds + 1} was interrupted while it was being applied: this rank's state is "
                f"neither before nor after it. Load the last checkpoint"
            )

    def _start_alike(self) -> None:
        """θ is site 0's weights, on all sites, verified; w = cast(θ)."""
        with torch.no_grad(), self.layout.pieces(self.start, self.stop, write=True) as weights:
            for part, w in zip(self.anchor.split([w.numel() for w in weights]), weights, strict=True):
                part.copy_(w)
            self._across.broadcast(self.anchor, phase="first anchor")
            kernels.write_weights(self.anchor, weights)
        with torch.no_grad():
            self._share_anchor_in_site()

        # Every rank tells every other what it sees, so that all of them refuse, or none.
        bad = self.anchor.isfinite().logical_not_().nonzero()
        first_bad = self.start + int(bad[0]) if bad.numel() else -1
        digest = kernels.digest(self.anchor)
        record = first_bad.to_bytes(8, "little", signed=True) + digest.to_bytes(8, "little")
        records = self._everyone.swap_records(record, phase="check of the first anchor")
        for rank, (raw, of_site_0) in enumerate(
            zip(
                records,
                records[: self.topology.ranks_per_site] * self.topology.num_sites,
                strict=True,
            )
        ):
            position = int.from_bytes(raw[:8], "little", signed=True)
            if position >= 0:
                name = self.layout.name_at(position)
                raise ValueError(f"parameter {name} is infinite or NaN on site 0")
            if raw != of_site_0:
                site = rank // self.topology.ranks_per_site
                raise ReplicaError(f"site {site} did not receive the anchor that site 0 sent")

    def _share_anchor_in_site(self) -> None:
        """Each rank of a site has the new θ of its slice; all need its cast."""
        if self._inside.size == 1:
            return
        for low, high in pairwise([*range(0, self._width, GATHER_ELEMENTS), self._width]):
            # Slices at the end may be shorter than the others, or empty: what lacks is not looked at.
            part = self.anchor.new_zeros(high - low)
            mine = self.anchor[low:high]
            part[: mine.numel()] = mine
            phase = f"round {self.rounds + 1}, anchor inside the site"
            for place, values in enumerate(self._inside.gather(part, phase=phase)):
                first = place * self._width + low
                last = min(first + high - low, (place + 1) * self._width, self.layout.numel)
                if place == self.topology.place or first >= last:
                    continue
                with self.layout.pieces(first, last, write=True) as weights:
                    kernels.write_weights(values[: last - first], weights)

    def _non_finite(self, position: int) -> Problem | None:
        if position < 0:
            return None
        return Problem(Status.NON_FINITE, self.layout.index_at(self.start + position))

    def _site_drift(self) -> Problem | None:
        """The ranks of a site exchange slices of what must be one and the same model."""
        if self._inside.size == 1:
            return None
        with self.layout.pieces(0, self.layout.numel) as weights:
            mine = b"".join(kernels.digest(w).to_bytes(8, "little") for w in weights)
        phase = f"round {self.rounds + 1}, weights inside the site"
        digests = self._inside.swap_records(mine, phase=phase)
        if all(digest == mine for digest in digests):
            return None
        return Problem(Status.SITE_DRIFT, self.topology.site)

    def _bytes(self) -> tuple[int, int, int]:
        return self._across.sent_bytes, self._across.received_bytes, self._inside.sent_bytes

    def _identity(self) -> dict[str, Any]:
        """Whose state it is."""
        return {
            "site": self.topology.site,
            "num_sites": self.topology.num_sites,
            "place": self.topology.place,
            "ranks_per_site": self.topology.ranks_per_site,
            "parameters": self.layout.describe(),
        }


def _check_same(key: str, saved: Any, mine: Any) -> None:
    """Raise a ValueError that names the first thing in which a saved state differs."""
    if isinstance(mine, dict) and isinstance(saved, dict):
        for name in mine | saved:
            _check_same(name, saved.get(name), mine.get(name))
    elif saved != mine:
        if isinstance(mine, list) and isinstance(saved, list):
            pairs = [(a, b) for a, b in zip(saved, mine, strict=False) if a != b]
            saved, mine = pairs[0] if pairs else (len(saved), len(mine))
        raise ValueError(
            f"this state was saved with {key} = {saved}, this optimizer has {mine}: each rank loads the "
            f"state that it saved, into an optimizer built with the same settings"
        )


def _check_denormals(device: torch.device) -> None:
    """The sites' bits agree only if all of them keep denormals."""
    tiny = torch.full((1,), 2.0**-140, dtype=torch.float32, device=device)
    if float(tiny * 0.5) == 0.0:
        raise ValueError(
            "this process flushes denormal numbers to zero, so its bits would differ from the other sites': "
            "call torch.set_flush_denormal(False) before you build the optimizer"
        )
