"""The plots of the benchmarks, each from the latest rows of its table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from experiments.bench.measuring import latest_run, rate_name, read
from experiments.plots import LOOK, saved

Row = dict[str, Any]
_TARGETS = {"encode": 0.65, "round": 0.55}  # shares of the roof, on a CPU
_PASSES = {"encode": ("#0072B2", "o"), "apply": ("#D55E00", "^"), "round": ("#009E73", "s")}
_CODES = {"tight": "#0072B2", "fast": "#D55E00"}
_PLAIN = {"int64 + FP32, padded": "#332288", "int32 + FP32": "#117733", "gap byte + FP32": "#999933"}
# A colour for each exchange, darker for the code that takes fewer bytes; the marker tells the code.
_METHODS: dict[str, tuple[str, str]] = {
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


def draw_kernels(table: Path) -> Path:
    """Share of the roof by size, on the machine that came last: loco's passes beside the reference's."""
    rows = [row for row in read(table) if row["share_of_roof"]]
    where = ("device", "cpu", "threads")
    rows = [row for row in rows if all(row[name] == rows[-1][name] for name in where)]
    latest = {
        (round(row["density"], 3), row["by"], row["pass"], row["numel"]): row["share_of_roof"] for row in rows
    }
    densities = sorted({key[0] for key in latest})
    with plt.rc_context(LOOK):
        size = (3.1 * len(densities), 3.4)
        figure, axes = plt.subplots(1, len(densities), figsize=size, sharey=True, squeeze=False)
        for axis, density in zip(axes[0], densities, strict=True):
            for by, style in (("loco", "-"), ("torch reference", ":")):
                for name, (colour, marker) in _PASSES.items():
                    points = [(k[3], share) for k, share in latest.items() if k[:3] == (density, by, name)]
                    look = {"color": colour, "marker": marker, "linestyle": style, "label": f"{name}, {by}"}
                    _plot(axis, points, **look)
            if rows[-1]["device"] == "CPU":
                for name, target in _TARGETS.items():
                    axis.axhline(target, color=_PASSES[name][0], linewidth=0.8, alpha=0.5)
            axis.set(xscale="log", title=f"density {density:.1%}", xlabel="parameters")
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
            axis.set_ylim(bottom=0)
        axes[0][0].set_ylabel("share of the roof")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(5, len(densities) + 1), fontsize=9
        )
        return saved(figure, table.with_suffix(".png"))


def draw_wire(table: Path) -> Path:
    """Bytes of an entry by density, beside plain codes and beside the floors; and a core's speed."""
    rows = read(table)
    rows = [row for row in rows if row["cpu"] == rows[-1]["cpu"]]
    rows = list({(row["data"], row["lr"], row["of"], row["by"]): row for row in rows}.values())
    with plt.rc_context(LOOK):
        figure, (codes, floors, speed) = plt.subplots(1, 3, figsize=(16, 6.4))
        _draw_codes(codes, rows)
        _draw_floors(floors, rows)
        _draw_speed(speed, rows)
        for axis in (codes, floors, speed):
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(FixedLocator([0.001, 0.003, 0.01, 0.03, 0.1, 0.3]))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.1%}".replace(".0", "")))
            axis.set_xlabel("density: entries over elements")
            axis.legend(fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.13))
        return saved(figure, table.with_suffix(".png"))


def _draw_codes(axis: Axes, rows: list[Row]) -> None:
    noise = [row for row in rows if row["data"] == "noise"]
    for by, colour in _PLAIN.items():
        _plot(axis, _bytes(noise, "entries", by), label=by, color=colour, linewidth=1.2)
    for by in sorted({row["by"] for row in noise if row["by"].startswith("gap bytes")}):
        _plot(axis, _bytes(noise, "entries", by), label=by, color="#999933", linestyle="--", linewidth=1.2)
    for by, marker in (("fast", "^"), ("tight", "o")):
        _plot(axis, _bytes(noise, "entries", by), label=by, color=_CODES[by], marker=marker)
    looks = cycle(({"color": "#56B4E9", "marker": "v"}, {"color": "#009E73", "marker": "D"}))
    for economy in sorted({row["data"] for row in rows if row["data"].startswith("noise, ")}):
        label = "tight, values in " + economy.removeprefix("noise, ")
        own = [row for row in rows if row["data"] == economy]
        _plot(axis, _bytes(own, "entries", "tight"), label=label, **next(looks))
    low = min(row["bytes_per_entry"] for row in rows if row["by"] == "tight" and row["bytes"])
    ticks = [tick for tick in (0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 6, 8, 12) if tick > 0.7 * low]
    axis.set(yscale="log", ylim=(ticks[0], 13), title="bytes of an entry, on noise")
    axis.yaxis.set_major_locator(FixedLocator(ticks))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _draw_floors(axis: Axes, rows: list[Row]) -> None:
    noise = [row for row in rows if row["data"] == "noise"]
    # Whole recordings, where there are some: they say more than their excerpts.
    kinds = ([row for row in rows if row["data"].startswith(kind)] for kind in ("recording", "excerpt"))
    real = next(filter(None, kinds), [])
    for of, label, colour in (
        ("entries", "a site's entries", "#0072B2"),
        ("sums", "sums of four", "#CC79A7"),
    ):
        _plot(axis, _bytes(noise, of, "tight"), label=f"{label}, noise", color=colour, marker="o")
        star = {"linestyle": "", "marker": "*", "markersize": 13, "color": colour}
        _plot(axis, _bytes(real, of, "tight"), label=f"{label}, real training", **star)
        for by, style in (("floor", ":"), ("floor, m known too", "--")):
            _plot(
                axis,
                _bytes(noise, of, by),
                label=f"{by}, noise",
                color=colour,
                linestyle=style,
                linewidth=1.2,
            )
    axis.set_title("the tight code beside the entropy, bytes of an entry")


def _draw_speed(axis: Axes, rows: list[Row]) -> None:
    timed = [row for row in rows if row["of"] == "speed" and row["data"] == "noise"]
    for name, colour in _CODES.items():
        for work, style, marker in (("encode", "-", "o"), ("decode", "--", "^")):
            points = [(r["density"], r["timed_numel"] / r[f"{work}_p50"]) for r in timed if r["by"] == name]
            _plot(axis, points, label=f"{name}, {work}", color=colour, linestyle=style, marker=marker)
    axis.set(yscale="log", title="parameters per second, on one core")
    axis.yaxis.set_major_formatter(
        FuncFormatter(lambda y, _: f"{y / 1e9:g} G" if y >= 1e9 else f"{y / 1e6:g} M")
    )


def _bytes(rows: list[Row], of: str, by: str) -> list[tuple[float, float]]:
    return [(row["density"], row["bytes_per_entry"]) for row in rows if (row["of"], row["by"]) == (of, by)]


def draw_link(table: Path) -> Path:
    """Rounds that were measured: a panel for each rate (down) and number of sites (across)."""
    rows = latest_run(table)
    rates, counts = list(dict.fromkeys(r["rate_mbit"] for r in rows)), sorted({r["sites"] for r in rows})
    names = [name for name in _METHODS if any(row["method"] == name for row in rows)]
    with plt.rc_context(LOOK):
        size = (3.6 * len(counts) + 2.2, 0.27 * len(names) * len(rates) + 1.6)
        shape = (len(rates), len(counts))
        figure, axes = plt.subplots(*shape, figsize=size, sharey=True, sharex="row", squeeze=False)
        for i, rate in enumerate(rates):
            for j, sites in enumerate(counts):
                cell = {r["method"]: r for r in rows if (r["rate_mbit"], r["sites"]) == (rate, sites)}
                _bars(axes[i][j], cell, names)
                axes[i][j].set_title(f"{sites:.0f} sites, {rate_name(rate)}")
        for axis in axes[-1]:
            axis.set_xlabel("ms per round (logarithmic)")
        machine = f"all sites on {rows[0]['cores']:.0f} cores; " if rows[0]["cores"] else ""
        millions = rows[0]["numel"] / 1e6
        figure.suptitle(f"A round of {millions:.0f}M parameters per site, {machine}light: its exchange")
        return saved(figure, table.with_suffix(".png"))


def _bars(axis: Axes, cell: dict[str, Row], names: list[str]) -> None:
    baseline = cell.get("DiLoCo float32")
    for y, name in enumerate(names):
        if name not in cell:
            continue
        row, ms = cell[name], cell[name]["p50"] * 1e3
        axis.barh(y, ms, height=0.75, color=_METHODS[name][0], alpha=1.0 if row["exchange_s"] else 0.5)
        axis.barh(y, row["exchange_s"] * 1e3, height=0.3, color="white", alpha=0.45)
        below = "" if baseline is None or row is baseline else f" ({baseline['p50'] / row['p50']:.2g}x)"
        axis.text(ms, y, f" {ms:,.0f}{below}", va="center", fontsize=8)
    axis.set_xscale("log")
    axis.margins(x=0.25)
    times = [row["p50"] * 1e3 for row in cell.values()]
    before = axis.get_xlim()
    low, high = min(times) / 3, max(times) * 6  # to the right there is room for the figures
    axis.set_xlim(min(low, before[0] or low), max(high, before[1] if before[1] > 1 else 0))
    models = {name for name, row in cell.items() if row["source"] == "model"}
    labels = [f"{name} (model)" if name in models else name for name in names]
    axis.set_yticks(range(len(names)), labels, fontsize=9)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)


def draw_projection(rows: list[Row], path: Path) -> Path:
    """Seconds of an exchange by the number of sites: a panel for each rate (across) and size (down)."""
    rates, counts = (sorted({row[name] for row in rows}) for name in ("rate_mbit", "sites"))
    sizes = [size for size in (7e9, 1e12) if any(row["numel"] == size for row in rows)]
    with plt.rc_context(LOOK):
        size = (3.1 * len(rates), 3.2 * len(sizes) + 1.2)
        figure, axes = plt.subplots(len(sizes), len(rates), figsize=size, sharex=True, squeeze=False)
        for i, numel in enumerate(sizes):
            for j, rate in enumerate(rates):
                axis = axes[i][j]
                own = [row for row in rows if (row["numel"], row["rate_mbit"]) == (numel, rate)]
                for name, (colour, marker) in _METHODS.items():
                    points = [(row["sites"], row["seconds"]) for row in own if row["method"] == name]
                    _plot(axis, points, marker=marker, color=colour, label=name)
                axis.set_xscale("log", base=2)
                axis.set_yscale("log")
                axis.set_xticks(counts, [f"{count}" for count in counts])
                name = f"{numel / 1e12:g}T" if numel >= 1e12 else f"{numel / 1e9:g}B"
                axis.set_title(f"{name} parameters, {rate_name(rate)}")
            axes[i][0].set_ylabel("seconds (projected)")
        for axis in axes[-1]:
            axis.set_xlabel("sites")
        at = rows[0]
        figure.suptitle(
            "Projected, not measured: the exchange of a round "
            f"({at['cores']:g} cores code at each site, {at['latency'] * 1e3:g} ms there and back, "
            f"density {at['density']:.1%})"
        )
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
        return saved(figure, path)


def _plot(axis: Axes, points: Sequence[tuple[float, float]], **look: Any) -> None:
    """A line through the points, from left to right, if there are any."""
    if points:
        axis.plot(*zip(*sorted(points), strict=True), **look)
