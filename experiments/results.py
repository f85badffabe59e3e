"""What a run measured, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import loco
from experiments.methods import Method

RATES = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}  # bits per second, each way


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    step: int
    loss: float  # nats per byte on the held-out text
    sent_bytes: float  # by then, mean over ranks


@dataclass(frozen=True, kw_only=True)
class Round:
    """One exchange, over all ranks."""

    round: int
    step: int
    density: float  # mean over ranks
    residual_norm: float  # root mean square over sites
    payload_bytes: float  # this and the next two: mean over ranks
    sent_bytes: float
    received_bytes: float

    @staticmethod
    def joined(step: int, reports: Sequence[loco.SyncReport], *, sites: int) -> Round:
        """One round from the reports of all ranks."""
        return Round(
            round=reports[0].round,
            step=step,
            density=sum(r.entries for r in reports) / max(1, sum(r.numel for r in reports)),
            # The ranks of a site hold parts of one residual: their squares add up.
            residual_norm=math.sqrt(sum(r.residual_norm**2 for r in reports) / sites),
            payload_bytes=fmean(r.payload_bytes for r in reports),
            sent_bytes=fmean(r.sent_bytes for r in reports),
            received_bytes=fmean(r.received_bytes for r in reports),
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    method: Method
    ranks: int
    sites: int
    parameters: int
    steps: int
    evaluations: tuple[Evaluation, ...]  # the first is the warm start
    rounds: tuple[Round, ...]  # empty for DDP
    one_step_density: float  # share of BF16 casts that one late inner step changes

    # Per rank, mean over ranks, for the whole run.
    sent_bytes: float
    received_bytes: float
    bytes_source: str  # of the two above: counted (by loco), kernel (TCP) or computed (ring formula)
    accounted_bytes: float  # sent, without the kernel's help: counted or computed
    kernel_sent_bytes: float | None  # None where the OS does not count
    exchange_seconds: float  # waiting for the network and for the other ranks
    round_seconds: float  # the rounds' own work: encode and apply
    step_seconds: float  # median of forward, backward and inner step

    @property
    def first_loss(self) -> float:
        return self.evaluations[0].loss

    @property
    def final_loss(self) -> float:
        return self.evaluations[-1].loss

    @property
    def gain(self) -> float:
        return self.first_loss - self.final_loss

    @property
    def density(self) -> float | None:
        """Mean over the second half of the rounds: the first ones start on the BF16 grid."""
        steady = self.rounds[len(self.rounds) // 2 :]
        return fmean(r.density for r in steady) if steady else None

    def projected_hours(self, bits_per_second: float, *, step_seconds: float) -> float:
        """This run with its bytes sent at that rate: bandwidth only, no latency, nothing overlapped."""
        transfer = max(self.sent_bytes, self.received_bytes) * 8 / bits_per_second
        return (self.steps * step_seconds + self.round_seconds + transfer) / 3600


def diloco_of(result: Result, results: Sequence[Result]) -> Result | None:
    """The DiLoCo run with the same outer optimizer, or None."""
    for other in results:
        if other.method.name == "diloco" and other.method.outer == result.method.outer:
            return other
    return None


def ddp_of(results: Sequence[Result]) -> Result | None:
    return next((result for result in results if result.method.name == "ddp"), None)
