"""One site of the link benchmark: it trains on noise, remembers a moment just before a round, and repeats the
round with any method, from the same state."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import loco
import loco.round.round
from experiments.bench.namespaces import counters
from experiments.bench.noisy_site import NoisySite
from loco.exchange.transfer import Transfer
from loco.net.transport import PendingMessages, Transport

_SETTLE = 0.05  # seconds in which what is on its way arrives, and the links' allowance fills up

RING = "torch all-reduce"  # gloo's ring of FP32, beside DiLoCo's own exchange: neither may be a weak baseline

_PAPER_GATE: dict[str, Any] = {"gate_gain": 1.0}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    RING: (None, {}),
    "DiLoCo float32": (loco.DiLoCo, {"wire": "float32"}),
    "DiLoCo bfloat16": (loco.DiLoCo, {"wire": "bfloat16"}),
    "DiLoCo int8": (loco.DiLoCo, {"wire": "int8"}),
    "PULSELoCo gather fast": (loco.PulseLoCo, {"exchange": "gather", "wire": "fast", **_PAPER_GATE}),
    "PULSELoCo gather tight": (loco.PulseLoCo, {"exchange": "gather", "wire": "tight", **_PAPER_GATE}),
    "PULSELoCo owner fast": (loco.PulseLoCo, {"exchange": "owner", "wire": "fast", **_PAPER_GATE}),
    "PULSELoCo owner tight": (loco.PulseLoCo, {"exchange": "owner", "wire": "tight", **_PAPER_GATE}),
    "PULSELoCo auto": (loco.PulseLoCo, _PAPER_GATE),
}


class WatchedTransfer(Transfer):
    """What reports leave out: the core's seconds for coding, and the seconds without anything to code."""

    last: WatchedTransfer | None = None
    coding_seconds = coding_cpu = waited_seconds = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        WatchedTransfer.last = self

    def attempt(self, do: Callable[[], Any]) -> Any:
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            return super().attempt(do)
        finally:
            self.coding_seconds += time.perf_counter() - start
            self.coding_cpu += time.thread_time() - cpu

    def wait(self, posted: PendingMessages) -> None:
        start = time.perf_counter()
        super().wait(posted)
        self.waited_seconds += time.perf_counter() - start


class Trainer:
    """
    Args:
        site: its number.
        numel: parameters.
    """

    def __init__(self, site: int, numel: int) -> None:
        # The exchange makes its transfers itself: put the one that is watched in their place.
        loco.round.round.__dict__["Transfer"] = WatchedTransfer
        self._noise = NoisySite(numel, site)
        self._weight = self._noise.parameter.detach()
        self._topology = loco.Topology()
        self._optimizer = loco.PulseLoCo(self._noise.inner, topology=self._topology, **_PAPER_GATE)
        self._saved: dict[str, Tensor] = {}
        self._ring = False

    def warm_up(self) -> float:
        """H inner steps and a round. -> its density"""
        self._noise.train()
        return self._optimizer.sync().density

    def remember(self) -> None:
        """H inner steps more, and the moment before the round."""
        self._noise.train()
        self._saved = {name: tensor.clone() for name, tensor in self._state().items()}

    def choose(self, method: str) -> None:
        kind, options = METHODS[method]
        self._ring = kind is None
        if kind is not None:
            self._optimizer = kind(self._noise.inner, topology=self._topology, **options)

    def _across(self) -> Transport:
        view = self._optimizer._outer._view
        assert view is not None
        return view.across

    def latency(self) -> float:
        """Seconds for a small message to all and theirs back."""
        across = self._across()
        taken = []
        for _ in range(21):
            start = time.perf_counter()
            across.swap_records(bytes(64), phase="latency")
            taken.append(time.perf_counter() - start)
        return median(taken)

    def speed(self, size: int) -> float:
        """Bytes per second from this site, when all send so many to each at once."""
        across = self._across()
        mine = torch.zeros(size, dtype=torch.uint8)
        theirs = {peer: torch.empty_like(mine) for peer in across.peers}
        dist.barrier()
        start = time.perf_counter()
        across.swap(dict.fromkeys(across.peers, mine), theirs, phase="speed")
        return size * len(theirs) / (time.perf_counter() - start)

    def round(self) -> dict[str, Any]:
        """The remembered round, once more, and what it took."""
        for name, tensor in self._state().items():
            tensor.copy_(self._saved[name])
        dist.barrier()
        time.sleep(_SETTLE)
        before, cpu = counters(), time.process_time()
        start = time.perf_counter()  # of one clock on all sites
        report = self._all_reduce() if self._ring else self._optimizer.sync()
        end = time.perf_counter()
        cpu = time.process_time() - cpu
        time.sleep(_SETTLE)
        interface = counters() - before
        watched = None if self._ring else WatchedTransfer.last
        return {
            "start": start,
            "end": end,
            "report": report,
            "interface": asdict(interface),
            "coding_cpu": watched.coding_cpu if watched else 0.0,
            "coding": watched.coding_seconds if watched else 0.0,
            "waited": watched.waited_seconds if watched else report.seconds["exchange"],
            "cpu": cpu,
        }

    def _all_reduce(self) -> loco.SyncReport:
        """What a ring takes for the same vector, without a round around it."""
        numel, sites = self._weight.numel(), self._topology.num_sites
        vector = torch.zeros(numel)
        start = time.perf_counter()
        dist.all_reduce(vector)
        seconds = {"encode": 0.0, "exchange": time.perf_counter() - start, "apply": 0.0}
        ring = 2 * (sites - 1) * 4 * numel // sites
        return loco.SyncReport(
            round=0,
            numel=numel,
            entries=numel,
            density=1.0,
            wire="float32",
            exchange="ring",
            payload_bytes=4 * numel,
            sent_bytes=ring,
            received_bytes=ring,
            site_bytes=0,
            dense_bytes=ring,
            update_norms=(),
            left_out=(),
            residual_norm=0.0,
            seconds=seconds,
        )

    def _state(self) -> dict[str, Tensor]:
        """By reference. DiLoCo has no residual."""
        state = self._optimizer.state_dict()["loco"]
        names = ("anchor", "momentum", "residual")
        return {"weight": self._weight} | {n: state[n] for n in names if state[n] is not None}
