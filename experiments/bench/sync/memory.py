"""Memory beside the model: of a publisher through many versions, and of a subscriber that takes one patch.

Figures are the kernel's: VmRSS, and VmHWM since its mark was reset, less what the process had before there
was a publisher or an update. Each is measured in a process of its own. A publisher keeps one BF16 copy and a
history from which the patches over several versions are made; a subscriber keeps what an update overwrites
until the next one. The row "trimmed" is what a publisher still has after malloc_trim.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

import loco
from experiments.bench.measuring import (
    CPU,
    Row,
    Table,
    append,
    kernel_bytes,
    resident_bytes,
    restart_peak,
)
from experiments.bench.processes.sites import Sites
from experiments.bench.sync.traces import ONE_PERCENT, Model, flat, noise_versions, same_bits

NUMEL, TILE, VERSIONS = 64 << 20, 1 << 20, 64
UPDATES = ((16 << 20, 1), (64 << 20, 1), (64 << 20, 8))  # weights, and steps from one version to the next
THREADS = 2
TRIMMED = "trimmed"
_SMALL = 1 << 16
COLUMNS = ("of", "numel", "source", "apart", "version", "what", "skips", "entries", "density")
COLUMNS += ("peak_bytes", "resident_bytes", "peak_per_weight", "resident_per_weight")
COLUMNS += ("peak_per_entry", "resident_per_entry")
SHOWN = {"of": "<10", "numel": ">11,", "source": "<8", "density": ">8.2%", "version": ">7", "what": "<7"}
SHOWN |= {"skips": ">5", "peak_per_weight": ">15.3f", "resident_per_weight": ">19.3f"}
SHOWN |= {"peak_per_entry": ">14.1f", "resident_per_entry": ">18.1f"}


def measure(out: Path, run: Row, *, quick: bool) -> None:
    table = Table(out / "sync_memory.csv", CPU, SHOWN)
    numel, count = (4 << 20, 8) if quick else (NUMEL, VERSIONS)
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32):
        rows = _rows(run, "publisher", _alone("publish", numel, dtype, count))
        table.show(row for row in rows if not row["version"] & (row["version"] - 1))  # powers of two
        append(table.path, rows)
    for numel, apart in ((4 << 20, 1),) if quick else UPDATES:
        table.add(_rows(run, "subscriber", _alone("update", numel, apart)))
    table.close()


def _alone(method: str, *args: Any) -> list[Row]:
    with Sites(1, Holder, timeout=600.0) as sites:
        return sites.call(method, *args)[0]


def _rows(run: Row, of: str, rows: list[Row]) -> list[Row]:
    for row in rows:
        for what in ("peak", "resident"):
            row[f"{what}_per_weight"] = row[f"{what}_bytes"] / row["numel"]
            if row["what"] == "patch":
                row[f"{what}_per_entry"] = row[f"{what}_bytes"] / row["entries"]
    return [run | dict.fromkeys(COLUMNS) | {"of": of} | row for row in rows]


class Holder:
    """A process that holds a model."""

    def __init__(self, site: int) -> None:
        torch.set_num_threads(THREADS)
        self.publish(_SMALL, torch.bfloat16, 3)  # loads the kernels, and whatever else stays

    def publish(self, numel: int, dtype: torch.dtype, count: int) -> list[Row]:
        """A row for each version, the first of which is an anchor."""
        versions = noise_versions(min(TILE, numel // 16), ONE_PERCENT, count=count)
        model = Model(numel, [flat(version) for version in versions], dtype)
        worker = {name: torch.zeros_like(p, dtype=torch.bfloat16) for name, p in model.tensors.items()}
        common = {"numel": numel, "source": str(dtype).removeprefix("torch."), "apart": 1}
        rows, before = [], resident_bytes()
        with tempfile.TemporaryDirectory() as folder:
            publisher = None
            for k in range(count):
                model.show(k)
                restart_peak()
                publisher = publisher or loco.sync.Publisher(model.tensors, folder)
                published = publisher.publish()
                peak, resident = kernel_bytes("VmHWM"), kernel_bytes("VmRSS")
                about = {"version": published.version, "what": "anchor" if published.reason else "patch"}
                about |= {"skips": len(published.skips), "entries": published.entries}
                about |= {"density": published.entries / numel}
                rows.append(
                    common | about | {"peak_bytes": peak - before, "resident_bytes": resident - before}
                )
            if publisher is not None:
                # What it needs, without what the C library keeps of freed memory to use it again.
                rows.append(rows[-1] | {"what": TRIMMED, "resident_bytes": resident_bytes() - before})
            loco.sync.Subscriber(worker, folder).update()
        _require_same(model, worker)
        return rows

    def update(self, numel: int, apart: int) -> list[Row]:
        """The row of one patch."""
        versions = noise_versions(min(TILE, numel // 16), ONE_PERCENT, count=3, apart=apart)
        model = Model(numel, [flat(version) for version in versions])
        worker = {name: torch.zeros_like(piece) for name, piece in model.tensors.items()}
        with tempfile.TemporaryDirectory() as folder:
            publisher, subscriber = (
                loco.sync.Publisher(model.tensors, folder),
                loco.sync.Subscriber(worker, folder),
            )
            for k in range(2):  # the first time also loads what an update needs
                model.show(k)
                publisher.publish()
                subscriber.update()
            model.show(2)
            publisher.publish()
            # What the update before keeps: its memory would be used again, and not seen.
            subscriber._now = subscriber._now._replace(undo=None)
            before = resident_bytes()
            restart_peak()
            updated = subscriber.update()
            peak, resident = kernel_bytes("VmHWM"), resident_bytes()
        _require_same(model, worker)
        about = {"numel": numel, "source": "bfloat16", "apart": apart, "version": updated.version}
        about |= {"what": "patch", "entries": updated.entries, "density": updated.entries / numel}
        return [about | {"peak_bytes": peak - before, "resident_bytes": resident - before}]


def _require_same(model: Model, worker: dict[str, torch.Tensor]) -> None:
    if not same_bits(worker.values(), (piece.to(torch.bfloat16) for piece in model.pieces)):
        raise RuntimeError("the subscriber's weights are not the publisher's")
