"""Times and memory, for any device."""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import importlib
import os
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import machine


def arguments_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """`about` is the benchmark's docstring."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        f"python -m experiments.bench {name}", description=about, formatter_class=form
    )


def seconds(
    call: Callable[[], object], device: torch.device, repeats: int, before: Callable[[], object] | None = None
) -> list[float]:
    """Of each of some calls, after one that warms caches and pages up. `before` each, unmeasured."""
    taken = []
    for _ in range(repeats + 1):
        if before is not None:
            before()
        settle(device)
        start = time.perf_counter()
        call()
        settle(device)
        taken.append(time.perf_counter() - start)
    return taken[1:]


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in (20, 50, 80)}


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """How much more memory a call takes while it runs: the GPU's, or this process's pages."""
    gc.collect()
    settle(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        del result
        return torch.cuda.max_memory_allocated(device) - before
    ctypes.CDLL(None).malloc_trim(0)  # or memory that was freed before would be used, and not be seen
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _pages("VmRSS")
    result = call()
    peak = _pages("VmHWM") - before
    del result
    return max(peak, 0)


def _pages(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def append(path: Path, rows: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Add rows to a CSV, each with what it was measured on."""
    where = machine.describe(device)
    columns = [*where, *rows[0]]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_text().partition("\n")[0] != ",".join(columns):
        path.rename(path.with_name(f"{path.stem}-{int(path.stat().st_mtime)}.csv"))  # of an older benchmark
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(where | row for row in rows)


def read(table: Path) -> list[dict[str, Any]]:
    """The rows of a CSV; numbers as numbers, nothing as None."""
    with table.open(newline="") as file:
        return [{name: _number(value) for name, value in row.items()} for row in csv.DictReader(file)]


def latest_run(table: Path) -> list[dict[str, Any]]:
    rows = read(table)
    return [row for row in rows if row["run"] == rows[-1]["run"]]


def _number(value: str) -> Any:
    try:
        return float(value) if value else None
    except ValueError:
        return value


def rate_name(mbit: float) -> str:
    if not mbit:
        return "unshaped"
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def close(table: Path) -> None:
    """Say where the rows of a benchmark are and who else was on the machine, and draw them."""
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    print(f"rows appended to {table}")
    plot(table, f"draw_{table.stem}")


def plot(of: Any, function: str, *more: Any) -> None:
    """Draw by a function of `bench.plots`. Measuring goes without matplotlib."""
    if find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (pip install 'loco[experiments]')")
        return
    draw = getattr(importlib.import_module("experiments.bench.plots"), function)
    print(f"plot: {draw(of, *more)}")
