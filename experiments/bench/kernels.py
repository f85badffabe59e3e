"""A round's own work, without a network, as a share of the roof: the bytes that each pass must move, over the
bandwidth of a plain copy measured in the same minute on the same memory.

    python -m experiments.bench kernels
    python -m experiments.bench kernels --numel 67108864 --densities 0.01 --repeats 15

Encode must read θ, w and e, 12 bytes per parameter, and write its entries. Apply, as loco does it, reads θ, m
and w and e, writes them, 32 bytes, and reads the entries. A whole round is judged against 36, the least that
any order of the work could do, and is measured as `sync()` of a single site, its report, digests and votes
included. With more sites entries are also coded and decoded, which `bench wire` measures. Where a CPU writes
memory that is not in its cache it first reads it, which a copy's count leaves out; apply writes only what it
has read, and can exceed this roof. The CSV also has the bandwidth of adding in place, which is the fastest
traffic here.

Where rounds overlap, a boundary does the work of encode and apply in one pass, 32 bytes, beside the entries
that have been sent, have come and are sent now. Before the next inner step the weights are checked, 8 bytes.

Nothing is timed before its results agree with the reference, bit for bit. Scratch is what a pass takes on top
of the state and of what it returns. Rows go to runs/bench/kernels.csv, with a plot beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

import loco
from experiments.bench.measuring import Row, Table, arguments_of, peak_bytes, quantiles, seconds
from experiments.noise import SIGMA
from loco import kernels
from loco.kernels import Entries, Gate, OuterStep, reference

ENCODE, APPLY, ROUND, BOUNDARY, CHECK = 12, 32, 36, 32, 8  # bytes per parameter
DENSITIES = (0.005, 0.01, 0.05, 0.12)
M = 1 << 20
SIZES = {"cpu": (M, 4 * M, 16 * M, 64 * M, 256 * M), "cuda": (M, 16 * M, 128 * M, 1024 * M, 2000 * M)}
REFERENCE = "torch reference"
OUTER = OuterStep(divisor=1, lr=0.7, momentum=0.9, nesterov=True)
SHOWN = {"numel": ">13,", "density": ">8.2%", "pass": "<6", "by": "<30", "p50": ">9.5f"}
SHOWN |= {"share_of_roof": ">13.1%", "scratch_bytes": ">13.3f"}


def main(arguments: list[str]) -> None:
    parser = arguments_of("kernels", __doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--numel", type=int, nargs="+", help="parameters; 1M to 256M, on a GPU to 2B")
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if kernels.home(device.type) is reference:
        sys.exit("the kernels can't be used here (the warning above says why): there is nothing to measure")
    drawn = {"panel": ("asked",), "x": "numel", "y": "share_of_roof", "line": ("pass", "by")}
    table = Table(options.out / "kernels.csv", device, SHOWN, **drawn)
    for numel in options.numel or SIZES[device.type]:
        for density in options.densities:
            rows = measure(device, numel, density, options.repeats)
            table.add([{"asked": density} | row for row in rows])
    table.close()


def measure(device: torch.device, numel: int, density: float, repeats: int) -> Iterator[Row]:
    """All passes, and the reference's, on one state."""
    state = State(device, numel, density)
    entries = check(state)
    own_bytes = _bytes(entries)
    of_entries = own_bytes / numel

    # On the state itself: how fast memory is depends on where it happens to lie.
    copy = median(seconds(lambda: state.momentum.copy_(state.residual), device, repeats))
    adding = median(seconds(lambda: state.momentum.add_(1.0), device, repeats))
    roof = 8 * numel / copy  # bytes read and written
    common = {
        "numel": numel,
        "density": entries.values.numel() / numel,
        "threads": torch.get_num_threads(),
        "copy_bytes_per_s": roof,
        "in_place_bytes_per_s": 8 * numel / adding,
    }

    def row(name: str, by: str, call: Callable[[], object], moved: float, returns: int | None = None) -> Row:
        """moved: bytes per parameter, for the share of the roof; returns: bytes that are no scratch."""
        scratch = None
        if returns is not None:
            state.restore()
            scratch = max(peak_bytes(call, device) - returns, 0) / numel
        few = min(repeats, 3) if by == REFERENCE else repeats
        times = quantiles(seconds(call, device, few, state.restore))
        times["share_of_roof"] = moved * numel / roof / times["p50"]
        return common | {"pass": name, "by": by} | times | {"scratch_bytes": scratch}

    gate, anchor, weights, residual = Gate(), state.anchor, state.weights, state.residual
    encoded = (anchor, weights, residual, gate)
    applied = (anchor, state.momentum, weights, residual, entries, [entries], OUTER)
    encode, apply = ENCODE + of_entries, APPLY + of_entries
    yield row("encode", "loco", lambda: kernels.encode(*encoded), encode, own_bytes)
    yield row("apply", "loco", lambda: kernels.apply(*applied), apply, 0)
    crossing = (anchor, state.momentum, weights, residual, entries, [entries], OUTER, gate, 1.0)

    yield row("boundary", "loco", lambda: kernels.cross(*crossing), BOUNDARY + 3 * of_entries, own_bytes)
    casts = [part.clone() for part in anchor.split([w.numel() for w in weights])]
    yield row("check", "loco", lambda: kernels.first_changed(anchor, casts, None, 0.0), CHECK, 0)
    payload = 2 * own_bytes  # the entries, and the same as the wire has them
    yield row("round", "loco", state.optimizer.sync, ROUND, payload)
    yield row("encode", REFERENCE, lambda: reference.encode(*encoded), encode)
    yield row("apply", REFERENCE, lambda: reference.apply(*applied), apply)


class State:
    """A single site before its round: about `density` of its weights would change their BF16 value."""

    def __init__(self, device: torch.device, numel: int, density: float, *, offload: bool = False) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def noise(scale: float) -> Tensor:
            return torch.randn(numel, generator=generator, device=device).mul_(scale)

        scale = scale_for(density)
        start = noise(SIGMA)
        # Matrices and vectors, as models have them.
        sizes = []
        while sum(sizes) < numel:
            sizes.append(min(numel - sum(sizes), (4 * M, 1024)[len(sizes) % 2]))
        self.params = [torch.nn.Parameter(part.clone()) for part in start.split(sizes)]
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        inner = torch.optim.SGD(self.params, lr=1.0)
        self.optimizer = loco.PulseLoCo(inner, gate_gain=1.0, offload=offload)
        outer = self.optimizer.outer_state
        assert outer.momentum is not None
        assert outer.residual is not None
        self.anchor, self.momentum, self.residual = outer.anchor, outer.momentum, outer.residual
        self.weights = [p.detach().view(-1) for p in self.params]
        self._saved = start, start - noise(scale), noise(scale)
        self.restore()

    def restore(self) -> None:
        anchor, moved, residual = self._saved
        self.anchor.copy_(anchor)
        self.residual.copy_(residual)
        self.momentum.zero_()
        for w, part in zip(self.weights, moved.split([w.numel() for w in self.weights]), strict=True):
            w.copy_(part)


def scale_for(density: float) -> float:
    """How large noise-like updates must be, to make this share of noise-like weights visible."""
    generator = torch.Generator().manual_seed(1)
    anchor, a, b = (torch.randn(M, generator=generator) for _ in range(3))
    anchor *= SIGMA
    low, high = 1e-9, 1e-2
    for _ in range(20):
        middle = (low * high) ** 0.5
        share = float(reference.visible(anchor, middle * (a + b), Gate()).float().mean())
        low, high = (middle, high) if share < density else (low, middle)
    return low


def check(state: State) -> Entries:
    """Refuse to time what is wrong: every result against the reference, bit for bit. -> the entries"""
    gate = Gate()
    mine = kernels.encode(state.anchor, state.weights, state.residual, gate)
    theirs = reference.encode(state.anchor, state.weights, state.residual, gate)
    same = [mine.digest == theirs.digest, mine.first_nonfinite == theirs.first_nonfinite]
    same += [_equal(a, b) for a, b in zip(mine.entries, theirs.entries, strict=True)]
    del theirs
    anchor, momentum, residual = (t.clone() for t in (state.anchor, state.momentum, state.residual))
    weights = [w.clone() for w in state.weights]
    entries = mine.entries
    reference.apply(anchor, momentum, weights, residual, entries, [entries], OUTER)
    kernels.apply(state.anchor, state.momentum, state.weights, state.residual, entries, [entries], OUTER)
    theirs = (anchor, momentum, residual, *weights)
    own = (state.anchor, state.momentum, state.residual, *state.weights)
    same += [_equal(a, b) for a, b in zip(theirs, own, strict=True)]
    if not all(same):
        sys.exit("the kernels' results differ from the reference's: nothing was timed")
    state.restore()
    return entries


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    assert a is not None
    assert b is not None
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _bytes(entries: Entries) -> int:
    return sum(t.numel() * t.element_size() for t in entries if t is not None)
