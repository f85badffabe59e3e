"""From `publish` to live weights for 10^12 parameters, by the simulator and what was measured here.

256 publishers share the work; 100 subscribers take every version, in which 0.8% of the weights change.
`simulator` says what its arithmetic assumes, besides:

- Core-seconds a weight are those of sync_speed.csv: 8 cores for a publisher (of a host's 64, for 8 ranks),
  128 for a subscriber (two such hosts).
- A changed weight takes as many bytes as in sync_sizes.csv (noise, lr 1e-6, one step apart).
- A request takes a millisecond.

The same arithmetic stands beside what sync_links.csv has measured: predicted ÷ measured (sync_check.csv).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from experiments.bench.measuring import CPU, Row, Table, append, latest_run
from experiments.bench.processes.namespaces import GBIT, MBIT
from experiments.bench.sync.simulator import OBJECTS, OWN, RELAYS, SERVER, Costs, Setting, stages

RATES = (1, 10, 100)  # Gbit/s
STAGES = (
    "find_pack_s",
    "upload_s",
    "requests_s",
    "egress_s",
    "relays_s",
    "download_s",
    "unpack_s",
    "apply_s",
)
PUBLISHED = 20.0  # seconds: checkpoint-engine's, for all weights of a model of 10^12 parameters
SHOWN = {"store": "<13", "rate_gbit": ">9g", **dict.fromkeys(STAGES, ">11.2f")}
SHOWN |= {"seconds": ">9.1f", "bound": "<12"}
CHECKED = {"rate_mbit": ">9", "numel": ">11,", "density": ">8.2%", "what": "<24", "predicted_s": ">11.3f"}
CHECKED |= {"measured_s": ">10.3f", "time_ratio": ">10.2f"}


def project(costs: Costs) -> Iterator[Row]:
    for store, rate in itertools.product((SERVER, RELAYS, OBJECTS), RATES):
        at = Setting(rate=rate * GBIT, store=store)
        each = stages(costs, at)
        row = {"store": store, "rate_gbit": rate, "numel": at.numel, "density": at.density}
        row |= {"publishers": at.publishers, "subscribers": at.subscribers}
        row |= {"publisher_cores": at.publisher_cores, "subscriber_cores": at.subscriber_cores}
        row |= {"patch_bytes": at.numel * at.density * costs.entry_bytes}
        row |= each | {"seconds": sum(each.values()), "published_s": PUBLISHED}
        yield row | {"bound": max(each, key=lambda name: each[name]).removesuffix("_s")}


def check(costs: Costs, links: list[Row]) -> Iterator[Row]:
    """Each patch that crossed a link, beside what the simulator says. Both ends had one core."""
    for row in links:
        if not row["what"].startswith("patch"):
            continue
        each = stages(
            costs,
            Setting(
                rate=row["rate_mbit"] * MBIT,
                store=OWN,
                numel=row["numel"],
                density=row["density"],
                publishers=1,
                subscribers=1,
                publisher_cores=1,
                subscriber_cores=1,
                requests=3,  # a listing, a manifest, a patch
            ),
        )
        found = {name: row[name] for name in ("rate_mbit", "numel", "density", "what")}
        predicted = sum(each.values())
        yield found | {
            "predicted_s": predicted,
            "measured_s": row["p50"],
            "time_ratio": predicted / row["p50"],
        }


def measure(out: Path, run: Row, *, quick: bool) -> None:
    tables = [out / f"sync_{name}.csv" for name in ("speed", "sizes")]
    if missing := [table.name for table in tables if not table.exists()]:
        print(f"nothing is projected: {out} has no {' and no '.join(missing)} (--only speed sizes)")
        return
    costs = Costs.of(*(latest_run(table) for table in tables))
    if (links := out / "sync_links.csv").exists():
        beside = Table(out / "sync_check.csv", CPU, CHECKED)
        beside.add([run | row for row in check(costs, latest_run(links))])
        beside.close()
    table = Table(out / "sync_projection.csv", CPU, SHOWN)
    rows = list(project(costs))
    table.show(rows)
    append(table.path, [run | row for row in rows])
    table.close()
