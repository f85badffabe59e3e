"""How much of the time goes into training, with and without overlap, over links of some rates.

    python -m experiments.bench overlap
    python -m experiments.bench overlap --rates 100 --numel 4194304 --rounds 4

Sites are processes on this machine, each with a link of its own (which needs root) and one thread. An inner
step takes 50 ms, for which the process sleeps, as one whose GPU is at work; in the first one of a round the
weights move by noise, as far as Adam's steps of a whole round at RL's learning rates. So the exchange shares
the processor with the other sites alone. The share is that of the inner steps in the time of all. At the end
the anchors of all sites are compared, bit for bit. Rows go to experiments/results/bench/overlap.csv, with a
plot beside it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

import loco
from experiments.bench.measuring import CPU, RESULTS, Row, Table, arguments_of, rate_name
from experiments.noise import LR, SIGMA, SYNC_EVERY
from experiments.processes.namespaces import MBIT, Network, why_not
from experiments.processes.progress import Progress
from experiments.processes.sites import Sites
from loco import kernels

STEP = 0.05  # seconds
METHODS: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "loco.DiLoCo": (loco.DiLoCo, {}),
    "loco.PulseLoCo": (loco.PulseLoCo, {}),
    "SAVING": (loco.PulseLoCo, loco.SAVING),
}
SHOWN = {"numel": ">11,.0f", "sites": ">5", "rate_mbit": ">9g", "method": "<15", "overlap": ">8"}
SHOWN |= {"share": ">7.3f", "round_s": ">8.3f", "stood_still_s": ">13.3f", "boundary_s": ">10.3f"}
SHOWN |= {"in_flight_s": ">11.3f", "sent_bytes": ">12,.0f"}


class Drift(torch.optim.Optimizer):
    """Moves all weights by noise once in a round, and takes as long as a GPU would."""

    def __init__(self, weights: list[torch.nn.Parameter], seed: int) -> None:
        super().__init__(weights, {})
        self._chance = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(2 * max(w.numel() for w in weights), generator=self._chance).mul_(
            LR * SYNC_EVERY**0.5
        )
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        until = time.perf_counter() + STEP
        self._steps += 1
        moved = self.param_groups[0]["params"] if self._steps % SYNC_EVERY == 1 else []
        for w in moved:
            first = int(torch.randint(w.numel(), (1,), generator=self._chance))
            w += self._noise[first : first + w.numel()].view(w.shape)
        time.sleep(max(until - time.perf_counter(), 0.0))


class Trainer:
    """One site: an optimizer for each method, overlapped and not."""

    def __init__(self, site: int, numel: int) -> None:
        self._optimizers: dict[tuple[str, bool], Any] = {}
        self._site, self._numel = site, numel

    def build(self, name: str, overlap: bool) -> None:
        self._optimizers.clear()
        chance = torch.Generator().manual_seed(0)
        start = torch.randn(self._numel, generator=chance).mul_(SIGMA).bfloat16().float()
        kind, options = METHODS[name]
        inner = Drift([torch.nn.Parameter(start)], 1 + self._site)
        self._optimizers[name, overlap] = kind(inner, sync_every=SYNC_EVERY, overlap=overlap, **options)

    def train(self, name: str, overlap: bool, rounds: int) -> dict[str, Any]:
        """-> what some rounds were like"""
        optimizer, reports = self._optimizers[name, overlap], []
        hook = optimizer.register_report_hook(reports.append)
        began = time.perf_counter()
        for _ in range(rounds * SYNC_EVERY):
            optimizer.step()
        took = time.perf_counter() - began
        hook.remove()
        return {
            "share": rounds * SYNC_EVERY * STEP / took,
            "round_s": took / rounds,
            "stood_still_s": median(report.waited for report in reports),
            "boundary_s": median(report.seconds["encode"] + report.seconds["apply"] for report in reports),
            "in_flight_s": median(report.in_flight for report in reports),
            "sent_bytes": median(report.sent_bytes for report in reports),
        }

    def digest(self, name: str, overlap: bool) -> str:
        optimizer = self._optimizers[name, overlap]
        optimizer.sync()
        anchor: Tensor = optimizer.outer_state.anchor
        return kernels.digest_hex(anchor)


def main(arguments: list[str]) -> None:
    parser = arguments_of("overlap", __doc__, RESULTS)
    parser.add_argument("--numel", type=int, default=1 << 24, help="parameters")
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 1000.0], help="Mbit/s")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        sys.exit(f"no links can be shaped: {reason}")
    drawn: dict[str, Any] = {"panel": ("rate_mbit", "overlap"), "x": "method", "y": "share"}
    drawn |= {"factor": 100, "label": "% of the time in inner steps"}
    table = Table(options.out / "overlap.csv", CPU, SHOWN, **drawn)
    for rate in options.rates:
        table.add(measure(options, rate))
    table.close()


def measure(options: Any, rate: float) -> list[Row]:
    network, rows = Network(), []
    ways = [(name, overlap) for name in options.methods for overlap in (False, True)]
    with (
        Sites(options.sites, Trainer, options.numel, timeout=1200.0, network=network) as sites,
        Progress(f"{options.sites} sites, {rate_name(rate)}", total=len(ways)) as progress,
    ):
        network.shape(rate * MBIT)
        for name, overlap in ways:
            sites.call("build", name, overlap)
            sites.call("train", name, overlap, 2)  # in which codes are chosen, and the first round takes off
            told = sites.call("train", name, overlap, options.rounds)
            if len(set(sites.call("digest", name, overlap))) != 1:
                raise RuntimeError(f"{name}: the sites hold different weights")
            cell = {"numel": options.numel, "sites": options.sites, "rate_mbit": rate, "method": name}
            means = {column: fmean(site[column] for site in told) for column in told[0]}
            rows.append(cell | {"overlap": "yes" if overlap else "no", "rounds": options.rounds} | means)
            progress.advance(name)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
