"""From `publish` to live weights for 10^12 parameters, by arithmetic from what was measured here.

256 publishers share the work; 100 subscribers take every version, in which 0.8% of the weights change. What
is assumed, besides:

- Coding takes as many core-seconds a weight as in sync_speed.csv, and is divided among a publisher's 8 cores
  (of a host's 64, for 8 ranks) and a subscriber's 128 (two such hosts). Weights lie in host memory at both
  ends: what it takes to copy them from a GPU and to scatter into it is not counted.
- A changed weight takes as many bytes as in sync_sizes.csv (noise, lr 1e-6, one step apart).
- Each machine has one link, of the same rate in either direction, of which TCP leaves 95.6%.
- The store is one server, through whose link everything comes and goes; or 10 relays of it, of which each
  serves 10 subscribers, file by file; or an object store, which is never what is waited for.
- A subscriber asks for one file after the other: for each publisher its patch and about a dozen manifests, at
  a millisecond each. Then it decodes, then it writes. Nothing overlaps, as in `Subscriber.update`.

Nothing here says what happens beside it: generation that waits, other traffic, machines that fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.measuring import CPU, Row, Table, append, latest_run
from experiments.bench.namespaces import GBIT
from experiments.bench.simulator import GOODPUT
from experiments.bench.sync.sizes import OURS

RATES = (1, 10, 100)  # Gbit/s
SERVER, RELAYS, OBJECTS = "one server", "10 relays", "object store"
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


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Core-seconds a weight, at about the density that is projected; bytes a changed weight."""

    find_pack: float
    unpack: float
    swap: float
    entry_bytes: float

    @staticmethod
    def of(speed: list[Row], sizes: list[Row]) -> Costs:
        cpu = {row["work"]: row["cpu"] / row["numel"] for row in speed if row["source"] == "bfloat16"}
        ours = [r for r in sizes if (r["data"], r["lr"], r["apart"], r["by"]) == ("noise", 1e-6, 1, OURS)]
        each = ours[0]["bytes_per_entry"]
        return Costs(find_pack=cpu["find + pack"], unpack=cpu["unpack"], swap=cpu["swap"], entry_bytes=each)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """
    Args:
        rate: of every link, bytes per second.
        store: SERVER, RELAYS or OBJECTS.
        requests: of a subscriber to each publisher's files; each takes `latency` seconds.
    """

    rate: float
    store: str
    numel: float = 1e12
    density: float = 0.008
    publishers: int = 256
    subscribers: int = 100
    relays: int = 10
    publisher_cores: int = 8
    subscriber_cores: int = 128
    requests: int = 13
    latency: float = 1e-3


def stages(costs: Costs, at: Setting) -> dict[str, float]:
    """Seconds of each, one after the other."""
    patch = at.numel * at.density * costs.entry_bytes
    link = at.rate * GOODPUT
    own = at.numel / at.publishers
    through_a_link = at.store != OBJECTS
    at_the_store = {SERVER: at.subscribers, RELAYS: at.relays, OBJECTS: 0}[at.store]
    at_a_relay = at.subscribers / at.relays if at.store == RELAYS else 0
    return {
        "find_pack_s": own * costs.find_pack / at.publisher_cores,
        "upload_s": (patch if through_a_link else patch / at.publishers) / link,
        "requests_s": at.publishers * at.requests * at.latency,
        "egress_s": at_the_store * patch / link,
        "relays_s": at_a_relay * patch / link,
        # Where many wait for one link, their own are idle most of the time.
        "download_s": 0.0 if through_a_link else patch / link,
        "unpack_s": at.numel * costs.unpack / at.subscriber_cores,
        "apply_s": at.numel * costs.swap / at.subscriber_cores,
    }


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


def measure(out: Path, run: Row, *, quick: bool) -> None:
    tables = [out / f"sync_{name}.csv" for name in ("speed", "sizes")]
    if missing := [table.name for table in tables if not table.exists()]:
        print(f"nothing is projected: {out} has no {' and no '.join(missing)} (--only speed sizes)")
        return
    table = Table(out / "sync_projection.csv", CPU, SHOWN)
    rows = list(project(Costs.of(*(latest_run(table) for table in tables))))
    table.show(rows)
    append(table.path, [run | row for row in rows])
    table.close()
