"""How long finding, coding, decoding and writing 1% of changes takes, beside a copy of the weights.

All calls take turns with the copy, on the same memory. Most are judged by 4 bytes a weight, which is what
the copy of BF16 weights moves: the share is the copy's time over theirs. Writing changes alone (`apply`) is
judged by what it must move: of each cache line that holds a change 64 bytes there and back, and of each
change its position and its bits, which are swapped.

Seconds are a clock's, and `cpu` those of all cores together, which other work on the machine hardly changes.
Both have their share of the copy.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

import loco
from experiments.bench.measuring import CPU, Row, Table, quantiles
from experiments.bench.sync.traces import ONE_PERCENT, Model, flat, noise_versions, same_bits
from experiments.processes.progress import Progress
from experiments.weight_changes import Bits
from loco import kernels
from loco.kernels import Changes, reference_patch

NUMEL, QUICK, TILE = 64 << 20, 4 << 20, 2 << 20
REPEATS, THREADS = 15, 2
CHECKED = 1 << 17  # elements that the reference codes, too
LINE = 64  # bytes of a cache line
COPY = "copy"
WHOLE = 4.0  # bytes of a weight that a copy moves
PUBLISH, PREPARE, APPLY = "publish(), in all", "prepare()", "apply()"
TOGETHER = {
    "find + pack": ("find", "pack"),
    "unpack + swap": ("unpack", "swap"),
    PUBLISH: ("publish(wait=False)", "flush()"),
}
SCATTERS = ("swap", APPLY)
T = TypeVar("T")
SHOWN = {"numel": ">11,", "source": "<8", "density": ">8.2%", "work": "<28", "least": ">8.4f", "p50": ">8.4f"}
SHOWN |= {"cpu": ">8.4f", "moved_bytes": ">12,.0f", "share_of_copy": ">13.1%", "cpu_share_of_copy": ">17.1%"}


class Took(NamedTuple):
    seconds: float
    cpu: float


def measure(out: Path, run: Row, *, quick: bool) -> None:
    if not kernels.packs_fast():
        sys.exit("the patch kernels are not compiled here: there is nothing to measure")
    numel, repeats = (QUICK, 3) if quick else (NUMEL, REPEATS)
    before = torch.get_num_threads()
    torch.set_num_threads(min(THREADS, before))
    table = Table(out / "sync_speed.csv", CPU, SHOWN)
    tile = [flat(v) for v in noise_versions(min(TILE, numel // 16), ONE_PERCENT, count=repeats + 2)]
    check_against_reference(tile[0], tile[1])
    for source in (torch.bfloat16, torch.float32):
        rows = rows_of(Model(numel, tile), Model(numel, tile, source), repeats)
        table.add([run | row for row in rows])
    torch.set_num_threads(before)
    table.close()


def check_against_reference(old: Bits, new: Bits) -> None:
    """Raises unless the kernels' changes and bytes are the specification's, bit for bit."""
    a, b = (Model(CHECKED, [bits]).pieces for bits in (old, new))
    changes, expected = kernels.find_changes(a, b), reference_patch.find_changes(a, b)
    body = kernels.pack_patch(a, changes)
    if not (
        all(torch.equal(x, y) for x, y in zip(changes, expected, strict=True))
        and torch.equal(body, reference_patch.pack_patch(a, expected))
        and all(torch.equal(x, y) for x, y in zip(kernels.unpack_patch(a, body), expected, strict=True))
    ):
        raise RuntimeError("the kernels' patch differs from the reference's: nothing was timed")


def rows_of(held: Model, model: Model, repeats: int) -> list[Row]:
    """
    Args:
        held: what a publisher keeps of the version before.
        model: the weights that it publishes.
    """
    numel = held.whole.numel()
    target = torch.empty_like(held.whole)
    took: dict[str, list[Took]] = {}

    def timed(name: str, call: Callable[[], T]) -> T:
        cpu, begun = time.process_time(), time.perf_counter()
        found = call()
        seconds = time.perf_counter() - begun
        took.setdefault(name, []).append(Took(seconds, time.process_time() - cpu))
        return found

    with tempfile.TemporaryDirectory() as folder, Progress("speed", total=repeats + 1) as progress:
        publisher = loco.sync.Publisher(model.tensors, folder)
        worker = {
            name: torch.empty_like(piece, dtype=torch.bfloat16) for name, piece in model.tensors.items()
        }
        subscriber = loco.sync.Subscriber(worker, folder)
        publisher.publish()
        subscriber.update()
        changes = None
        for turn in range(repeats + 1):
            model.show(turn + 1)
            timed(COPY, lambda: target.copy_(held.whole))
            changes = timed("find", lambda: kernels.find_changes(held.pieces, model.pieces))
            body = timed("pack", lambda found=changes: kernels.pack_patch(held.pieces, found))
            found = timed("unpack", lambda body=body: kernels.unpack_patch(held.pieces, body))
            timed("swap", lambda found=found: kernels.swap_bits(held.pieces, found))
            timed("publish(wait=False)", lambda: publisher.publish(wait=False))
            timed("flush()", publisher.flush)
            prepared = timed(PREPARE, subscriber.prepare)
            timed(APPLY, lambda prepared=prepared: subscriber.apply(prepared))
            check(held.pieces, model.pieces, list(worker.values()))
            progress.advance()
    assert changes is not None
    took = {name: some[1:] for name, some in took.items()}  # the first warms caches and pages up
    for name, parts in TOGETHER.items():
        took[name] = [
            Took(*map(sum, zip(*some, strict=True))) for some in zip(*(took[p] for p in parts), strict=True)
        ]
    common = {"numel": numel, "source": str(model.whole.dtype).removeprefix("torch.")}
    common |= {"density": changes.positions.numel() / numel, "threads": torch.get_num_threads()}
    scattered = scattered_bytes(changes)
    return [common | _row(name, some, took[COPY], numel, scattered) for name, some in took.items()]


def _row(name: str, took: list[Took], copies: list[Took], numel: int, scattered: float) -> Row:
    moved = scattered if name in SCATTERS else WHOLE * numel
    seconds, cpu = (median(column) for column in zip(*took, strict=True))
    copy_s, copy_cpu = (median(column) for column in zip(*copies, strict=True))
    part = moved / (WHOLE * numel)
    row = {"work": name, "repeats": len(took), "least": min(took).seconds, "cpu": cpu, "moved_bytes": moved}
    row |= quantiles([one.seconds for one in took]) | {"copy_bytes_per_s": WHOLE * numel / copy_s}
    return row | {"share_of_copy": part * copy_s / seconds, "cpu_share_of_copy": part * copy_cpu / cpu}


def scattered_bytes(changes: Changes) -> float:
    """What writing some changes of BF16 weights must move, if all weights lie in a row."""
    lines = torch.unique_consecutive(changes.positions * 2 // LINE).numel()
    each = changes.positions.element_size() + 2 * changes.bits.element_size()
    return float(2 * LINE * lines + each * changes.positions.numel())


def check(held: list[Tensor], model: list[Tensor], worker: list[Tensor]) -> None:
    expected = [piece.to(torch.bfloat16) for piece in model]
    if not same_bits(held, expected) or not same_bits(worker, expected):
        raise RuntimeError("the weights that came are not those that were published")
