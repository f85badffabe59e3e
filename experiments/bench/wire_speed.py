"""How fast a core codes and reads entries, beside the speed of a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from experiments.bench import coding
from experiments.bench.measuring import quantiles, seconds
from loco.kernels import BLOCK, Entries, Known
from loco.wire.codecs import FAST, SPARSE

CPU = torch.device("cpu")
WHOLE = "fast, one piece"  # without what each frame costs in Python
QUANTILES = ("p20", "p50", "p80")
COLUMNS = (
    *("timed_numel", "timed_entries", "copy_bytes_per_s"),
    *(f"{work}_{q}" for work in ("encode", "decode") for q in QUANTILES),  # seconds
    *("encode_share_of_roof", "decode_share_of_roof"),
)


def measure(known: Known, entries: Entries, numel: int, repeats: int) -> Iterator[dict[str, Any]]:
    """All codes, on about `numel` elements: the given ones, as often as it takes."""
    copies = max(numel // known.anchor.numel(), 1)
    known, entries = _tiled(known, entries, copies)
    numel, k = known.anchor.numel(), entries.values.numel()
    before, rows = _copy_bytes_per_s(numel, repeats), []
    for name, codec in (*SPARSE.items(), (WHOLE, FAST)):
        bodies = coding.checked(codec, known, entries)
        body, whole = FAST.encode(entries, known), name == WHOLE
        row: dict[str, Any] = {
            "of": "speed",
            "by": name,
            "density": k / numel,
            "timed_numel": numel,
            "timed_entries": k,
        }
        moved = {"encode": 10 * k + 9 * numel / BLOCK, "decode": 5 * k + 9 * numel / BLOCK}
        calls: dict[str, Callable[[], object]] = {
            "encode": lambda codec=codec: list(coding.encode(codec, known, entries)),
            "decode": lambda bodies=bodies: list(coding.decode(bodies, known)),
        }
        if whole:
            calls["encode"] = lambda: FAST.encode(entries, known)
            calls["decode"] = lambda body=body: FAST.decode(body, k, known)
        for work, call in calls.items():
            times = quantiles(seconds(call, CPU, repeats))
            row |= {f"{work}_{q}": time for q, time in times.items()}
            if codec is FAST:
                # Of an entry's 5 bytes and a block's start and count: encode reads and writes them; decode
                # reads and checks them, and writes the starts.
                row[f"{work}_share_of_roof"] = moved[work] / times["p50"]
        rows.append(row)
    # Other work on the machine only ever slows a copy down.
    copy = max(before, _copy_bytes_per_s(numel, repeats))
    for row in rows:
        shares = {name: row[name] / copy for name in COLUMNS if name.endswith("_of_roof") and name in row}
        yield row | shares | {"copy_bytes_per_s": copy}


def _tiled(known: Known, entries: Entries, copies: int) -> tuple[Known, Entries]:
    if copies > 1 and known.anchor.numel() % BLOCK:
        raise ValueError(f"only whole blocks can be tiled, got {known.anchor.numel()} elements")
    momentum = None if known.momentum is None else known.momentum.repeat(copies)
    return Known(known.anchor.repeat(copies), momentum, known.gate), Entries.join([entries] * copies)


def _copy_bytes_per_s(numel: int, repeats: int) -> float:
    """Read and written."""
    source, target = torch.ones(numel), torch.zeros(numel)
    return 8 * numel / median(seconds(lambda: target.copy_(source), CPU, repeats))
