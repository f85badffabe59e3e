"""SparseLoCo (arXiv 2508.15706), the lossy baseline: chunk-wise top-k in 2 bits, with error feedback."""

import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import loco
from experiments.methods.topk import pack, plan_chunks, quantise, top_k, unpack
from experiments.settings.config import SparseLoCoConfig
from loco.inner.wrapper import Wrapper
from loco.parameters.flat_parameters import FlatParameters
from loco.report import SiteTotals, dense_bytes
from loco.round.joining.handshake import agree_on_setup

_built = count()  # alike on all ranks


class SparseLoCo(Wrapper):
    """Exchange the largest pseudo-gradients after every H inner steps, in 2 bits each.

    On each of R sites:

        Δ = float(cast(θ)) − float(w)            what the inner steps did
        e = β·e + Δ                              error feedback, in place of outer momentum
        v = Q(top-k(e))                          what is sent: see `plan_chunks` and `quantise`
        e = e − v
        g = (Σ v, in site order) / R
        θ = θ − α·g
        w = cast(θ)

    `param_groups` and `state` are the inner optimizer's own. Its rounds can't be saved: it is for runs that
    are compared from their start to their end.

    Args:
        inner: the optimizer to wrap, built on the model's parameters. θ starts as site 0's weights.
        sync_every: H, inner steps per round.
        outer_lr: α. The paper tunes it between 0.4 and 1; with 1, the authors' own choice for 2 bits at
            scale, θ moves by just what is sent.
        settings: β, k and what else is the method's own.
        topology: who the sites are; a site must be one rank.

    Raises:
        ValueError: a parameter can't be synchronised.
        AgreementError: the sites were built differently.
    """

    def __init__(
        self,
        inner: Optimizer,
        *,
        sync_every: int = 8,
        outer_lr: float = 1.0,
        settings: SparseLoCoConfig | None = None,
        topology: loco.Topology | None = None,
    ) -> None:
        super().__init__(inner)
        self.topology = topology or loco.Topology()
        self.settings = settings or SparseLoCoConfig()
        self.sync_every, self.outer_lr = sync_every, outer_lr
        self.local_step = 0  # inner steps since the last round
        self.round = 0  # rounds done
        self.last_report: loco.SyncReport | None = None

        self._layout = FlatParameters(inner)
        setup = {"kind": "SparseLoCo", "sync_every": sync_every, "outer_lr": outer_lr}
        setup |= asdict(self.settings) | {"parameters": self._layout.describe()}
        agree_on_setup(self.topology.all_ranks(), 1, setup)
        device = self._layout.device
        self._plan = plan_chunks(self._layout.shapes, self.settings.k, device)
        self._across, _ = self.topology.connect(device, f"SparseLoCo {next(_built)}/0")
        self.anchor = torch.zeros(self._layout.numel, device=device)  # θ
        self.residual = torch.zeros_like(self.anchor)  # e
        with torch.no_grad(), self._layout.pieces(0, self._layout.numel, write=True) as weights:
            self.anchor.copy_(torch.cat([w.float() for w in weights]))
            self._across.broadcast(self.anchor, phase="first anchor")
            self._write(weights)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """An inner step; every `sync_every`-th call also runs a round. Returns the inner step's loss."""
        loss = self.inner.step() if closure is None else self.inner.step(closure)
        self.local_step += 1
        if self.local_step >= self.sync_every:
            self.sync()
        return loss

    @torch.no_grad()
    def sync(self) -> loco.SyncReport:
        """Run a round now, on every rank.

        Raises:
            NonFiniteError: on all sites; one has an infinity or a NaN. Nothing was changed.
            TransportError: a site is lost. Nothing was changed on this one.
        """
        across, plan, numel = self._across, self._plan, self._layout.numel
        sent, received = across.sent_bytes, across.received_bytes
        encoding = time.perf_counter()
        self._layout.check_unchanged(self.inner)
        with self._layout.pieces(0, numel, write=True) as weights:
            update = self.residual * self.settings.decay + self._pseudo_grad(weights)
            indices = top_k(update, plan)
            chosen = update[plan.to_flat(indices)]
            codes, levels = quantise(chosen, plan.tensor_of, plan.num_tensors, self.settings.quantiser)
            payload = pack(indices, codes, levels).to(across.device)

            exchanging = time.perf_counter()
            incoming = {peer: torch.empty_like(payload) for peer in across.peers}
            phase = f"round {self.round + 1}, entries"
            across.swap(dict.fromkeys(across.peers, payload), incoming, phase=phase)

            applying = time.perf_counter()
            payloads = [incoming.get(site, payload) for site in range(across.size)]
            self.anchor -= self._mean(payloads, update).mul_(self.outer_lr)
            self.residual = update
            self._write(weights)
        residual_norm = float(self.residual.norm())
        done = time.perf_counter()

        self.round += 1
        self.local_step = 0
        entries, sent = plan.entries, across.sent_bytes - sent
        dense = dense_bytes(numel, across.size)
        self.last_report = loco.SyncReport(
            round=self.round,
            numel=numel,
            entries=entries,
            density=entries / numel,
            wire="sparseloco",
            exchange="gather",
            payload_bytes=payload.numel(),
            sent_bytes=sent,
            received_bytes=across.received_bytes - received,
            site_bytes=0,
            dense_bytes=dense,
            update_norms=(),
            left_out=(),
            outer_lr=self.outer_lr,
            residual_norm=residual_norm,
            seconds={
                "encode": exchanging - encoding,
                "exchange": applying - exchanging,
                "apply": done - applying,
            },
            waited=0.0,  # not measured: it announces nothing
            site=SiteTotals(numel=numel, entries=entries, sent_bytes=sent, dense_bytes=dense),
        )
        return self.last_report

    def _pseudo_grad(self, weights: list[Tensor]) -> Tensor:
        """Δ. Through the cast, or the rounding error of θ would leak into it."""
        parts = self.anchor.split([w.numel() for w in weights])
        return torch.cat(
            [part.to(w.dtype).float() - w.float() for part, w in zip(parts, weights, strict=True)]
        )

    def _mean(self, payloads: list[Tensor], update: Tensor) -> Tensor:
        """g; takes what this site sent from `update`, which becomes e."""
        decoded = [unpack(payload, self._plan) for payload in payloads]
        for site, (_, _, levels) in enumerate(decoded):
            # A chunk's infinity or NaN is among its largest, and spreads to its tensor's levels.
            if not bool(levels.isfinite().all()):
                raise loco.NonFiniteError(f"round {self.round + 1}: site {site}'s update is infinite or NaN")
        total = torch.zeros_like(update)
        senders = torch.zeros_like(update) if self.settings.average == "senders" else None
        for site, (indices, codes, levels) in enumerate(decoded):
            # No position comes twice from one site, so that the sums have one order on any device.
            at, values = self._plan.to_flat(indices), levels[self._plan.tensor_of, codes]
            total[at] += values
            if senders is not None:
                senders[at] += 1
            if site == self._across.rank:
                update[at] -= values
        return total.div_(len(payloads) if senders is None else senders.clamp_(min=1))

    def _write(self, weights: list[Tensor]) -> None:
        """w = cast(θ)"""
        for w, part in zip(weights, self.anchor.split([w.numel() for w in weights]), strict=True):
            w.copy_(part)

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("SparseLoCo does not save its residual: run it from start to end")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state_dict()
