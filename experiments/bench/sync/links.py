"""From `publish` to live weights over links of a rate: both ends in network namespaces of their own.

One end publishes into a folder and serves it over HTTP, the other waits in `update(wait=…)`. The time is
from when `publish` is called to when `apply` is done; then the weights of both ends are compared, bit for
bit. In each turn a new publisher begins with an anchor, which sends everything, and goes on with patches.
Each end has one thread.

Beside it stand what the same bytes would take at the link's rate alone, for BF16 weights as they are, and for
as many bytes a weight as the paper's patches had (108 MB for 7B).
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import loco
from experiments.bench.measuring import CPU, Row, Table, quantiles, rate_name
from experiments.bench.processes.namespaces import MBIT, Network, counters, why_not
from experiments.bench.processes.sites import Sites
from experiments.bench.simulation.simulator import GOODPUT
from experiments.bench.sync.traces import ONE_PERCENT, Model, flat, noise_versions, same_bits
from experiments.processes.progress import Progress
from loco.sync.storage.server import serve

NUMEL, QUICK, TILE = 64 << 20, 4 << 20, 2 << 20
RATES = (200, 1000)  # Mbit/s
TURNS, PATCHES = 3, 8
PAPER_BYTES = 108e6 / 7e9  # a weight
DENSE, PAPER = "BF16 as it is, the link alone", "the paper's bytes, the link alone"
_LEAD = 0.5  # seconds that the subscriber waits already
_PUBLISHER, _SUBSCRIBER = 0, 1
_MEDIANS = ("publish_s", "find_pack_s", "apply_s", "bytes", "received_bytes", "link_s")
SHOWN = {
    "rate_mbit": ">9",
    "numel": ">11,",
    "density": ">8.2%",
    "what": "<34",
    "p20": ">8.3f",
    "p50": ">8.3f",
}
SHOWN |= {"p80": ">8.3f", "publish_s": ">9.3f", "link_s": ">8.3f", "apply_s": ">8.3f", "bytes": ">12,.0f"}
SHOWN |= {"received_bytes": ">14,.0f"}


class End:
    """The publisher, or the subscriber."""

    def __init__(self, site: int, numel: int, tile: str) -> None:
        torch.set_num_threads(1)
        self._is_publisher = site == _PUBLISHER
        self._versions = list(np.load(tile, allow_pickle=False))
        self._model = Model(numel, self._versions)
        self._shown = 0
        self._closing = ExitStack()
        self._publisher: loco.sync.Publisher | None = None
        self._subscriber: loco.sync.Subscriber | None = None

    def begin(self) -> str | None:
        """A new publisher behind a new server. -> its URL"""
        self._closing.close()
        self._shown = 0
        if not self._is_publisher:
            return None
        folder = self._closing.enter_context(tempfile.TemporaryDirectory())
        self._model.show(0)
        self._publisher = loco.sync.Publisher(self._model.tensors, folder)
        return self._closing.enter_context(serve(folder, "10.0.0.1", 0)).url

    def subscribe(self, url: str) -> None:
        if not self._is_publisher:
            self._held = {name: torch.zeros_like(piece) for name, piece in self._model.tensors.items()}
            self._subscriber = loco.sync.Subscriber(self._held, url)

    def step(self) -> dict[str, Any]:
        """The next version goes from the one end to the other."""
        version, self._shown = self._shown, self._shown + 1
        if self._is_publisher:
            assert self._publisher is not None
            self._model.show(version)
            time.sleep(_LEAD)
            begun = time.perf_counter()
            published = self._publisher.publish()
            found = {"begun": begun, "publish_s": time.perf_counter() - begun}
            found["find_pack_s"] = published.seconds["find"] + published.seconds["pack"]
            return found | {"skips": len(published.skips)}
        assert self._subscriber is not None
        before = counters()
        updated = self._subscriber.update(wait=120.0)
        live, moved = time.perf_counter(), counters() - before
        self._model.show(version)
        if not same_bits(self._held.values(), self._model.pieces):
            raise RuntimeError("the weights that came are not those that were published")
        found = {"live": live, "entries": updated.entries, "bytes": updated.bytes}
        return found | {"apply_s": updated.seconds["apply"], "received_bytes": moved.received_bytes}


def measure(out: Path, run: Row, *, quick: bool) -> None:
    if (reason := why_not()) is not None:
        print(f"no links can be measured: {reason}", file=sys.stderr)
        return
    numel, turns, patches = (QUICK, 1, 2) if quick else (NUMEL, TURNS, PATCHES)
    table = Table(out / "sync_links.csv", CPU, SHOWN)
    with tempfile.TemporaryDirectory() as folder:
        tile = Path(folder) / "tile.npy"
        versions = noise_versions(min(TILE, numel // 16), ONE_PERCENT, count=patches + 1)
        np.save(tile, np.stack([flat(version) for version in versions]))
        network = Network()
        with (
            Sites(2, End, numel, str(tile), timeout=600.0, network=network) as ends,
            Progress("links", total=len(RATES) * turns * (patches + 1)) as progress,
        ):
            for rate in RATES[-1:] if quick else RATES:
                network.shape(rate * MBIT)
                seen: dict[str, list[dict[str, Any]]] = {}
                for _ in range(turns):
                    url = ends.call("begin")[_PUBLISHER]
                    ends.call("subscribe", url)
                    for k in range(patches + 1):
                        published, updated = ends.call("step")
                        one = published | updated | {"seconds": updated["live"] - published["begun"]}
                        one["link_s"] = one["received_bytes"] / (rate * MBIT)
                        seen.setdefault(_kind(k, one), []).append(one)
                        progress.advance(rate_name(rate))
                table.add([run | row for row in rows_of(rate, numel, seen)])
    table.close()


def _kind(k: int, seen: dict[str, Any]) -> str:
    if k == 0:
        return "anchor"
    return "patch and longer patches" if seen["skips"] else "patch"


def rows_of(rate: float, numel: int, seen: dict[str, list[dict[str, Any]]]) -> list[Row]:
    rows = []
    for what, found in seen.items():
        entries = median(one["entries"] for one in found)
        row = {
            "rate_mbit": rate,
            "numel": numel,
            "what": what,
            "repeats": len(found),
            "density": entries / numel,
        }
        row |= quantiles([one["seconds"] for one in found])
        rows.append(row | {name: median(one[name] for one in found) for name in _MEDIANS})
    for what, size in ((DENSE, 2.0 * numel), (PAPER, PAPER_BYTES * numel)):
        link = size / (rate * MBIT * GOODPUT)
        row = dict.fromkeys(rows[0]) | {"rate_mbit": rate, "numel": numel, "what": what, "bytes": size}
        rows.append(row | {"p50": link, "link_s": link})
    return rows
