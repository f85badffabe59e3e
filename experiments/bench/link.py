"""The time and the bytes of a round over slow links: each site a process in a network namespace of its own.

    python -m experiments.bench link
    python -m experiments.bench link --quick
    python -m experiments.bench link --numel 4000000 --sites 2 4 8 --rates 100 1000 0 --rounds 5

All methods repeat one and the same round, from the steady state of PULSELoCo on noise-like Adam steps. A
round lasts from when the first site begins it to when the last one has ended it; its exchange from when the
last site is ready to when the last has everything. Rates are Mbit/s in each direction; 0: whatever the bridge
carries.

The sites share this machine's cores, and so code more slowly than sites that have their own. The seconds of
coding, and the share of a core that a site got, are kept beside, and projection.py corrects for them. DDP's
rows are by arithmetic (source: model).
Needs root, for the namespaces; where they are not allowed all rows are by arithmetic.

Rows go to experiments/results/bench/link.csv, with a plot beside it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from experiments.bench.measuring import append, arguments_of, close, quantiles, rate_name
from experiments.bench.model import ddp, modelled
from experiments.bench.namespaces import MBIT, why_not
from experiments.bench.sites import Sites
from experiments.bench.trainer import METHODS, Trainer
from experiments.noise import WARM_UP
from experiments.progress import Progress

RESULTS = Path("experiments/results/bench")
NUMEL, QUICK = 4_000_000, 500_000
BASELINE = "DiLoCo float32"
_UNMEASURED = 2  # rounds of each cell: connections open up, and "auto" learns
_FRAMING = 66  # bytes: Ethernet, IPv4 and TCP with timestamps


def main(arguments: list[str]) -> None:
    parser = arguments_of("link", __doc__)
    parser.add_argument("--numel", type=int, help=f"parameters; {NUMEL:,}")
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 1000, 0], help="Mbit/s; 0: unshaped")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} parameters, 3 rounds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    numel = options.numel or (QUICK if options.quick else NUMEL)
    rounds = min(options.rounds, 3) if options.quick else options.rounds
    rates = [rate * MBIT or None for rate in options.rates]

    table = options.out / "link.csv"
    run = f"{int(time.time())}"
    reason = why_not()
    if reason is not None:
        print(f"no links are measured: {reason}. All rows are by arithmetic (source: model)", file=sys.stderr)
    print(HEADINGS)
    for sites in options.sites:
        if reason is None:
            rows = measure(sites, numel, rates, options.methods, rounds)
        else:
            rows = modelled(sites, numel, rates, options.methods, options.out)
        for cell in rows:
            show(cell)
            append(table, [{"run": run} | row for row in cell], torch.device("cpu"))
    close(table)


def measure(
    sites: int, numel: int, rates: list[float | None], methods: list[str], rounds: int
) -> Iterator[list[dict[str, Any]]]:
    """The cells of one number of sites -> rows by rate, once all methods are measured."""
    per_method = len(rates) * (rounds + _UNMEASURED)
    total = WARM_UP + len(methods) * per_method
    # Round trips of 8 sites that share two cores take their time when all of them code.
    with (
        Sites(sites, Trainer, numel, timeout=600.0) as network,
        Progress(f"{sites} sites", total=total) as progress,
    ):
        for _ in range(WARM_UP):
            densities = network.call("warm_up")
            progress.advance(f"warm-up, density {fmean(densities):.2%}")
        network.call("remember")
        found: dict[float | None, list[dict[str, Any]]] = {rate: [] for rate in rates}
        for method in methods:
            for rate in rates:
                network.network.shape(None)  # the first anchor travels once, and is not what is measured
                network.call("choose", method)
                network.network.shape(rate)
                latency = max(network.call("latency"))
                probe = 2_000_000 if rate is None else int(min(rate / 10, 2_000_000) / (sites - 1))
                speed = fmean(network.call("speed", probe))
                seen = []
                for number in range(rounds + _UNMEASURED):
                    ranks = network.call("round")
                    if number >= _UNMEASURED:
                        seen.append(ranks)
                    progress.advance(f"{method}, {rate_name((rate or 0) / MBIT)}")
                place = {"sites": sites, "numel": numel, "rate_mbit": (rate or 0) / MBIT}
                link = {"latency": latency, "speed": speed}
                found[rate].append(place | {"method": method} | _row(seen) | link)
    for rate, rows in found.items():
        yield [*rows, ddp(sites, numel, rate, rows[0])]


def _row(seen: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Rounds of a cell, by site -> one row: medians over rounds, of means over sites where these differ."""
    whole, exchange = [], []
    for ranks in seen:
        ready = [r["start"] + r["report"].seconds["encode"] for r in ranks]
        done = [a + r["report"].seconds["exchange"] for a, r in zip(ready, ranks, strict=True)]
        whole.append(max(r["end"] for r in ranks) - min(r["start"] for r in ranks))
        exchange.append(max(done) - max(ready))

    def of(value: Any) -> float:
        return median(fmean(value(r) for r in ranks) for ranks in seen)

    last = seen[-1][0]["report"]
    sent, packets = of(lambda r: r["interface"]["sent_bytes"]), of(lambda r: r["interface"]["sent_packets"])
    reported = of(lambda r: r["report"].sent_bytes)
    return {
        "source": "measured",
        "exchange": last.exchange,
        "wire": last.wire,
        "rounds": len(seen),
        **quantiles(whole),
        "exchange_s": median(exchange),
        "encode_s": of(lambda r: r["report"].seconds["encode"]),
        "apply_s": of(lambda r: r["report"].seconds["apply"]),
        "coding_cpu_s": of(lambda r: r["coding_cpu"]),
        "core_share": of(lambda r: r["core_share"]),
        "cpu_s": of(lambda r: r["cpu"]),
        "density": of(lambda r: r["report"].density),
        "sent_bytes": reported,
        "received_bytes": of(lambda r: r["report"].received_bytes),
        "dense_bytes": of(lambda r: r["report"].dense_bytes),
        "interface_bytes": sent,
        "interface_packets": packets,
        # What the kernel counted above the report, less what packets of their own account for.
        "unexplained": (sent - _FRAMING * packets) / reported - 1,
        "cores": len(os.sched_getaffinity(0)),
    }


HEADINGS = (
    f"{'sites':>5} {'link':>10}  {'method':<24} {'round':>10} {'exchange':>10} {'coding':>9} "
    f"{'sent':>10} {'on the wire':>12} {'time':>7} {'bytes':>7}  (below {BASELINE})"
)


def show(rows: list[dict[str, Any]]) -> None:
    base = next((row for row in rows if row["method"] == BASELINE), None)
    for row in rows:
        faster = f"{base['p50'] / row['p50']:.1f}x" if base else ""
        fewer = f"{base['sent_bytes'] / row['sent_bytes']:.1f}x" if base else ""
        coding = f"{row['coding_cpu_s'] * 1e3:.0f} ms" if row["coding_cpu_s"] != "" else ""
        wire = f"{row['interface_bytes'] / 1e6:.2f} MB" if row["interface_bytes"] != "" else ""
        how = f"  {row['exchange']}, {row['wire']}" if row["method"].endswith("auto") else ""
        how += "  (model)" if row["source"] == "model" else ""
        print(
            f"{row['sites']:>5} {rate_name(row['rate_mbit']):>10}  {row['method']:<24} "
            f"{row['p50'] * 1e3:>7.0f} ms {row['exchange_s'] * 1e3:>7.0f} ms {coding:>9} "
            f"{row['sent_bytes'] / 1e6:>7.2f} MB {wire:>12} {faster:>7} {fewer:>7}{how}",
            flush=True,
        )
