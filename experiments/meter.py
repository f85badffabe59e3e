"""Time and bytes of the training steps, and of nothing else: no evaluation, no barrier, no set-up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

import loco
from experiments.ledger import TcpBytes, tcp_bytes
from experiments.observer import Seen

_SUMS = (
    *("_computing", "_steps", "_sent", "_received"),
    *("rollout_seconds", "exchange_seconds", "round_seconds"),
)

Report = tuple[int, loco.SyncReport, Seen | None]  # (step, what the round did, what was seen of its gate)


class Meter:
    """`begin()` before a step's work and `end()` after it; the sums are this rank's, for the run."""

    def __init__(self, device: torch.device, *, computed_bytes_per_step: int) -> None:
        self._device = device
        self._computed_bytes_per_step = computed_bytes_per_step  # of a gradient all-reduce; else 0
        self._kernel: TcpBytes | None = TcpBytes(0, 0)
        self._began: tuple[float, TcpBytes | None] = (0.0, None)
        self._computing: list[float] = []  # seconds of each step's own work
        self._steps = 0
        self.reports: list[Report] = []
        self._sent = self._received = 0  # by the rounds
        self.rollout_seconds = 0.0
        self.exchange_seconds = 0.0
        self.round_seconds = 0.0

    def state(self) -> dict[str, Any]:
        """All sums so far as plain data, for a run that is resumed."""
        reports = [
            (step, asdict(did), None if seen is None else asdict(seen)) for step, did, seen in self.reports
        ]
        kernel = None if self._kernel is None else asdict(self._kernel)
        return {name: getattr(self, name) for name in _SUMS} | {"reports": reports, "kernel": kernel}

    def resume(self, state: dict[str, Any]) -> None:
        for name in _SUMS:
            setattr(self, name, state[name])
        self._kernel = None if state["kernel"] is None else TcpBytes(**state["kernel"])
        self.reports = reports_of(state["reports"])

    @contextmanager
    def rollouts(self) -> Iterator[None]:
        """Around the sampling of answers, a work of its own."""
        began = self._now()
        yield
        self.rollout_seconds += self._now() - began

    def begin(self) -> None:
        self._began = (self._now(), tcp_bytes())

    def end(self, *, waited: float, report: loco.SyncReport | None, watched: float = 0.0) -> None:
        """`waited` for gradients inside the step; `report` if the step ended a round, which an observer
        `watched` for so long."""
        elapsed = self._now() - self._began[0]
        before, after = self._began[1], tcp_bytes()
        if self._kernel is None or before is None or after is None:
            self._kernel = None
        else:
            self._kernel += after - before
        self._steps += 1
        self.exchange_seconds += waited
        if report is None:
            self._computing.append(elapsed - waited)
            return
        self._sent += report.sent_bytes
        self._received += report.received_bytes
        exchange = report.seconds["exchange"]
        work = sum(report.seconds.values()) - exchange - watched
        self.exchange_seconds += exchange
        self.round_seconds += work
        self._computing.append(elapsed - waited - exchange - work - watched)

    @property
    def step_seconds(self) -> float:
        return median(self._computing)

    @property
    def kernel(self) -> TcpBytes | None:
        """What the kernel counted; None where it does not, or where the traffic is not TCP."""
        return self._kernel if self._device.type == "cpu" else None

    @property
    def source(self) -> str:
        if not self._computed_bytes_per_step:
            return "counted"
        return "kernel" if self.kernel else "computed"

    @property
    def accounted_bytes(self) -> int:
        return self._sent + self._computed_bytes_per_step * self._steps

    @property
    def sent_bytes(self) -> int:
        return self.kernel.sent if self.kernel and self.source == "kernel" else self.accounted_bytes

    @property
    def received_bytes(self) -> int:
        if self.kernel and self.source == "kernel":
            return self.kernel.received
        return self._received + self._computed_bytes_per_step * self._steps

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def reports_of(state: list[tuple[int, dict[str, Any], dict[str, Any] | None]]) -> list[Report]:
    """What `Meter.state` wrote."""
    return [
        (step, loco.SyncReport(**did), None if seen is None else Seen(**seen)) for step, did, seen in state
    ]
