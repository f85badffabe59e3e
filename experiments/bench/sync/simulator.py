"""How long it takes from `publish` to live weights, by arithmetic, stage after stage.

Coding takes as many core-seconds a weight as were measured, divided among a publisher's cores and a
subscriber's. Each machine has one link, of the same rate in either direction, of which TCP leaves 95.6%. The
store is one server, through whose link everything comes and goes; or that and relays of it, which share the
subscribers and take file by file; or an object store, which is never what is waited for; or the publisher's
own folder, which it serves itself.

A subscriber asks for one file after the other: for each publisher its patch and about a dozen manifests. Then
it decodes, then it writes. Nothing overlaps, as in `Subscriber.update`. What it leaves out: other traffic,
machines that fail, generation that waits, the disk, and weights that must be copied from a GPU or into one.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.bench.measuring import Row
from experiments.bench.simulation.simulator import GOODPUT
from experiments.bench.sync.sizes import OURS

SERVER, RELAYS, OBJECTS, OWN = "one server", "10 relays", "object store", "the publisher's"


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
        store: SERVER, RELAYS, OBJECTS or OWN.
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
    at_the_store = {SERVER: at.subscribers, RELAYS: at.relays, OBJECTS: 0, OWN: at.subscribers}[at.store]
    at_a_relay = at.subscribers / at.relays if at.store == RELAYS else 0
    uploads = {SERVER: patch, RELAYS: patch, OBJECTS: patch / at.publishers, OWN: 0.0}[at.store]
    return {
        "find_pack_s": own * costs.find_pack / at.publisher_cores,
        "upload_s": uploads / link,
        "requests_s": at.publishers * at.requests * at.latency,
        "egress_s": at_the_store * patch / link,
        "relays_s": at_a_relay * patch / link,
        # Where many wait for one link, their own are idle most of the time.
        "download_s": patch / link if at.store == OBJECTS else 0.0,
        "unpack_s": at.numel * costs.unpack / at.subscriber_cores,
        "apply_s": at.numel * costs.swap / at.subscriber_cores,
    }
