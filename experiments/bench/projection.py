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
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.bench.measuring import CPU, RESULTS, Row, Table, append, arguments_of, latest_run
from experiments.bench.processes.namespaces import MBIT
from experiments.bench.simulation.payloads import MANY, codes, measure
from experiments.bench.simulation.simulator import (
    GOODPUT,
    Setting,
    gather_bytes,
    gather_seconds,
    owner_bytes,
    owner_seconds,
    ring_bytes,
    ring_seconds,
)
from experiments.noise import SYNC_EVERY

NUMEL = 1 << 21  # of what is coded: one frame
SIZES = (5e8, 7e9, 70e9, 1e12)
RATES = (100, 1000, 10_000, 100_000)  # Mbit/s
SITES = (16, *MANY)
DDP = f"DDP, {SYNC_EVERY} steps"
# Name, exchange and code, as link.csv has them.
METHODS = (
    *((f"DiLoCo {code}", "dense", code) for code in ("float32", "bfloat16", "int8")),
    *((f"PULSELoCo gather {code}", "gather", code) for code in ("fast", "tight")),
    *((f"PULSELoCo owner {code}", "owner", code) for code in ("fast", "tight")),
)
_OFF = 0.15  # of what is measured: predictions that are nearer are counted
_CHECKED = {"sites": ">5.0f", "rate_mbit": ">9", "method": "<22", "measured_s": ">10.3f"}
_CHECKED |= {"predicted_s": ">11.3f", "time_ratio": ">10.2f", "bytes_ratio": ">11.2f"}
_PROJECTED = {"sites": ">5", "numel": ">17,", "rate_mbit": ">9", "method": "<22", "seconds": ">12.2f"}
_PROJECTED |= {"nearby_s": ">12.2f", "coding_s": ">10.2f", "sent_bytes": ">20,.0f"}


def main(arguments: list[str]) -> None:
    parser = arguments_of("projection", __doc__, RESULTS)
    parser.add_argument("--measure", action="store_true", help="code the payloads again")
    parser.add_argument("--numel", type=int, default=NUMEL, help="parameters of what is coded")
    parser.add_argument("--cores", type=float, default=32, help="that code for each site; 32")
    parser.add_argument("--ranks", type=int, default=8, help="of a site, which share its link and cores; 8")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds there and back; 0.03")
    parser.add_argument("--quick", action="store_true", help="small payloads")
    options = parser.parse_args(arguments)

    numel = min(options.numel, 1 << 18) if options.quick else options.numel
    model = Model.of(options.out, numel, options.measure)
    links = options.out / "link.csv"
    if rows := list(check(model, latest_run(links))) if links.exists() else []:
        Table(options.out / "link_check.csv", CPU, _CHECKED).add(rows)
        for what in ("time", "bytes"):
            ratios = [row[f"{what}_ratio"] for row in rows]
            near = sum(abs(ratio - 1) <= _OFF for ratio in ratios)
            print(
                f"{what}: {near} of {len(rows)} cells within {_OFF:.0%}; "
                f"predicted over measured from {min(ratios):.2f} to {max(ratios):.2f}"
            )
    table = Table(options.out / "projection.csv", CPU, _PROJECTED)
    rows = list(project(model, options.cores, options.ranks, options.latency))
    table.show(row for row in rows if row["numel"] == 7e9 and row["sites"] in (16, 256))
    run = {"run": int(time.time())}
    append(table.path, [run | row for row in rows])
    table.close()


class Model:
    """The measured codes and densities, and what they predict."""

    def __init__(self, payloads: list[Row], densities: list[Row]) -> None:
        self.codes, self.adding = codes(payloads)
        self.densities = {int(row["sites"]): row for row in densities}

    @staticmethod
    def of(folder: Path, numel: int, again: bool) -> Model:
        """The latest measurement in the folder, or a new one."""
        tables = folder / "payloads.csv", folder / "densities.csv"
        if again or not all(table.exists() for table in tables):
            run = {"run": int(time.time())}
            for table, rows in zip(tables, measure(numel), strict=True):
                append(table, [run | row for row in rows])
        return Model(*(latest_run(table) for table in tables))

    def setting(self, sites: int, numel: float, rate: float, **more: Any) -> Setting:
        """One of noise."""
        row = self.densities[sites]
        union = row["union"] or row["by_class"]  # a column of its own in older tables
        given = {"sites": sites, "numel": int(numel), "rate": rate, "density": row["density"], "union": union}
        return Setting(**given | more)

    def seconds(self, exchange: str, code: str, at: Setting) -> float:
        if exchange == "gather":
            return gather_seconds(self.codes[code], at)
        if exchange == "dense":
            return owner_seconds(self.codes[code], _all_of(at), self.adding["whole"])
        return owner_seconds(self.codes[code], at, self.adding["sparse"])

    def bytes(self, exchange: str, code: str, at: Setting) -> float:
        if exchange == "gather":
            return gather_bytes(self.codes[code], at)
        return owner_bytes(self.codes[code], _all_of(at) if exchange == "dense" else at)


def _all_of(at: Setting) -> Setting:
    return replace(at, density=1.0, union=1.0)


def check(model: Model, rows: list[Row]) -> Iterator[Row]:
    """Each measured cell beside what the simulator says.

    Sites that share cores code that much slower. And however fast the link, all that the processes computed,
    gloo's copying included, takes its time on the cores that there were: the floor.
    """
    for row in rows:
        # "auto" may change its code from round to round.
        if row["source"] != "measured" or row["method"] == "PULSELoCo auto" or row["exchange"] == "ring":
            continue
        if int(row["sites"]) not in model.densities:
            continue
        sites = int(row["sites"])
        noise = model.densities[sites]
        at = model.setting(
            sites,
            row["numel"],
            row["rate_mbit"] * MBIT or row["speed"] / GOODPUT,
            latency=row["latency"],
            cores=min(row["cores"] / sites, 1.0),
            density=row["density"],
            union=min(noise["union"] / noise["density"] * row["density"], 1.0),
        )
        simulated = model.seconds(row["exchange"], row["wire"], at)
        # A site that shares a core gets a part of each second: what it got when it coded.
        part = row["core_share"] if "core_share" in row else min(row["coding_cpu_s"] / row["coding_s"], 1.0)
        outside = (row["encode_s"] + row["apply_s"]) * part
        floor = max(row["cpu_s"] - outside, 0.0) * sites / min(row["cores"], sites)
        predicted = max(simulated, floor)
        sent = model.bytes(row["exchange"], row["wire"], at)
        yield {
            "link_run": f"{row['run']:.0f}",
            **{name: row[name] for name in ("sites", "numel", "rate_mbit", "method")},
            "measured_s": row["exchange_s"],
            "simulated_s": simulated,
            "floor_s": floor,
            "predicted_s": predicted,
            "time_ratio": predicted / row["exchange_s"],
            "measured_bytes": row["sent_bytes"],
            "predicted_bytes": sent,
            "bytes_ratio": sent / row["sent_bytes"],
        }


def project(model: Model, cores: float, ranks: int, latency: float) -> Iterator[Row]:
    """A site's ranks work side by side, each on its slice with its share of the link and of the cores."""
    for numel, mbit, sites in itertools.product(SIZES, RATES, SITES):
        at = model.setting(sites, numel / ranks, mbit * MBIT / ranks, cores=cores / ranks, latency=latency)
        nearby = replace(at, latency=0.0)
        place = {"sites": sites, "numel": int(numel), "rate_mbit": mbit, "cores": cores, "ranks": ranks}
        place |= {"latency": latency, "density": at.density, "union": at.union}
        yield place | {
            "method": DDP,
            # A ring's messages go one way, and wait for no answer.
            "seconds": ring_seconds(replace(at, latency=latency / 2), steps=SYNC_EVERY),
            "sent_bytes": ring_bytes(at, steps=SYNC_EVERY) * ranks,
            "nearby_s": ring_seconds(nearby, steps=SYNC_EVERY),
            "coding_s": 0.0,
        }
        for method, exchange, code in METHODS:
            yield place | {
                "method": method,
                "seconds": model.seconds(exchange, code, at),
                "sent_bytes": model.bytes(exchange, code, at) * ranks,
                "nearby_s": model.seconds(exchange, code, nearby),
                "coding_s": model.seconds(exchange, code, replace(nearby, rate=1e30)),
            }
