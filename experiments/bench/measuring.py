"""What the benchmarks share: times and memory on any device, and tables of what was measured."""

from __future__ import annotations

import argparse
import csv
import gc
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.reporting import machine
from loco.kernels.reserve import give_back

CPU = torch.device("cpu")
RESULTS = "experiments/results/bench"  # tables that are kept with the code
Row = dict[str, Any]
_WIDTH = re.compile(r"[<>]\d+")


def arguments_of(name: str, about: str | None, out: str = "runs/bench") -> argparse.ArgumentParser:
    """`about` is the benchmark's docstring; `out` the folder of its table."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        f"python -m experiments.bench {name}", description=about, formatter_class=form
    )
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser


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
    before = resident_bytes()
    restart_peak()
    result = call()
    peak = kernel_bytes("VmHWM") - before
    del result
    return max(peak, 0)


def resident_bytes() -> int:
    """This process's pages, after it has given back what it does not use."""
    gc.collect()
    give_back()  # or memory that was freed before would be used, and not be seen
    return kernel_bytes("VmRSS")


def restart_peak() -> None:
    """The kernel's high-water mark VmHWM starts again from here."""
    Path("/proc/self/clear_refs").write_text("5")


def kernel_bytes(name: str) -> int:
    """What the kernel counts of this process's memory, by its name in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Table:
    """A benchmark's CSV file. Rows are shown when they are added, and this run's are drawn at the end.

    Args:
        shown: how each column is shown that is, by its name: a width and a format.
        drawn: arguments of `experiments.reporting.charts.panels`.
    """

    def __init__(self, path: Path, device: torch.device, shown: Mapping[str, str], **drawn: Any) -> None:
        self.path, self._device, self._shown, self._drawn = path, device, shown, drawn
        self._rows: list[Row] = []
        names = ((name, _WIDTH.match(form)) for name, form in shown.items())
        print("  ".join(format(name, width[0] if width else "") for name, width in names), flush=True)

    def add(self, rows: Sequence[Row]) -> None:
        self._rows += rows
        append(self.path, rows, self._device)
        for row in rows:
            print("  ".join(_cell(row.get(name), form) for name, form in self._shown.items()), flush=True)

    def close(self) -> None:
        """Say where the rows are and who else was on the machine, and draw them."""
        print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
        print(f"rows appended to {self.path}")
        try:  # measuring goes without matplotlib
            from experiments.reporting.charts import panels
        except (ImportError, SystemExit):
            print("no plot: matplotlib is not installed (pip install 'pulseloco[experiments]')")
        else:
            print(f"plot: {panels(self._rows, self.path.with_suffix('.png'), **self._drawn)}")


def _cell(value: Any, form: str) -> str:
    if value is None or isinstance(value, str):
        width = _WIDTH.match(form)
        return format(value or "", width[0] if width else "")
    return format(value, form)


def append(path: Path, rows: Sequence[Row], device: torch.device = CPU) -> None:
    """Add rows to a CSV file, each with what it was measured on. What one has not is empty."""
    where = machine.describe(device)
    columns = list(dict.fromkeys(name for row in [where, *rows] for name in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_text().partition("\n")[0] != ",".join(columns):
        path.rename(path.with_name(f"{path.stem}-{int(path.stat().st_mtime)}.csv"))  # of an older benchmark
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(where | row for row in rows)


def read(table: Path) -> list[Row]:
    """The rows of a CSV; numbers as numbers, nothing as None."""
    with table.open(newline="") as file:
        return [{name: _number(value) for name, value in row.items()} for row in csv.DictReader(file)]


def _number(value: str) -> Any:
    try:
        return float(value) if value else None
    except ValueError:
        return value


def rate_name(mbit: float) -> str:
    if not mbit:
        return "unshaped"
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"
