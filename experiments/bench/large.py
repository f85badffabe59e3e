"""A round of a large model in host memory: what it takes per parameter, and how long, between real sites.

    python -m experiments.bench large
    python -m experiments.bench large --numel 1000000000 --sites 2 --momentum 0

Every site holds BF16 weights (2 bytes a parameter), θ and e (4 each) and, with momentum, m (4). The inner
optimizer has no state of its own: it moves every hundredth weight by one BF16 ulp, so that a site sends about
1%. Sites are processes in network namespaces of their own, so this needs root. It says what memory it will
need, and refuses when there is less. Rows go to runs/bench/large.csv.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

import loco
from experiments.bench.measuring import append, arguments_of, kernel_bytes
from experiments.bench.processes.namespaces import Network
from experiments.bench.processes.sites import Sites

GIB = 1 << 30
_BLOCK = 1 << 24  # elements to draw at a time
_PROCESS = 0.4 * GIB  # of an interpreter with torch, measured
_ROUND = 0.5  # bytes per parameter that a round may take besides: DESIGN's limit, and the payloads


class Nudge(torch.optim.Optimizer):
    """Moves every hundredth weight by a BF16 ulp, others in every step."""

    def __init__(self, parameter: Tensor, site: int) -> None:
        super().__init__([parameter], {})
        self._first = site * 7 % 100

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.view(torch.int16)[self._first :: 100] += 1
        self._first = (self._first + 1) % 100
        return None


class LargeSite:
    def __init__(self, site: int, numel: int, momentum: float, threads: int) -> None:
        torch.set_num_threads(threads)
        weight = torch.empty(numel, dtype=torch.bfloat16)
        chance = torch.Generator().manual_seed(0)
        for part in weight.split(_BLOCK):
            part.copy_(torch.randn(part.numel(), generator=chance).mul_(0.02))
        self._inner = Nudge(torch.nn.Parameter(weight), site)
        self._optimizer = loco.PulseLoCo(
            self._inner,
            sync_every=1,
            outer_lr=1.0,
            outer_momentum=momentum,
            topology=loco.Topology(timeout=600.0),
        )

    def round(self) -> dict[str, Any]:
        self._inner.step()
        report = self._optimizer.sync()
        return {"report": report, "peak": kernel_bytes("VmHWM")}


def main(arguments: list[str]) -> None:
    parser = arguments_of("large", __doc__)
    parser.add_argument("--numel", type=int, default=1_000_000_000)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each site")
    options = parser.parse_args(arguments)

    each = 2 + 4 + 4 + (4 if options.momentum else 0)
    needed = options.sites * (options.numel * (each + _ROUND) + _PROCESS)
    there = kernel_bytes("MemAvailable", "/proc/meminfo")
    print(
        f"{options.sites} sites x {options.numel:,} parameters x ({each} bytes of state + {_ROUND} for a "
        f"round) = {needed / GIB:.1f} GiB; {there / GIB:.1f} GiB are free",
        flush=True,
    )
    if needed > there:
        sys.exit("not enough memory: try fewer parameters (--numel) or one site (--sites 1)")
    rows = []
    each_site = (options.numel, options.momentum, options.threads)
    with Sites(options.sites, LargeSite, *each_site, timeout=1200.0, network=Network()) as sites:
        for _ in range(options.rounds):
            found = sites.call("round")
            report: loco.SyncReport = found[0]["report"]
            peak = max(one["peak"] for one in found)
            print(f"{report}; peak of a site {peak / GIB:.2f} GiB, {peak / options.numel:.2f} B/parameter")
            row = {name: getattr(options, name) for name in ("sites", "numel", "momentum", "threads")}
            row |= {name: getattr(report, name) for name in ("round", "density", "sent_bytes")}
            row |= {f"{phase}_seconds": took for phase, took in report.seconds.items()}
            rows.append(row | {"peak_bytes_of_a_site": peak})
    append(options.out / "large.csv", rows)
