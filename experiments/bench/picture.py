"""The plot of a kernel benchmark: share of the roof by size, loco's passes beside the torch reference's."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from experiments.look import LOOK

_COLOURS = {"encode": "#0072B2", "apply": "#D55E00", "round": "#009E73"}
_MARKERS = {"encode": "o", "apply": "^", "round": "s"}
_TARGETS = {"encode": 0.65, "round": 0.55}  # on a CPU


def draw(table: Path) -> Path:
    """The latest rows of the machine that came last -> the PNG beside the CSV."""
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["share_of_roof"]]
    where = ("device", "cpu", "threads")
    rows = [row for row in rows if all(row[name] == rows[-1][name] for name in where)]
    latest = {
        (round(float(row["density"]), 3), row["by"], row["pass"], int(row["numel"])): float(
            row["share_of_roof"]
        )
        for row in rows
    }
    densities = sorted({key[0] for key in latest})
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(
            1, len(densities), figsize=(3.1 * len(densities), 3.4), sharey=True, squeeze=False
        )
        for ax, density in zip(axes[0], densities, strict=True):
            for by, style in (("loco", "-"), ("torch reference", ":")):
                for name, colour in _COLOURS.items():
                    points = sorted(
                        (k[3], share) for k, share in latest.items() if k[:3] == (density, by, name)
                    )
                    if points:
                        ax.plot(
                            *zip(*points, strict=True),
                            style,
                            color=colour,
                            marker=_MARKERS[name],
                            label=f"{name}, {by}",
                        )
            if rows[-1]["device"] == "CPU":
                for name, target in _TARGETS.items():
                    ax.axhline(target, color=_COLOURS[name], linewidth=0.8, alpha=0.5)
            ax.set_xscale("log")
            ax.set_title(f"density {density:.1%}")
            ax.set_xlabel("parameters")
            ax.yaxis.set_major_formatter(PercentFormatter(1.0))
            ax.set_ylim(bottom=0)
        axes[0][0].set_ylabel("share of the roof")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)
        path = table.with_suffix(".png")
        figure.savefig(path)
        plt.close(figure)
    return path
