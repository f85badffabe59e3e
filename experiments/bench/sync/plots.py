"""The plots of `bench sync`, each from the latest run of its table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from experiments.bench.measuring import Row, latest_run, rate_name
from experiments.bench.sync.memory import TRIMMED
from experiments.bench.sync.projection import PUBLISHED, STAGES
from experiments.reporting.plots import LOOK, saved

_OURS, _OTHERS, _BOUND = "#0072B2", "#A0A0A0", "#4D4D4D"
_STAGES = ("#0072B2", "#56B4E9", "#CC79A7", "#D55E00", "#E69F00", "#F0E442", "#009E73", "#4CC59B")


def draw_sizes(table: Path) -> Path:
    """Bytes of a changed weight, by format: a panel for each trace."""
    rows = latest_run(table)
    cells = list(dict.fromkeys((row["data"], row["lr"], row["apart"]) for row in rows))
    names = list(dict.fromkeys(row["by"] for row in rows))
    down = -(-len(cells) // 3)
    with plt.rc_context(LOOK):
        size = (5.2 * min(len(cells), 3) + 1.6, (0.32 * len(names) + 0.9) * down)
        figure, axes = plt.subplots(down, min(len(cells), 3), figsize=size, sharey=True, squeeze=False)
        for axis, cell in zip(axes.flat, cells, strict=False):
            found = [row for row in rows if (row["data"], row["lr"], row["apart"]) == cell]
            for row in found:
                y, each, by = names.index(row["by"]), row["bytes_per_entry"], row["by"]
                colour = _OURS if by.startswith("loco") else _BOUND if by.startswith("entropy") else _OTHERS
                axis.barh(y, each, height=0.7, color=colour)
                axis.text(each, y, f" {each:.2f}  ({row['below_dense']:,.0f}x)", va="center", fontsize=8)
            data, lr, apart = cell
            steps = "a step" if apart == 1 else f"{apart:.0f} steps"
            density = found[0]["density"]
            axis.set_title(f"{data}, lr {lr:.0e}, {steps}: {density:.2%} change", fontsize=10)
            axis.set_xlim(0, 1.3 * max(row["bytes_per_entry"] for row in found))
            axis.set_yticks(range(len(names)), names, fontsize=9)
            axis.set_ylim(len(names) - 0.4, -0.6)
            axis.grid(axis="y", visible=False)
        for axis in axes.flat[len(cells) :]:
            axis.set_visible(False)
        for axis in axes[-1]:
            axis.set_xlabel("bytes of a changed weight (times below dense BF16)")
        return saved(figure, table.with_suffix(".png"))


def draw_speed(table: Path) -> Path:
    """Shares of a copy's bandwidth, by the clock and by core-seconds."""
    rows = [row for row in latest_run(table) if row["work"] != "copy"]
    sources = list(dict.fromkeys(row["source"] for row in rows))
    names = list(dict.fromkeys(row["work"] for row in rows))
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(
            1, len(sources), figsize=(6.4 * len(sources), 4.6), sharey=True, squeeze=False
        )
        for axis, source in zip(axes[0], sources, strict=True):
            for row in (row for row in rows if row["source"] == source):
                y = names.index(row["work"])
                axis.barh(y - 0.18, row["share_of_copy"], height=0.34, color=_OURS)
                axis.barh(y + 0.18, row["cpu_share_of_copy"], height=0.34, color="#56B4E9")
                axis.text(
                    row["share_of_copy"], y - 0.18, f" {row['p50'] * 1e3:,.1f} ms", va="center", fontsize=8
                )
            axis.set_yticks(range(len(names)), names, fontsize=9)
            axis.set_ylim(len(names) - 0.4, -0.6)
            axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axis.set(xlabel="share of a copy (light: by core-seconds)", xlim=(0, None))
            numel, density = rows[0]["numel"], rows[0]["density"]
            axis.set_title(f"{numel:,.0f} weights from {source}, {density:.1%} change", fontsize=10)
            axis.grid(axis="y", visible=False)
        return saved(figure, table.with_suffix(".png"))


def draw_memory(table: Path) -> Path:
    """What a publisher has beside the model, version by version."""
    rows = [row for row in latest_run(table) if row["of"] == "publisher"]
    sources = list(dict.fromkeys(row["source"] for row in rows))
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(
            1, len(sources), figsize=(6.2 * len(sources), 3.8), sharey=True, squeeze=False
        )
        for axis, source in zip(axes[0], sources, strict=True):
            found = [row for row in rows if row["source"] == source and row["what"] != TRIMMED]
            for what, colour in (("peak", "#D55E00"), ("resident", _OURS)):
                points = [(row["version"], row[f"{what}_per_weight"]) for row in found]
                axis.plot(*zip(*points, strict=True), color=colour, label=what, marker="o", markersize=3)
            axis.axhline(2.5, color=_BOUND, linewidth=1, linestyle="--", label="a BF16 copy and half a byte")
            axis.set_xlabel("version")
            axis.set_title(f"{found[0]['numel']:,.0f} weights, a publisher of {source}", fontsize=10)
            axis.legend(fontsize=9)
        axes[0][0].set(ylabel="bytes a weight beside the model", ylim=(0, None))
        return saved(figure, table.with_suffix(".png"))


def draw_links(table: Path) -> Path:
    """From publish() to live weights: a panel for each rate."""
    rows = latest_run(table)
    rates, names = (
        list(dict.fromkeys(r["rate_mbit"] for r in rows)),
        list(dict.fromkeys(r["what"] for r in rows)),
    )
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(
            1, len(rates), figsize=(5.6 * len(rates) + 2, 2.9), sharey=True, squeeze=False
        )
        for axis, rate in zip(axes[0], rates, strict=True):
            found = [row for row in rows if row["rate_mbit"] == rate]
            for row in found:
                y = names.index(row["what"])
                axis.barh(y, row["p50"], height=0.7, color=_OTHERS if "alone" in row["what"] else _OURS)
                if row["link_s"] and row["p50"] != row["link_s"]:
                    axis.barh(y, row["link_s"], height=0.7, color="#D55E00")
                axis.text(row["p50"], y, f" {row['p50']:.2f} s", va="center", fontsize=8)
            axis.set_xlim(0, 1.2 * max(row["p50"] for row in found))
            axis.set_title(f"{found[0]['numel']:,.0f} weights, {rate_name(rate)}", fontsize=10)
            axis.set_yticks(range(len(names)), names, fontsize=9)
            axis.set_ylim(len(names) - 0.4, -0.6)
            axis.set_xlabel("s from publish() to live weights (orange: on the link)")
            axis.grid(axis="y", visible=False)
        return saved(figure, table.with_suffix(".png"))


def draw_projection(table: Path) -> Path:
    """Stacked stages, for each kind of store and each rate."""
    rows = latest_run(table)
    names = [f"{row['store']}, {row['rate_gbit']:g} Gbit/s" for row in rows]
    with plt.rc_context(LOOK):
        figure, axis = plt.subplots(figsize=(10.5, 4.4))
        shown = 8 * min(row["seconds"] for row in rows)
        _stack(axis, rows, shown)
        axis.axvline(PUBLISHED, color=_BOUND, linewidth=1, linestyle="--", label="20 s (checkpoint-engine)")
        axis.set_yticks(range(len(names)), names, fontsize=9)
        axis.set_ylim(len(names) - 0.4, -0.6)
        for y, row in enumerate(rows):
            axis.text(min(row["seconds"], shown), y, f" {row['seconds']:,.0f} s", va="center", fontsize=9)
        axis.set(xlim=(0, 1.1 * shown), xlabel="s from publish() to live weights")
        axis.grid(axis="y", visible=False)
        axis.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return saved(figure, table.with_suffix(".png"))


def _stack(axis: Axes, rows: list[Row], most: float) -> None:
    for k, (stage, colour) in enumerate(zip(STAGES, _STAGES, strict=True)):
        before = [min(sum(row[name] for name in STAGES[:k]), most) for row in rows]
        after = [min(sum(row[name] for name in STAGES[: k + 1]), most) for row in rows]
        widths = [b - a for a, b in zip(before, after, strict=True)]
        label = stage.removesuffix("_s").replace("_", " + ")
        axis.barh(range(len(rows)), widths, left=before, color=colour, label=label)


DRAW: dict[str, Callable[[Path], Path]] = {
    "sync_sizes": draw_sizes,
    "sync_speed": draw_speed,
    "sync_memory": draw_memory,
    "sync_links": draw_links,
    "sync_projection": draw_projection,
}  # by table
