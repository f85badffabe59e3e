"""The simulator with what was measured put in: what it says of any round, and how near that comes to the
links that were measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.bench.measuring import append, latest_run
from experiments.bench.namespaces import MBIT
from experiments.bench.payloads import codes, measure
from experiments.bench.simulator import (
    GOODPUT,
    Code,
    Setting,
    Work,
    gather_bytes,
    gather_seconds,
    owner_bytes,
    owner_seconds,
    ring_bytes,
    ring_seconds,
)
from experiments.noise import SYNC_EVERY

NUMEL = 1 << 21  # of what is coded: one frame
DDP = f"DDP, {SYNC_EVERY} steps"
# Name, exchange and code, as link.csv has them.
METHODS = (
    ("DiLoCo float32", "dense", "float32"),
    ("DiLoCo bfloat16", "dense", "bfloat16"),
    ("DiLoCo int8", "dense", "int8"),
    ("PULSELoCo gather fast", "gather", "fast"),
    ("PULSELoCo gather tight", "gather", "tight"),
    ("PULSELoCo owner fast", "owner", "fast"),
    ("PULSELoCo owner tight", "owner", "tight"),
)


class Model:
    """The measured codes and densities, and what they predict."""

    def __init__(self, payloads: list[dict[str, Any]], densities: list[dict[str, Any]]) -> None:
        self.codes, self.adding = codes(payloads)
        self.densities = {int(row["sites"]): row for row in densities}

    @staticmethod
    def of(folder: Path, numel: int, again: bool) -> Model:
        """The latest measurement in the folder, or a new one."""
        tables = folder / "payloads.csv", folder / "densities.csv"
        if again or not all(table.exists() for table in tables):
            run = {"run": int(time.time())}
            for table, rows in zip(tables, measure(numel), strict=True):
                append(table, [run | row for row in rows], torch.device("cpu"))
        return Model(*(latest_run(table) for table in tables))

    def setting(self, sites: int, numel: float, rate: float, **more: Any) -> Setting:
        """One of noise. Up to 16 sites were simulated; of more the union is by classes."""
        row = self.densities[sites]
        union = row["union"] or row["by_class"]
        return Setting(
            **{"sites": sites, "numel": int(numel), "rate": rate, "density": row["density"], "union": union}
            | more
        )

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

    def show(self) -> None:
        print("one core, M parameters/s, at the density of 4 sites (noise); bytes per entry")
        at = self.densities[4]
        for name, code in self.codes.items():
            dense = name not in ("fast", "tight")
            for of, density in (
                (("all", 1.0),) if dense else (("one site", at["density"]), ("sums", at["union"]))
            ):
                print(f"  {name:<9} {of:<9} {density:>7.1%}  {_speeds(code, density)}")
        print("entries of the sums, share of all: simulated, by class, and if elements were independent")
        for sites, row in self.densities.items():
            simulated = f"{row['union']:.1%}" if row["union"] else ""
            same = f"{row['same_anchor']:.1%}" if row["same_anchor"] else ""
            print(
                f"  {sites:>4} sites {simulated:>6} (of the same θ {same:>6}) {row['by_class']:>6.1%} "
                f"{row['independent']:>7.1%}"
            )


def _all_of(at: Setting) -> Setting:
    return replace(at, density=1.0, union=1.0)


def _speeds(code: Code, density: float) -> str:
    def speed(work: Work) -> str:
        return f"{1 / max(work.of(1e6, density), 1e-12):>8,.0f}"

    return f"seal {speed(code.seal)}  open {speed(code.open)}  {code.body(1, density) / density:.2f} bytes"


def check(model: Model, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
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


def ddp(sites: int, numel: int, rate: float | None, like: dict[str, Any]) -> dict[str, Any]:
    """A ring all-reduce of FP32 gradients in each of H steps, at the speed that the links had."""
    at = Setting(sites=sites, numel=numel, rate=rate or like["speed"], latency=like["latency"] / 2)
    seconds = ring_seconds(at, steps=SYNC_EVERY)
    row = dict.fromkeys(like, "") | {"method": DDP, "source": "model", "exchange": "ring", "wire": "float32"}
    row |= {name: like[name] for name in ("sites", "numel", "rate_mbit", "dense_bytes", "latency", "speed")}
    return row | {"p50": seconds, "exchange_s": seconds, "sent_bytes": ring_bytes(at, steps=SYNC_EVERY)}


def modelled(
    sites: int, numel: int, rates: list[float | None], methods: list[str], folder: Path
) -> Iterator[list[dict[str, Any]]]:
    """Rows for link.csv where no link can be measured: on a core for each site, without latency."""
    model = Model.of(folder, NUMEL, False)
    for rate in rates:
        if rate is None:
            continue  # what the bridge carries is not known without one
        at = model.setting(sites, numel, rate)
        rows = []
        for method, exchange, code in METHODS:
            if method not in methods:
                continue
            seconds, sent = model.seconds(exchange, code, at), model.bytes(exchange, code, at)
            place = {"sites": sites, "numel": numel, "rate_mbit": rate / MBIT, "method": method}
            rows.append(
                dict.fromkeys(COLUMNS, "")
                | place
                | {
                    "source": "model",
                    "exchange": exchange,
                    "wire": code,
                    "p50": seconds,
                    "exchange_s": seconds,
                }
                | {"density": at.density, "sent_bytes": sent, "latency": 0.0, "speed": rate}
                | {"dense_bytes": ring_bytes(at)}
            )
        yield [*rows, ddp(sites, numel, rate, rows[0])]


# The columns of link.csv, whatever the source.
COLUMNS = (
    *("sites", "numel", "rate_mbit", "method", "source", "exchange", "wire", "rounds", "p20", "p50", "p80"),
    *("exchange_s", "encode_s", "apply_s", "coding_cpu_s", "core_share", "cpu_s", "density"),
    *("sent_bytes", "received_bytes", "dense_bytes", "interface_bytes", "interface_packets", "unexplained"),
    *("cores", "latency", "speed"),
)
