"""How near a round's own work comes to the memory's speed.

    python -m experiments.bench                      1M and 16M parameters, about 30 s
    python -m experiments.bench --numel 67108864     another size

Encode (steps 2 to 5) must read w, θ and e; a round must move 36 bytes per parameter in all. Each is quoted
as a share of the roof: those bytes over the bandwidth of a plain copy, measured in the same run, so that a
slow or busy machine slows both. Results are checked before anything is timed. Rows are appended to
runs/bench/kernels.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from experiments import machine
from loco import kernels
from loco.kernels import Entries, Gate, OuterStep

ENCODE_BYTES = 12  # per parameter: read w, θ, e
APPLY_BYTES = 24  # per parameter: read θ, m; write θ, m, w, e
SIGMA = 0.02  # of the weights
UPDATES = (2e-7, 3.6e-6)  # of the updates; chosen to make about 1% and 12% of the weights visible
OUTER = OuterStep(num_sites=1, lr=0.7, momentum=0.9, nesterov=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--numel", type=int, nargs="+", default=[1 << 20, 1 << 24])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/kernels.csv"))
    options = parser.parse_args()

    rows = []
    print(f"{'parameters':>12} {'density':>8} {'pass':>7} {'median':>10} {'share of roof':>14}")
    for numel in options.numel:
        for scale in UPDATES:
            for row in measure(numel, scale, options.repeats):
                rows.append(row)
                print(
                    f"{numel:>12,} {row['density']:>8.2%} {row['pass']:>7} "
                    f"{row['median_s'] * 1e3:>7.1f} ms {row['share_of_roof']:>14.1%}",
                    flush=True,
                )
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    append(options.out, rows)
    print(f"rows appended to {options.out}")
    return 0


def measure(numel: int, scale: float, repeats: int) -> list[dict[str, Any]]:
    """Medians of encode, apply and both, beside the copy's bandwidth of the same minute."""
    anchor, weights, residual = state(numel, scale)
    momentum = torch.zeros_like(anchor)
    gate = Gate()
    own = check(anchor, weights, residual, gate)

    source, target = torch.ones(numel), torch.empty(numel)
    copy = timed(lambda: target.copy_(source), repeats)
    bandwidth = 8 * numel / copy  # bytes read and written

    encode = timed(lambda: kernels.encode(anchor, [weights], residual, gate), repeats)
    # Applying moves θ, but what it costs does not depend on the values.
    apply = timed(lambda: kernels.apply(anchor, momentum, [weights], residual, own, [own], OUTER), repeats)
    return [
        {
            "numel": numel,
            "density": own.values.numel() / numel,
            "pass": name,
            "median_s": seconds,
            "copy_bytes_per_s": bandwidth,
            "share_of_roof": moved * numel / bandwidth / seconds,
        }
        for name, seconds, moved in (
            ("encode", encode, ENCODE_BYTES),
            ("apply", apply, APPLY_BYTES),
            ("both", encode + apply, ENCODE_BYTES + APPLY_BYTES),
        )
    ]


def state(numel: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """θ, w and e: noise-like weights, and updates of the given scale."""
    generator = torch.Generator().manual_seed(0)
    anchor, moved, residual = (torch.randn(numel, generator=generator) for _ in range(3))
    anchor *= SIGMA
    return anchor, anchor - scale * moved, scale * residual


def check(anchor: Tensor, weights: Tensor, residual: Tensor, gate: Gate) -> Entries:
    """Refuse to time a wrong encode: compare with the gate stated by torch's own casts."""
    update = (anchor - weights) + residual
    visible = anchor.bfloat16().float() != (anchor - update).bfloat16().float()
    entries = kernels.encode(anchor, [weights], residual, gate).entries
    expected = visible.nonzero().view(-1)
    if not (
        entries.indices is not None
        and torch.equal(entries.indices, expected)
        and torch.equal(entries.values.view(torch.int32), update[expected].view(torch.int32))
    ):
        raise SystemExit("encode gives wrong entries; nothing was timed")
    return entries


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, after one that warms caches and pages up."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows, each with what it was measured on."""
    where = machine.describe() | {"threads": torch.get_num_threads(), "home": "reference"}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*where, *rows[0]])
        if new:
            writer.writeheader()
        writer.writerows(where | row for row in rows)


if __name__ == "__main__":
    sys.exit(main())
