"""Bytes of a changed weight, everything included: what a subscriber that takes every version downloads.

Versions go through a `Publisher` and a `Subscriber`: the patch from the version before, and the manifest.
The entropy is the length of an adaptive code of places, directions and sizes, given the old exponents, that
learns from all versions together (experiments/weight_entropy.py); each patch learns anew. Others' formats are
experiments/weight_formats.py's, without their headers; NeMo-RL's figure is the one that is published.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

import loco
from experiments.bench.measuring import CPU, Row, Table
from experiments.bench.sync.traces import Version, as_bfloat16, flat, noise_versions, same_bits
from experiments.processes.progress import Progress
from experiments.weight_changes import training
from experiments.weight_entropy import Measured
from experiments.weight_formats import FORMATS, usable_formats
from loco.sync.versions.manifest import FOLDER, Stream, name_of

OURS, ENTROPY, NEMO = "loco.sync", "entropy given the exponents", "NeMo-RL, as published"
NEMO_BYTES = 1.5  # bytes per changed weight, at the least
NUMEL, VERSIONS, STEPS = 8 << 20, 5, 24  # of noise; of training
WARM = 100  # steps of training before the first version
SHOWN = {"data": "<6", "lr": ">6.0e", "apart": ">5", "density": ">8.2%", "by": "<28", "bytes": ">12,.0f"}
SHOWN |= {"bytes_per_entry": ">15.3f", "below_dense": ">11.0f", "over_entropy": ">12.3f"}


class Trace(NamedTuple):
    data: str
    lr: float
    apart: int  # steps from one version to the next
    patches: int
    versions: Iterable[Version]


def measure(out: Path, run: Row, *, quick: bool) -> None:
    formats = usable_formats()
    if len(formats) < len(FORMATS):
        print("formats that need zstandard are left out: it is not installed (pip install zstandard)")
    table = Table(out / "sync_sizes.csv", CPU, SHOWN)
    for trace in traces(quick):
        table.add([run | row for row in rows_of(trace, list(formats))])
    table.close()


def traces(quick: bool) -> Iterable[Trace]:
    for lr in (1e-6,) if quick else (1e-6, 3e-6):
        for apart in (1, 8):
            numel, count = (1 << 19, 2) if quick else (NUMEL, VERSIONS)
            yield Trace("noise", lr, apart, count - 1, noise_versions(numel, lr, count=count, apart=apart))
    for lr in () if quick else (1e-6, 3e-6):
        yield Trace("GRPO", lr, 1, STEPS, training(lr=lr, steps=WARM + STEPS, after=WARM))


def rows_of(trace: Trace, formats: list[str]) -> list[Row]:
    """Each of the trace's versions through a publisher and a subscriber; a row for each format."""
    measured, spent = Measured(), dict.fromkeys([OURS, f"{OURS}, patch alone", *formats], 0)
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(f"{trace.data}, lr {trace.lr:g}, {trace.apart} apart", total=trace.patches + 1) as progress,
    ):
        versions = iter(trace.versions)
        old = next(versions)
        held = {name: as_bfloat16(bits.copy()) for name, bits in old.items()}
        publisher = loco.sync.Publisher(held, folder)
        target = {name: weights.clone() for name, weights in held.items()}
        subscriber = loco.sync.Subscriber(target, folder)
        publisher.publish()
        subscriber.update()
        progress.advance()
        for new in versions:
            for name, bits in new.items():
                held[name].copy_(as_bfloat16(bits))
            published, updated = publisher.publish(), subscriber.update()
            check(published, updated, flat(old), flat(new), same_bits(target.values(), held.values()))
            manifest = Path(folder) / FOLDER / name_of(published.version, Stream())
            spent[f"{OURS}, patch alone"] += published.patch_bytes
            spent[OURS] += published.patch_bytes + manifest.stat().st_size
            measured.add_given_exponents(flat(old), flat(new))
            shapes = [bits.shape for bits in new.values()]
            for name in formats:
                spent[name] += FORMATS[name](flat(old), flat(new), shapes)
            old = new
            progress.advance()
    entropy = measured.bytes_in_all()
    each = {name: size / measured.changed for name, size in spent.items()}
    each |= {NEMO: NEMO_BYTES, ENTROPY: entropy}
    common = {"data": trace.data, "lr": trace.lr, "apart": trace.apart, "patches": trace.patches}
    common |= {"numel": measured.weights // (trace.patches), "entries": measured.changed}
    common |= {"density": measured.changed / measured.weights}
    return [
        common
        | {"by": name, "bytes": bytes_ * measured.changed, "bytes_per_entry": bytes_}
        | {"below_dense": 2 * measured.weights / (bytes_ * measured.changed)}
        | {"over_entropy": bytes_ / entropy}
        for name, bytes_ in each.items()
    ]


def check(
    published: loco.sync.Published,
    updated: loco.sync.Updated,
    old: np.ndarray,
    new: np.ndarray,
    same: bool,
) -> None:
    """Raises if the subscriber does not hold the publisher's weights, or was sent something else."""
    changed = int((old != new).sum())
    if published.reason or updated.files != 1 or updated.bytes != published.patch_bytes:
        raise RuntimeError(f"version {published.version} did not come as one patch")
    if not same or not published.entries == updated.entries == changed:
        raise RuntimeError(f"the subscriber's version {published.version} is not the publisher's")
