"""The time of a round where nobody has measured it: 16 to 256 sites, 0.5B to 1T parameters, links from
100 Mbit/s to 100 Gbit/s.

    python -m experiments.bench projection
    python -m experiments.bench projection --measure      # code the payloads again, first
    python -m experiments.bench projection --latency 0 --cores 64

1. What coding takes on one core, how large payloads are and how their union grows with the number of sites is
   measured on noise (payloads.csv, densities.csv).
2. The simulator's arithmetic is held against every cell of link.csv: predicted ÷ measured (link_check.csv).
3. The same arithmetic for links and sizes that are not here: projection.csv and projection.png.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.bench.measuring import append, arguments_of, latest_run, plot
from experiments.bench.model import DDP, METHODS, NUMEL, Model, check
from experiments.bench.namespaces import MBIT
from experiments.bench.payloads import MANY
from experiments.bench.simulator import ring_bytes, ring_seconds
from experiments.noise import SYNC_EVERY

RESULTS = Path("experiments/results/bench")
OFF = 0.15  # a prediction that is off by more is named
SIZES = (5e8, 7e9, 70e9, 1e12)
RATES = (100, 1000, 10_000, 100_000)  # Mbit/s
_CPU = torch.device("cpu")


def main(arguments: list[str]) -> None:
    parser = arguments_of("projection", __doc__)
    parser.add_argument("--measure", action="store_true", help="code the payloads again")
    parser.add_argument("--numel", type=int, default=NUMEL, help="parameters of what is coded")
    parser.add_argument("--cores", type=float, default=32, help="that code for each site; 32")
    parser.add_argument("--ranks", type=int, default=8, help="of a site, which share its link and cores; 8")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds there and back; 0.03")
    parser.add_argument("--quick", action="store_true", help="small payloads")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)

    model = Model.of(
        options.out, min(options.numel, 1 << 18) if options.quick else options.numel, options.measure
    )
    model.show()
    if (options.out / "link.csv").exists():
        rows = list(check(model, latest_run(options.out / "link.csv")))
        if rows:
            append(options.out / "link_check.csv", rows, _CPU)
            show_check(rows)
    else:
        print("nothing to check against: there is no link.csv (python -m experiments.bench link)")
    rows = list(project(model, options.cores, options.ranks, options.latency))
    table = options.out / "projection.csv"
    append(table, rows, _CPU)
    show_projection(rows)
    print(f"rows appended to {table}")
    plot(rows, "draw_projection", table.with_suffix(".png"))


def show_check(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'sites':>5} {'Mbit/s':>7}  {'method':<24} {'measured':>10} {'predicted':>10} "
        f"{'ratio':>6} {'bytes':>6}"
    )
    for row in rows:
        off = "  off" if any(abs(row[f"{what}_ratio"] - 1) > OFF for what in ("time", "bytes")) else ""
        by = " by the cores" if row["floor_s"] > row["simulated_s"] else ""
        print(
            f"{row['sites']:>5.0f} {row['rate_mbit'] or 'none':>7}  {row['method']:<24} "
            f"{row['measured_s'] * 1e3:>7.0f} ms {row['predicted_s'] * 1e3:>7.0f} ms "
            f"{row['time_ratio']:>6.2f} {row['bytes_ratio']:>6.2f}{off}{by}"
        )
    for what in ("time", "bytes"):
        ratios = [row[f"{what}_ratio"] for row in rows]
        near = sum(abs(ratio - 1) <= OFF for ratio in ratios)
        print(
            f"{what}: {near} of {len(rows)} cells within {OFF:.0%}; "
            f"predicted over measured from {min(ratios):.2f} to {max(ratios):.2f}"
        )


def project(model: Model, cores: float, ranks: int, latency: float) -> Iterator[dict[str, Any]]:
    """A site's ranks work side by side, each on its slice with its share of the link and of the cores."""
    for numel, mbit, sites in itertools.product(SIZES, RATES, (s for s in MANY if s >= 16)):
        at = model.setting(sites, numel / ranks, mbit * MBIT / ranks, cores=cores / ranks, latency=latency)
        place = {"sites": sites, "numel": int(numel), "rate_mbit": mbit, "cores": cores, "ranks": ranks}
        place |= {"latency": latency, "density": at.density, "union": at.union}
        # A ring's messages go one way, and wait for no answer.
        yield place | {
            "method": DDP,
            "seconds": ring_seconds(replace(at, latency=latency / 2), steps=SYNC_EVERY),
            "sent_bytes": ring_bytes(at, steps=SYNC_EVERY) * ranks,
            "nearby_s": ring_seconds(replace(at, latency=0.0), steps=SYNC_EVERY),
            "coding_s": 0.0,
        }
        for method, exchange, code in METHODS:
            yield place | {
                "method": method,
                "seconds": model.seconds(exchange, code, at),
                "sent_bytes": model.bytes(exchange, code, at) * ranks,
                "nearby_s": model.seconds(exchange, code, replace(at, latency=0.0)),
                "coding_s": model.seconds(exchange, code, replace(at, latency=0.0, rate=1e30)),
            }


def show_projection(rows: list[dict[str, Any]]) -> None:
    """7B parameters: the middle of the grid."""
    at = rows[0]
    print(
        f"projected, 7B parameters, {at['ranks']} ranks and {at['cores']:g} cores per site, "
        f"{at['latency'] * 1e3:g} ms there and back: seconds (without these ms)"
    )
    shown = [row for row in rows if row["numel"] == 7e9 and row["sites"] in (16, 256)]
    columns = list(dict.fromkeys((row["sites"], row["rate_mbit"]) for row in shown))
    columns.sort()
    print(f"{'':<24}" + "".join(f"{f'{sites}, {mbit / 1000:g}G':>22}" for sites, mbit in columns))
    for method in dict.fromkeys(row["method"] for row in shown):
        of = {(row["sites"], row["rate_mbit"]): row for row in shown if row["method"] == method}
        cells = [f"{of[c]['seconds']:,.1f} ({of[c]['nearby_s']:,.1f})" for c in columns]
        print(f"{method:<24}" + "".join(f"{cell:>22}" for cell in cells))
