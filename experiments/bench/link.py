"""The time and the bytes of a round over slow links: each site a process in a network namespace of its own.

    python -m experiments.bench link
    python -m experiments.bench link --quick
    python -m experiments.bench link --numel 4000000 --sites 2 4 8 --rates 100 1000 0 --rounds 5

All methods repeat one and the same round, from the steady state of PULSELoCo on noise-like Adam steps. A
round lasts from when the first site begins it to when the last one has ended it; its exchange from when the
last site is ready to when the last has everything. Rates are Mbit/s in each direction; 0: whatever the bridge
carries.

The sites share this machine's cores, and so code more slowly than sites that have their own. The seconds of
coding, and the share of a core that a site got, are kept beside, and projection.py corrects for them.
Needs root, for the namespaces.

Rows go to experiments/results/bench/link.csv, with a plot beside it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

from experiments.bench.measuring import CPU, RESULTS, Row, Table, arguments_of, quantiles, rate_name
from experiments.bench.processes.namespaces import MBIT, Network, why_not
from experiments.bench.processes.sites import Sites
from experiments.bench.processes.trainer import METHODS, Trainer
from experiments.noise import WARM_UP
from experiments.processes.progress import Progress
from loco.exchange.codec_choice import ROUNDS_PER_TRIAL
from loco.wire.codecs import SPARSE

NUMEL, QUICK = 4_000_000, 500_000
_UNMEASURED = 2  # rounds of each cell: connections open up
_TRIED = len(SPARSE) * ROUNDS_PER_TRIAL  # rounds, in which "auto" tries each codec
_FRAMING = 66  # bytes: Ethernet, IPv4 and TCP with timestamps
_MEANS = (  # over sites
    *("encode_s", "apply_s", "coding_cpu_s", "core_share", "cpu_s", "density"),
    *("sent_bytes", "received_bytes", "dense_bytes", "interface_bytes", "interface_packets"),
)
SHOWN = {"sites": ">5", "rate_mbit": ">9", "method": "<22", "exchange": "<8", "wire": "<8", "p50": ">7.3f"}
SHOWN |= {
    "exchange_s": ">10.3f",
    "coding_cpu_s": ">12.3f",
    "sent_bytes": ">11,.0f",
    "interface_bytes": ">15,.0f",
}


def main(arguments: list[str]) -> None:
    parser = arguments_of("link", __doc__, RESULTS)
    parser.add_argument("--numel", type=int, help=f"parameters; {NUMEL:,}")
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 1000, 0], help="Mbit/s; 0: unshaped")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} parameters, 3 rounds")
    options = parser.parse_args(arguments)
    numel = options.numel or (QUICK if options.quick else NUMEL)
    rounds = min(options.rounds, 3) if options.quick else options.rounds
    if (reason := why_not()) is not None:
        sys.exit(f"no links can be measured: {reason}")

    table = Table(options.out / "link.csv", CPU, SHOWN)
    run = {"run": int(time.time())}
    for sites in options.sites:
        for row in measure(sites, numel, options.rates, options.methods, rounds):
            table.add([run | row])
    table.close()


def measure(sites: int, numel: int, rates: list[float], methods: list[str], rounds: int) -> Iterator[Row]:
    """A row for each method and rate."""
    before = {method: _TRIED if method.endswith("auto") else _UNMEASURED for method in methods}
    total = WARM_UP + len(rates) * sum(before[method] + rounds for method in methods)
    # Round trips of 8 sites that share two cores take their time when all of them code.
    network = Network()
    with (
        Sites(sites, Trainer, numel, timeout=600.0, network=network) as running,
        Progress(f"{sites} sites", total=total) as progress,
    ):
        for _ in range(WARM_UP):
            densities = running.call("warm_up")
            progress.advance(f"warm-up, density {fmean(densities):.2%}")
        running.call("remember")
        for method in methods:
            for mbit in rates:
                rate = mbit * MBIT or None
                network.shape(None)  # the first anchor travels once, and is not what is measured
                running.call("choose", method)
                network.shape(rate)
                latency = max(running.call("latency"))
                probe = 2_000_000 if rate is None else int(min(rate / 10, 2_000_000) / (sites - 1))
                speed = fmean(running.call("speed", probe))
                seen = []
                for _ in range(before[method] + rounds):
                    seen.append(running.call("round"))
                    progress.advance(f"{method}, {rate_name(mbit)}")
                cell = {"sites": sites, "numel": numel, "rate_mbit": mbit, "method": method}
                yield cell | _row(seen[before[method] :]) | {"latency": latency, "speed": speed}


def _row(seen: list[list[dict[str, Any]]]) -> Row:
    """Rounds of a cell, by site -> one row: medians over rounds, of means over sites where these differ."""
    whole, exchange = [], []
    for ranks in seen:
        ready = [r["start"] + r["encode_s"] for r in ranks]
        done = [a + r["exchange_s"] for a, r in zip(ready, ranks, strict=True)]
        whole.append(max(r["end"] for r in ranks) - min(r["start"] for r in ranks))
        exchange.append(max(done) - max(ready))
    means = {name: median(fmean(r[name] for r in ranks) for ranks in seen) for name in _MEANS}
    carried = means["interface_bytes"] - _FRAMING * means["interface_packets"]
    return {
        "source": "measured",
        "exchange": seen[-1][0]["exchange"],
        "wire": seen[-1][0]["wire"],
        "rounds": len(seen),
        **quantiles(whole),
        "exchange_s": median(exchange),
        **means,
        # What the kernel counted above the report, less what packets of their own account for.
        "unexplained": carried / means["sent_bytes"] - 1,
        "cores": len(os.sched_getaffinity(0)),
    }
