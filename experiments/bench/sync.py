"""What it costs to keep inference workers at the trainer's weights (`loco.sync`).

    python -m experiments.bench sync
    python -m experiments.bench sync --quick
    python -m experiments.bench sync --only memory

speed     finding, coding, decoding and writing 1% of changes, in turns with a copy of the weights
memory    what a publisher and a subscriber take beside the model, each in a process of its own

Most calls are judged by 4 bytes a weight, which is what a copy of BF16 weights moves: their share is the
copy's time over theirs. Writing changes (`swap`, `apply`) is judged by what it must move: of each cache line
that holds a change 64 bytes there and back, and of each change its position and its bits, which are swapped.
`cpu` are seconds of all cores together, which other work on the machine hardly changes.

Memory is the kernel's VmRSS, and VmHWM since its mark was reset, less what the process had before. The row
"trimmed" is what a publisher still has after malloc_trim.

Every part checks that a subscriber ends up with the publisher's weights, bit for bit, before it says what
that took. Rows go to experiments/results/bench/sync_<part>.csv, with a plot beside each.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import loco
from experiments.bench.measuring import (
    CPU,
    RESULTS,
    Row,
    Table,
    arguments_of,
    kernel_bytes,
    quantiles,
    resident_bytes,
    restart_peak,
)
from experiments.noise import SIGMA
from experiments.processes.progress import Progress
from experiments.processes.sites import Sites
from loco import kernels
from loco.kernels import Changes, reference_patch
from loco.kernels.reference import cast

NUMEL, QUICK = 64 << 20, 4 << 20  # weights
REPEATS, VERSIONS, THREADS = 15, 64, 2
UPDATES = ((16 << 20, 1), (64 << 20, 1), (64 << 20, 8))  # weights, and steps from one version to the next
ONE_PERCENT = 1.15e-6  # the learning rate at which a step of noise changes 1%
CHECKED = 1 << 17  # elements that the reference codes, too
LINE = 64  # bytes of a cache line
WHOLE = 4.0  # bytes of a weight that a copy moves
COPY, SWAP, APPLY, TRIMMED = "copy", "swap", "apply()", "trimmed"
TOGETHER = {
    "find + pack": ("find", "pack"),
    "unpack + swap": ("unpack", SWAP),
    "publish(), in all": ("publish(wait=False)", "flush()"),
}
_STEADY = 160  # steps of noise after which a step changes about as many weights as the one before
_SMALL = 1 << 16
T = TypeVar("T")
SPEED = {"numel": ">11,", "source": "<8", "density": ">8.2%", "work": "<28", "least": ">8.4f", "p50": ">8.4f"}
SPEED |= {"cpu": ">8.4f", "bytes_per_change": ">16.3f", "share_of_copy": ">13.1%"}
SPEED |= {"cpu_share_of_copy": ">17.1%"}
MEMORY = {"of": "<10", "numel": ">11,", "source": "<8", "density": ">8.2%", "version": ">7", "what": "<7"}
MEMORY |= {"skips": ">5", "peak_per_weight": ">15.3f", "resident_per_weight": ">19.3f"}


def main(arguments: list[str]) -> None:
    parser = arguments_of("sync", __doc__, RESULTS)
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    options = parser.parse_args(arguments)
    for part in options.only:
        print(f"-- {part}")
        PARTS[part](options.out, {"run": int(time.time())}, options.quick)


# ---- weights ----


def noise_versions(numel: int, *, count: int, apart: int = 1) -> list[Tensor]:
    """Successive BF16 versions of weights under Adam whose gradients are noise, N(0, 1)."""
    generator = torch.Generator().manual_seed(0)
    start = cast(torch.randn(numel, generator=generator) * SIGMA, torch.bfloat16).float()
    weights, gradient, found = torch.nn.Parameter(start), torch.empty(numel), []
    adam = torch.optim.Adam([weights], lr=ONE_PERCENT, betas=(0.9, 0.999), fused=True)
    for step in range(_STEADY + apart * (count - 1) + 1):
        if step >= _STEADY and (step - _STEADY) % apart == 0:
            found.append(cast(weights.detach(), torch.bfloat16))
        weights.grad = gradient.normal_(generator=generator)
        adam.step()
    return found


class Model:
    """Weights in host memory, matrices and vectors, that repeat one tile of some versions of noise.

    Args:
        versions: of the tile.
    """

    def __init__(self, numel: int, versions: Sequence[Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        self._versions = versions
        self.whole = torch.empty(numel, dtype=dtype)
        sizes: list[int] = []
        while sum(sizes) < numel:
            sizes.append(min(numel - sum(sizes), (4 << 20, 1024)[len(sizes) % 2]))
        self.pieces = list(self.whole.split(sizes))
        self.tensors = {f"layer{k}": piece for k, piece in enumerate(self.pieces)}
        self.show(0)

    def show(self, version: int) -> None:
        """Change all weights to those of a version, in place."""
        tile = self._versions[version]
        for part in self.whole.split(tile.numel()):
            part.copy_(tile[: part.numel()])

    def worker(self) -> dict[str, Tensor]:
        """Room for these weights in BF16."""
        return {name: torch.zeros_like(p, dtype=torch.bfloat16) for name, p in self.tensors.items()}

    def require_same(self, held: Iterable[Tensor]) -> None:
        for mine, theirs in zip(self.pieces, held, strict=True):
            if not torch.equal(mine.bfloat16().view(torch.int16), theirs.view(torch.int16)):
                raise RuntimeError("the weights that came are not those that were published")


# ---- speed ----


class Took(NamedTuple):
    seconds: float
    cpu: float


def speed(out: Path, run: Row, quick: bool) -> None:
    if not kernels.packs_fast():
        sys.exit("the patch kernels are not compiled here: there is nothing to measure")
    numel, repeats = (QUICK, 3) if quick else (NUMEL, REPEATS)
    before = torch.get_num_threads()
    torch.set_num_threads(min(THREADS, before))
    drawn = {"panel": ("source",), "x": "work", "y": "share_of_copy"}
    table = Table(out / "sync_speed.csv", CPU, SPEED, **drawn)
    tile = noise_versions(numel // 32, count=repeats + 2)
    check_against_reference(tile[0], tile[1])
    for source in (torch.bfloat16, torch.float32):
        rows = speed_rows(Model(numel, tile), Model(numel, tile, source), repeats)
        table.add([run | row for row in rows])
    torch.set_num_threads(before)
    table.close()


def check_against_reference(old: Tensor, new: Tensor) -> None:
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


def speed_rows(held: Model, model: Model, repeats: int) -> list[Row]:
    """
    Args:
        held: what a publisher keeps of the version before.
        model: the weights that it publishes.
    """
    numel, target = held.whole.numel(), torch.empty_like(held.whole)
    took: dict[str, list[Took]] = {}

    def timed(name: str, call: Callable[[], T]) -> T:
        cpu, begun = time.process_time(), time.perf_counter()
        found = call()
        one = Took(time.perf_counter() - begun, time.process_time() - cpu)
        took.setdefault(name, []).append(one)
        return found

    changes, body, worker = None, None, model.worker()
    with tempfile.TemporaryDirectory() as folder, Progress("speed", total=repeats + 1) as progress:
        publisher = loco.sync.Publisher(model.tensors, folder)
        subscriber = loco.sync.Subscriber(worker, folder)
        publisher.publish()
        subscriber.update()
        for turn in range(repeats + 1):
            model.show(turn + 1)
            timed(COPY, lambda: target.copy_(held.whole))
            changes = timed("find", lambda: kernels.find_changes(held.pieces, model.pieces))
            body = timed("pack", lambda found=changes: kernels.pack_patch(held.pieces, found))
            found = timed("unpack", lambda body=body: kernels.unpack_patch(held.pieces, body))
            timed(SWAP, lambda found=found: kernels.swap_bits(held.pieces, found))
            timed("publish(wait=False)", lambda: publisher.publish(wait=False))
            timed("flush()", publisher.flush)
            prepared = timed("prepare()", subscriber.prepare)
            timed(APPLY, lambda prepared=prepared: subscriber.apply(prepared))
            model.require_same(held.pieces)
            model.require_same(worker.values())
            progress.advance()
    assert changes is not None
    assert body is not None
    took = {name: some[1:] for name, some in took.items()}  # the first warms caches and pages up
    for name, parts in TOGETHER.items():
        some = zip(*(took[part] for part in parts), strict=True)
        took[name] = [Took(*map(sum, zip(*one, strict=True))) for one in some]
    common = {"numel": numel, "source": str(model.whole.dtype).removeprefix("torch.")}
    common |= {"density": changes.positions.numel() / numel, "threads": torch.get_num_threads()}
    common["bytes_per_change"] = body.numel() / changes.positions.numel()
    scattered, copies, rows = scattered_bytes(changes), took[COPY], []
    for name, some in took.items():
        moved = scattered if name in (SWAP, APPLY) else WHOLE * numel
        seconds, cpu = (median(column) for column in zip(*some, strict=True))
        copy_s, copy_cpu = (median(column) for column in zip(*copies, strict=True))
        part = moved / (WHOLE * numel)
        row = common | {"work": name, "repeats": len(some), "least": min(some).seconds, "cpu": cpu}
        row |= quantiles([one.seconds for one in some]) | {"moved_bytes": moved}
        shares = {"share_of_copy": part * copy_s / seconds, "cpu_share_of_copy": part * copy_cpu / cpu}
        rows.append(row | shares)
    return rows


def scattered_bytes(changes: Changes) -> float:
    """What writing some changes of BF16 weights must move, if all weights lie in a row."""
    lines = torch.unique_consecutive(changes.positions * 2 // LINE).numel()
    each = changes.positions.element_size() + 2 * changes.bits.element_size()
    return float(2 * LINE * lines + each * changes.positions.numel())


# ---- memory ----


def memory(out: Path, run: Row, quick: bool) -> None:
    drawn = {"panel": ("of", "source"), "x": "version", "y": "peak_per_weight", "line": ("numel",)}
    table = Table(out / "sync_memory.csv", CPU, MEMORY, **drawn)
    numel, count = (QUICK, 8) if quick else (NUMEL, VERSIONS)
    calls = [("publish", numel, dtype, count) for dtype in (torch.bfloat16, torch.float32)[: 2 - quick]]
    calls += [("update", *sizes) for sizes in (((QUICK, 1),) if quick else UPDATES)]
    for method, *arguments in calls:
        with Sites(1, Holder, timeout=600.0) as sites:
            table.add([run | row for row in sites.call(method, *arguments)[0]])
    table.close()


class Holder:
    """A process that holds a model."""

    def __init__(self, site: int) -> None:
        torch.set_num_threads(THREADS)
        self.publish(_SMALL, torch.bfloat16, 3)  # loads the kernels, and whatever else stays

    def publish(self, numel: int, dtype: torch.dtype, count: int) -> list[Row]:
        """A row for each version, the first of which is an anchor, and one for what stays at the end."""
        model = Model(numel, noise_versions(numel // 64, count=count), dtype)
        worker, rows, before = model.worker(), [], resident_bytes()
        common = {"of": "publisher", "numel": numel, "source": str(dtype).removeprefix("torch."), "apart": 1}
        with tempfile.TemporaryDirectory() as folder:
            publisher, published = None, None
            for k in range(count):
                model.show(k)
                restart_peak()
                publisher = publisher or loco.sync.Publisher(model.tensors, folder)
                published = publisher.publish()
                found = kernel_bytes("VmHWM") - before, kernel_bytes("VmRSS") - before
                what = "anchor" if published.reason else "patch"
                rows.append(common | _memory_row(published, what, numel, *found))
            # What it needs, without what the C library keeps of freed memory to use it again.
            left = resident_bytes() - before
            rows.append(common | _memory_row(published, TRIMMED, numel, left, left))
            loco.sync.Subscriber(worker, folder).update()
        model.require_same(worker.values())
        return rows

    def update(self, numel: int, apart: int) -> list[Row]:
        """The row of one patch."""
        model = Model(numel, noise_versions(numel // 64, count=3, apart=apart))
        worker = model.worker()
        with tempfile.TemporaryDirectory() as folder:
            publisher = loco.sync.Publisher(model.tensors, folder)
            subscriber = loco.sync.Subscriber(worker, folder)
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
            found = kernel_bytes("VmHWM") - before, resident_bytes() - before
        model.require_same(worker.values())
        common = {"of": "subscriber", "numel": numel, "source": "bfloat16", "apart": apart}
        return [common | _memory_row(updated, "patch", numel, *found)]


def _memory_row(made: Any, what: str, numel: int, peak: int, resident: int) -> Row:
    """`made` is what was published, or what an update says."""
    row = {"version": made.version, "what": what, "skips": len(getattr(made, "skips", ()))}
    row |= {"entries": made.entries, "density": made.entries / numel}
    row |= {"peak_bytes": peak, "resident_bytes": resident}
    return row | {"peak_per_weight": peak / numel, "resident_per_weight": resident / numel}


PARTS: dict[str, Callable[[Path, Row, bool], None]] = {"speed": speed, "memory": memory}
