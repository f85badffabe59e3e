"""How much of the time goes into training, over links of some rates: waiting, late, and other people's ways.

    python -m experiments.bench overlap
    python -m experiments.bench overlap --rates 100 --numel 4194304 --seconds 5
    python -m experiments.bench overlap --sync-every 50 --methods "saving 0.25, late" "torchft streaming"

Sites are processes on this machine, each with a link of its own (which needs root) and one thread. An inner
step takes 50 ms, for which the process sleeps, as one whose GPU is at work; in one of a round's steps a
tensor moves by noise, as far as by Adam's steps of a whole round at RL's learning rates. So the exchange
shares the processor with the other sites alone. The share is that of the inner steps in the time of all.

"DDP" sends FP32 gradients in every step, in eight buckets that travel while the others are made. "torchft
streaming" is torchft's DiLoCo of two fragments, each with all of its inner steps but one to travel; it runs
as it comes otherwise. Sites' anchors are compared at the end, bit for bit; torchft's rounds are counted.
Bytes are the kernel's count of each site's link. Rows go to experiments/results/bench/overlap.csv, with a
plot beside it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import loco
from experiments.bench.measuring import CPU, RESULTS, Row, Table, arguments_of, rate_name
from experiments.bench.others import Ddp, Torchft, start_lighthouse
from experiments.noise import LR, SAVING, SYNC_EVERY, model_of
from experiments.processes.namespaces import MBIT, Network, counters, why_not
from experiments.processes.progress import Progress
from experiments.processes.sites import Sites
from loco import kernels

STEP = 0.05  # seconds
RATES = [20.0, 100.0, 1000.0, 10000.0]  # Mbit/s
FORWARD = 1 / 3  # of a step
BUCKETS = 8  # of DDP's gradients
FRAGMENTS = 2  # of torchft's weights
LIGHTHOUSE = 29600  # its port at site 0
DDP, TORCHFT = "DDP", "torchft streaming"
OURS: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "loco.DiLoCo": (loco.DiLoCo, {}),
    "loco.PulseLoCo": (loco.PulseLoCo, {}),
    "saving 0.25": (loco.PulseLoCo, SAVING),
}
# Each of ours waiting, and late.
METHODS = [DDP, TORCHFT, *(name + late for name in OURS for late in ("", ", late"))]
SHOWN = {"numel": ">11,.0f", "sites": ">5", "rate_mbit": ">9g", "sync_every": ">10", "method": "<20"}
SHOWN |= {"share": ">7.3f"}
SHOWN |= {"round_s": ">9.3f", "stood_still_s": ">13.3f", "boundary_s": ">10.3f", "in_flight_s": ">11.3f"}
SHOWN |= {"sent_bytes": ">12,.0f", "link_bytes": ">12,.0f"}


class Drift(torch.optim.Optimizer):
    """Moves each weight by noise once in a round, and takes as long as a GPU would."""

    def __init__(self, weights: list[torch.nn.Parameter], sync_every: int, seed: int) -> None:
        super().__init__(weights, {})
        self._chance = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(2 * max(w.numel() for w in weights), generator=self._chance).mul_(
            LR * sync_every**0.5
        )
        self._sync_every, self._steps = sync_every, 0
        self._overslept = median(_overslept() for _ in range(20))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        until = time.perf_counter() + STEP
        at = self._steps % self._sync_every
        self._steps += 1
        for w in self.param_groups[0]["params"][at :: self._sync_every]:  # each of them once in a round
            first = int(torch.randint(w.numel(), (1,), generator=self._chance))
            w += self._noise[first : first + w.numel()].view(w.shape)
        time.sleep(max(until - time.perf_counter() - self._overslept, 0.0))


def _overslept() -> float:
    """By how much the system wakes a process too late, which is nobody's fault here."""
    began = time.perf_counter()
    time.sleep(STEP / 10)
    return time.perf_counter() - began - STEP / 10


class Trainer:
    """One site, which trains by one method at a time."""

    def __init__(self, site: int, numel: int, sync_every: int) -> None:
        self._site, self._numel, self._sync_every = site, numel, sync_every
        self._optimizer: Any = None
        self._closing = ExitStack()

    def serve(self, sites: int) -> None:
        """torchft's lighthouse, at the first site."""
        if self._site == 0:
            start_lighthouse(self._closing, sites, f"0.0.0.0:{LIGHTHOUSE}")

    def build(self, method: str) -> None:
        self._optimizer = None  # gives its links back before the next one's are made
        if method == DDP:
            ddp = Ddp(self._numel, BUCKETS)
            pause = partial(time.sleep, STEP * FORWARD), partial(time.sleep, STEP * (1 - FORWARD) / BUCKETS)
            self._step = partial(ddp.step, *pause)
            return
        weights = model_of(self._numel)
        inner = Drift(weights, self._sync_every, 1 + self._site)
        if method == TORCHFT:
            at = f"http://10.0.0.1:{LIGHTHOUSE}"
            self._optimizer = Torchft(
                weights,
                inner,
                at,
                sync_every=self._sync_every,
                fragments=FRAGMENTS,
                delay=self._sync_every // FRAGMENTS - 1,  # the most that it allows
                address=f"10.0.0.{1 + self._site}",
            )
            self._step = inner.step
            return
        name, _, late = method.partition(", ")
        kind, options = OURS[name]
        self._optimizer = kind(inner, sync_every=self._sync_every, overlap=bool(late), **options)
        self._step = self._optimizer.step

    def train(self, steps: int) -> dict[str, Any]:
        """-> what so many inner steps were like"""
        reports: list[loco.SyncReport] = []
        is_ours = hasattr(self._optimizer, "register_report_hook")
        hook = self._optimizer.register_report_hook(reports.append) if is_ours else None
        dist.barrier()
        before, began = counters(), time.perf_counter()
        rounds = self._optimizer.rounds if isinstance(self._optimizer, Torchft) else 0
        for _ in range(steps):
            self._step()
        took = time.perf_counter() - began
        each = self._sync_every / steps
        told: dict[str, Any] = {
            "share": steps * STEP / took,
            "round_s": took * each,
            "link_bytes": (counters() - before).sent_bytes * each,
        }
        if isinstance(self._optimizer, Torchft):
            done = self._optimizer.rounds - rounds
            if done != FRAGMENTS * steps // self._sync_every:
                raise RuntimeError(f"torchft has committed {done} rounds in {steps} steps")
        if hook is not None:
            hook.remove()
            told |= {
                "stood_still_s": median(report.waited for report in reports),
                "boundary_s": median(
                    report.seconds["encode"] + report.seconds["apply"] for report in reports
                ),
                "in_flight_s": median(report.in_flight for report in reports),
                "sent_bytes": median(report.sent_bytes for report in reports),
            }
        return told

    def digest(self) -> str:
        """Of θ, for those that have one."""
        if not hasattr(self._optimizer, "outer_state"):
            return ""
        self._optimizer.sync()
        anchor: Tensor = self._optimizer.outer_state.anchor
        return kernels.digest_hex(anchor)


def main(arguments: list[str]) -> None:
    parser = arguments_of("overlap", __doc__, RESULTS)
    parser.add_argument("--numel", type=int, default=1 << 24, help="parameters")
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="Mbit/s")
    parser.add_argument("--sync-every", type=int, default=SYNC_EVERY, help="inner steps a round")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each row, about")
    options = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        sys.exit(f"no links can be shaped: {reason}")
    drawn: dict[str, Any] = {"panel": ("rate_mbit", "sync_every"), "x": "method", "y": "share"}
    drawn |= {"factor": 100, "label": "% of the time in inner steps"}
    table = Table(options.out / "overlap.csv", CPU, SHOWN, **drawn)
    for rate in options.rates:
        table.add(measure(options, rate))
    table.close()


def measure(options: Any, rate: float) -> list[Row]:
    network, each, rows = Network(), options.sync_every, []
    with (
        Sites(options.sites, Trainer, options.numel, each, timeout=1200.0, network=network) as sites,
        Progress(f"{options.sites} sites, {rate_name(rate)}", total=len(options.methods)) as progress,
    ):
        network.shape(rate * MBIT)
        if TORCHFT in options.methods:
            sites.call("serve", options.sites)
        for method in options.methods:
            sites.call("build", method)
            # Rounds in which codes are chosen, and the first one takes off; DDP has no rounds.
            unit, first = (1, 1) if method == DDP else (each, 2 * each)
            trial = sites.call("train", first)
            seconds = max(site["round_s"] for site in trial) * unit / each
            steps = unit * max(math.ceil(options.seconds / seconds), 1)
            told = sites.call("train", steps)
            if len(set(sites.call("digest"))) != 1:
                raise RuntimeError(f"{method}: the sites hold different weights")
            cell = {"numel": options.numel, "sites": options.sites, "rate_mbit": rate, "sync_every": each}
            cell["method"] = method
            means = {column: fmean(site[column] for site in told) for column in told[0]}
            rows.append(cell | {"steps": steps} | means)
            progress.advance(method)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
