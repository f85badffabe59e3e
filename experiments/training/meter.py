"""What a rank measures of its run: scores, rounds, and the time and bytes of the training steps, of nothing
else: no evaluation, no barrier, no set-up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

import loco
from experiments.training.ledger import TcpBytes, tcp_bytes

_REPORTED = (
    *("round", "numel", "entries", "exchange", "outer_lr", "residual_norm"),
    *("payload_bytes", "sent_bytes", "received_bytes"),
)


@dataclass(kw_only=True)
class Measured:
    """Plain data all of it, which a checkpoint keeps: a run that is resumed goes on with it."""

    step: int = 0  # steps done
    seconds: float = 0.0  # by then
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    # What they report, and what was seen of the gate.
    rounds: list[dict[str, Any]] = field(default_factory=list)
    one_step_density: float = 0.0
    computing: list[float] = field(default_factory=list)  # seconds of each step's own work
    kernel_sent: int | None = 0  # None where the kernel does not count
    kernel_received: int = 0
    rollout_seconds: float = 0.0
    exchange_seconds: float = 0.0
    round_seconds: float = 0.0


class Meter:
    """`begin()` before a step's work and `end()` after it; the sums are this rank's, for the run."""

    def __init__(self, device: torch.device, *, computed_bytes_per_step: int, overlaps: bool = False) -> None:
        """
        Args:
            overlaps: rounds travel at any time, so that the kernel's counters tell nothing of a step.
        """
        self._device, self._overlaps = device, overlaps
        self._computed_bytes_per_step = computed_bytes_per_step  # of a gradient all-reduce; else 0
        self._began: tuple[float, TcpBytes | None] = (0.0, None)
        self.found = Measured()

    @contextmanager
    def rollouts(self) -> Iterator[None]:
        """Around the sampling of answers, a work of its own."""
        began = self._now()
        yield
        self.found.rollout_seconds += self._now() - began

    def begin(self) -> None:
        self._began = (self._now(), tcp_bytes())

    def end(self, *, waited: float, report: loco.SyncReport | None, watched: float = 0.0) -> None:
        """`waited` for gradients inside the step; `report` if the step ended a round, which an observer
        `watched` for so long."""
        found, elapsed = self.found, self._now() - self._began[0]
        before, after = self._began[1], tcp_bytes()
        if found.kernel_sent is None or before is None or after is None:
            found.kernel_sent = None
        else:
            found.kernel_sent += after.sent - before.sent
            found.kernel_received += after.received - before.received
        exchange = work = 0.0
        if report is not None:
            self.add(report)
            exchange = report.seconds.get("exchange", 0.0)  # a site that rejoins has none
            work = sum(report.seconds.values()) - exchange - watched
        found.exchange_seconds += waited + exchange
        found.round_seconds += work
        found.computing.append(elapsed - waited - exchange - work - (watched if report is not None else 0.0))

    def add(self, report: loco.SyncReport) -> None:
        self.found.rounds.append({name: getattr(report, name) for name in _REPORTED})

    @property
    def kernel_sent_bytes(self) -> int | None:
        """None where the kernel does not count, or where the traffic is not TCP."""
        return self.found.kernel_sent if self._device.type == "cpu" and not self._overlaps else None

    def summary(self) -> dict[str, Any]:
        """For the whole run so far."""
        computed = self._computed_bytes_per_step * len(self.found.computing)
        sent, received = (
            computed + sum(one[name] for one in self.found.rounds)
            for name in ("sent_bytes", "received_bytes")
        )
        kernel = self.kernel_sent_bytes
        by_kernel = bool(computed and kernel)
        return {
            "sent_bytes": kernel if by_kernel else sent,
            "received_bytes": self.found.kernel_received if by_kernel else received,
            "accounted_bytes": sent,
            "bytes_source": "kernel" if by_kernel else "computed" if computed else "counted",
            "kernel_sent_bytes": kernel,
            "step_seconds": median(self.found.computing) if self.found.computing else 0.0,
            **{
                name: getattr(self.found, name)
                for name in ("exchange_seconds", "round_seconds", "rollout_seconds", "one_step_density")
            },
        }

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
