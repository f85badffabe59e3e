"""One site of the link benchmark: it trains on noise, remembers a moment just before a round, and repeats the
round with any method, from the same state."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import loco
from experiments.bench.processes.namespaces import counters
from experiments.noise import NoisySite

_SETTLE = 0.05  # seconds in which what is on its way arrives, and the links' allowance fills up
_REPORTED = ("density", "sent_bytes", "received_bytes", "dense_bytes")

RING = "torch all-reduce"  # gloo's ring of FP32, beside DiLoCo's own exchange: neither may be a weak baseline
_PAPER_GATE: dict[str, Any] = {"gate_gain": 1.0}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    RING: (None, {}),
    **{f"DiLoCo {wire}": (loco.DiLoCo, {"wire": wire}) for wire in ("float32", "bfloat16", "int8")},
    **{
        f"PULSELoCo {exchange} {wire}": (loco.PulseLoCo, {"exchange": exchange, "wire": wire, **_PAPER_GATE})
        for exchange in ("gather", "owner")
        for wire in ("fast", "tight")
    },
    "PULSELoCo auto": (loco.PulseLoCo, _PAPER_GATE),
}


class Trainer:
    """
    Args:
        site: its number.
        numel: parameters.
    """

    def __init__(self, site: int, numel: int) -> None:
        self._noise = NoisySite(numel, site)
        self._weight = self._noise.parameter.detach()
        self._topology = loco.Topology()
        self._links, _ = self._topology.connect(torch.device("cpu"), "probe/0")  # beside the optimizer's own
        self._optimizer = loco.PulseLoCo(self._noise.inner, topology=self._topology, **_PAPER_GATE)
        self._saved: dict[str, Tensor] = {}
        self._ring = False
        self._clocks: dict[str, tuple[float, float]] = {}  # by phase of the round: wall, this thread's core

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
            self._optimizer.register_round_hook(self._clock)

    def _clock(self, progress: loco.RoundProgress) -> None:
        self._clocks[progress.phase] = time.perf_counter(), time.thread_time()

    def latency(self) -> float:
        """Seconds for a small message to all and theirs back."""
        taken = []
        for _ in range(21):
            start = time.perf_counter()
            self._links.swap_records(bytes(64), phase="latency")
            taken.append(time.perf_counter() - start)
        return median(taken)

    def speed(self, size: int) -> float:
        """Bytes per second from this site, when all send so many to each at once."""
        mine = torch.zeros(size, dtype=torch.uint8)
        theirs = {peer: torch.empty_like(mine) for peer in self._links.peers}
        dist.barrier()
        start = time.perf_counter()
        self._links.swap(dict.fromkeys(self._links.peers, mine), theirs, phase="speed")
        return size * len(theirs) / (time.perf_counter() - start)

    def round(self) -> dict[str, Any]:
        """The remembered round, once more, and what it took."""
        for name, tensor in self._state().items():
            tensor.copy_(self._saved[name])
        dist.barrier()
        time.sleep(_SETTLE)
        before, cpu = counters(), time.process_time()
        start = time.perf_counter()  # of one clock on all sites
        found = self._all_reduce() if self._ring else self._sync()
        found |= {"start": start, "end": time.perf_counter(), "cpu_s": time.process_time() - cpu}
        time.sleep(_SETTLE)
        sent = counters() - before
        return found | {"interface_bytes": sent.sent_bytes, "interface_packets": sent.sent_packets}

    def _sync(self) -> dict[str, Any]:
        report = self._optimizer.sync()
        # Between its messages the thread codes. Its share of a core shows where it only computes.
        work = [self._took("begun", "encoded"), self._took("committed", "applied")]
        share = sum(own for _, own in work) / sum(wall for wall, _ in work)
        return {
            **{name: getattr(report, name) for name in ("exchange", "wire", *_REPORTED)},
            **{f"{phase}_s": seconds for phase, seconds in report.seconds.items()},
            "coding_cpu_s": self._took("encoded", "received")[1],
            "core_share": min(share, 1.0),
        }

    def _took(self, first: str, last: str) -> tuple[float, float]:
        """Seconds between two phases of the round: wall, this thread's core."""
        (wall, own), (wall_then, own_then) = self._clocks[last], self._clocks[first]
        return wall - wall_then, own - own_then

    def _all_reduce(self) -> dict[str, Any]:
        """What a ring takes for the same vector, without a round around it."""
        numel, sites = self._weight.numel(), self._topology.num_sites
        vector = torch.zeros(numel)
        start = time.perf_counter()
        dist.all_reduce(vector)
        found = {"exchange": "ring", "wire": "float32", "exchange_s": time.perf_counter() - start}
        found |= dict.fromkeys(_REPORTED, 2 * (sites - 1) * 4 * numel // sites)
        return found | {
            "encode_s": 0.0,
            "apply_s": 0.0,
            "coding_cpu_s": 0.0,
            "core_share": 1.0,
            "density": 1.0,
        }

    def _state(self) -> dict[str, Tensor]:
        """By reference. DiLoCo has no residual."""
        state = self._optimizer.state_dict()["loco"]
        names = ("anchor", "momentum", "residual")
        return {"weight": self._weight} | {n: state[n] for n in names if state[n] is not None}
