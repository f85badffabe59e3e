"""The plots of a link benchmark: rounds that were measured, and rounds that are projected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from experiments.bench.payloads import load
from experiments.look import LOOK

# A colour for each exchange, darker for the code that takes fewer bytes; the marker tells the code.
_LOOKS: dict[str, tuple[str, str]] = {
    "DDP, 8 steps": ("#6B6B6B", "s"),
    "torch all-reduce": ("#A0A0A0", "s"),
    "DiLoCo float32": ("#0072B2", "o"),
    "DiLoCo bfloat16": ("#56B4E9", "o"),
    "DiLoCo int8": ("#A6D8F0", "o"),
    "PULSELoCo gather fast": ("#E69F00", "v"),
    "PULSELoCo gather tight": ("#B87500", "^"),
    "PULSELoCo owner fast": ("#4CC59B", "v"),
    "PULSELoCo owner tight": ("#00795A", "^"),
    "PULSELoCo auto": ("#CC79A7", "D"),
}
_PROJECTED_SIZES = (7e9, 1e12)


def draw(table: Path) -> Path:
    """The latest run's rounds -> the PNG beside the CSV. A panel for each rate (down) and number of sites."""
    rows = load(table)
    rates = list(dict.fromkeys(row["rate_mbit"] for row in rows))
    counts = sorted({row["sites"] for row in rows})
    names = [name for name in _LOOKS if any(row["method"] == name for row in rows)]
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(
            len(rates),
            len(counts),
            figsize=(3.6 * len(counts) + 2.2, 0.27 * len(names) * len(rates) + 1.6),
            sharey=True,
            sharex="row",
            squeeze=False,
        )
        for i, rate in enumerate(rates):
            for j, sites in enumerate(counts):
                cell = {r["method"]: r for r in rows if (r["rate_mbit"], r["sites"]) == (rate, sites)}
                _bars(axes[i][j], cell, names)
                axes[i][j].set_title(f"{sites:.0f} sites, {_rate(rate)}")
        for ax in axes[-1]:
            ax.set_xlabel("ms per round (logarithmic)")
        shared = rows[0]["cores"]
        machine = f"all sites on {shared:.0f} cores; " if shared else ""
        figure.suptitle(
            f"A round of {rows[0]['numel'] / 1e6:.0f}M parameters per site, {machine}light: its exchange"
        )
        path = table.with_suffix(".png")
        figure.savefig(path)
        plt.close(figure)
    return path


def _bars(ax: Axes, cell: dict[str, dict[str, Any]], names: list[str]) -> None:
    baseline = cell.get("DiLoCo float32")
    shown = [name for name in names if name in cell]
    for name in shown:
        row, y = cell[name], names.index(name)
        colour = _LOOKS[name][0]
        ax.barh(y, row["p50"] * 1e3, height=0.75, color=colour, alpha=1.0 if row["exchange_s"] else 0.5)
        ax.barh(y, row["exchange_s"] * 1e3, height=0.3, color="white", alpha=0.45)
        text = f" {row['p50'] * 1e3:,.0f}"
        if baseline is not None and row is not baseline:
            text += f" ({baseline['p50'] / row['p50']:.2g}x)"
        ax.text(row["p50"] * 1e3, y, text, va="center", fontsize=8)
    ax.set_xscale("log")
    ax.margins(x=0.25)
    low = min(row["p50"] for row in cell.values()) * 1e3
    high = max(row["p50"] for row in cell.values()) * 1e3
    before = ax.get_xlim()
    ax.set_xlim(min(low / 3, before[0] or low), max(high * 6, before[1] if before[1] > 1 else 0))
    labels = [f"{name} (model)" if _is_model(cell, name) else name for name in names]
    ax.set_yticks(range(len(names)), labels, fontsize=9)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)


def _is_model(cell: dict[str, dict[str, Any]], name: str) -> bool:
    return name in cell and cell[name]["source"] == "model"


def draw_projection(rows: list[dict[str, Any]], path: Path) -> Path:
    """Seconds of an exchange by the number of sites: a panel for each rate (across) and size (down)."""
    rates = sorted({row["rate_mbit"] for row in rows})
    sizes = [size for size in _PROJECTED_SIZES if any(row["numel"] == size for row in rows)]
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(
            len(sizes),
            len(rates),
            figsize=(3.1 * len(rates), 3.2 * len(sizes) + 1.2),
            sharex=True,
            squeeze=False,
        )
        for i, size in enumerate(sizes):
            for j, rate in enumerate(rates):
                ax = axes[i][j]
                for name, (colour, marker) in _LOOKS.items():
                    points = sorted(
                        (row["sites"], row["seconds"])
                        for row in rows
                        if (row["numel"], row["rate_mbit"], row["method"]) == (size, rate, name)
                    )
                    if points:
                        ax.plot(*zip(*points, strict=True), marker=marker, color=colour, label=name)
                ax.set_xscale("log", base=2)
                ax.set_yscale("log")
                sites = sorted({row["sites"] for row in rows})
                ax.set_xticks(sites, [f"{count}" for count in sites])
                ax.set_title(f"{_size(size)} parameters, {_rate(rate)}")
            axes[i][0].set_ylabel("seconds (projected)")
        for ax in axes[-1]:
            ax.set_xlabel("sites")
        at = rows[0]
        figure.suptitle(
            "Projected, not measured: the exchange of a round "
            f"({at['cores']:g} cores code at each site, {at['latency'] * 1e3:g} ms there and back, "
            f"density {at['density']:.1%})"
        )
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
        figure.savefig(path)
        plt.close(figure)
    return path


def _rate(mbit: float) -> str:
    if not mbit:
        return "unshaped"
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def _size(numel: float) -> str:
    return f"{numel / 1e12:g}T" if numel >= 1e12 else f"{numel / 1e9:g}B"
