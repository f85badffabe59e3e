"""The plot of the wire's benchmark: bytes of an entry by density beside the floors, and a core's speed."""

from __future__ import annotations

import csv
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from experiments.look import LOOK

_COLOURS = {"tight": "#0072B2", "fast": "#D55E00"}
_SUMS = "#CC79A7"
_PLAIN = (
    ("int64 + FP32, padded", "padded int64 + FP32", "#332288", "-"),
    ("int32 + FP32", "int32 + FP32", "#117733", "-"),
    ("gap byte + FP32", "gap byte + FP32", "#999933", "-"),
)

Row = dict[str, str]


def draw(table: Path) -> Path:
    """The latest rows of the machine that came last -> the PNG beside the CSV."""
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows = [row for row in rows if row["cpu"] == rows[-1]["cpu"]]
    latest = list({(row["data"], row["lr"], row["of"], row["by"]): row for row in rows}.values())
    with plt.rc_context(LOOK):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 5.2))
        _draw_codes(left, latest)
        _draw_floors(middle, latest)
        _draw_speed(right, latest)
        path = table.with_suffix(".png")
        figure.savefig(path)
        plt.close(figure)
    return path


def _draw_codes(ax: Axes, rows: list[Row]) -> None:
    noise = [row for row in rows if row["data"] == "noise"]
    squeezed = sorted({row["by"] for row in noise if row["by"].startswith("gap bytes")})
    for by, label, colour, style in (*_PLAIN, *((name, name, "#999933", "--") for name in squeezed)):
        _line(ax, noise, "entries", by, label=label, color=colour, linestyle=style, linewidth=1.2)
    for by, marker in (("fast", "^"), ("tight", "o")):
        _line(ax, noise, "entries", by, label=by, color=_COLOURS[by], marker=marker)
    styles = cycle(({"color": "#56B4E9", "marker": "v"}, {"color": "#009E73", "marker": "D"}))
    for economy in sorted({row["data"] for row in rows if row["data"].startswith("noise, ")}):
        label = "tight, values in " + economy.removeprefix("noise, ")
        points = [row for row in rows if row["data"] == economy]
        _line(ax, points, "entries", "tight", label=label, **next(styles))
    _density(ax)
    low = min(float(row["bytes_per_entry"]) for row in rows if row["by"] == "tight" and row["bytes"])
    ticks = [tick for tick in (0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 6, 8, 12) if tick > 0.7 * low]
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.set_ylim(ticks[0], ticks[0] * (13 / ticks[0]) ** 1.7)  # above 12 there is room for the legend
    ax.set_title("bytes of an entry, on noise")
    ax.legend(fontsize=9, ncols=1, loc="upper right", handlelength=1.8, borderaxespad=0)


def _draw_floors(ax: Axes, rows: list[Row]) -> None:
    noise = [row for row in rows if row["data"] == "noise"]
    # Whole recordings, where there are some: they say more than their excerpts.
    kinds = ("recording", "excerpt")
    real = next((of for k in kinds if (of := [r for r in rows if r["data"].startswith(k)])), [])
    for of, label, colour in (
        ("entries", "a site's entries", _COLOURS["tight"]),
        ("sums", "sums of four", _SUMS),
    ):
        _line(ax, noise, of, "tight", label=f"{label}, noise", color=colour, marker="o")
        star = {"linestyle": "", "marker": "*", "markersize": 13, "color": colour}
        _line(ax, real, of, "tight", label=f"{label}, real training", **star)
        for by, style in (("floor", ":"), ("floor, m known too", "--")):
            _line(ax, noise, of, by, label=f"{by}, noise", color=colour, linestyle=style, linewidth=1.2)
    _density(ax)
    ax.set_title("the tight code beside the entropy, bytes of an entry")
    bottom, top = ax.get_ylim()
    ax.set_ylim(bottom, top + 0.45 * (top - bottom))
    ax.legend(fontsize=9, ncols=2, loc="upper right", handlelength=1.8, borderaxespad=0)


def _draw_speed(ax: Axes, rows: list[Row]) -> None:
    timed = [row for row in rows if row["of"] == "speed" and row["data"] == "noise"]
    for name, colour in _COLOURS.items():
        for work, style, marker in (("encode", "-", "o"), ("decode", "--", "^")):
            found = sorted(
                (float(row["density"]), float(row["timed_numel"]) / float(row[f"{work}_p50"]))
                for row in timed
                if row["by"] == name
            )
            if found:
                label = f"{name}, {work}"
                ax.plot(*zip(*found, strict=True), color=colour, linestyle=style, marker=marker, label=label)
    _density(ax)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(
        FuncFormatter(lambda y, _: f"{y / 1e9:g} G" if y >= 1e9 else f"{y / 1e6:g} M")
    )
    ax.set_title("parameters per second, on one core")
    bottom, top = ax.get_ylim()
    ax.set_ylim(bottom, 4 * top)
    ax.legend(fontsize=9, ncols=2, loc="upper right", borderaxespad=0)


def _density(ax: Axes) -> None:
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator([0.001, 0.003, 0.01, 0.03, 0.1, 0.3]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.1%}".replace(".0", "")))
    ax.set_xlabel("density: entries over elements")


def _line(ax: Axes, rows: list[Row], of: str, by: str, **style: Any) -> None:
    """Bytes of an entry by density, if there are any."""
    found = sorted(
        (float(row["density"]), float(row["bytes_per_entry"]))
        for row in rows
        if (row["of"], row["by"]) == (of, by)
    )
    if found:
        ax.plot(*zip(*found, strict=True), **style)
