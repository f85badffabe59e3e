"""The plots of the benchmarks, each from the latest rows of its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from experiments.bench.measuring import Row, latest_run, rate_name, read
from experiments.bench.sync import plots as sync
from experiments.reporting.plots import LOOK, saved

_PASSES = {"encode": ("#0072B2", "o"), "apply": ("#D55E00", "^"), "round": ("#009E73", "s")}
_CODES: dict[str, dict[str, Any]] = {
    "int64 + FP32, padded": {"color": "#332288"},
    "gap bytes, byte planes, zlib-1": {"color": "#999933", "linestyle": "--"},
    "fast": {"color": "#D55E00", "marker": "^"},
    "tight": {"color": "#0072B2", "marker": "o"},
}
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
            axis.set(xscale="log", title=f"density {density:.1%}", xlabel="parameters", ylim=(0, None))
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes[0][0].set_ylabel("share of the roof")
        handles = axes[0][0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=min(5, len(densities) + 1), fontsize=9)
        return saved(figure, table.with_suffix(".png"))


def draw_wire(table: Path) -> Path:
    """Bytes of an entry by density, beside plain codes and beside the floors; and a core's speed."""
    rows = read(table)
    rows = [row for row in rows if row["cpu"] == rows[-1]["cpu"]]
    rows = list({(row["data"], row["lr"], row["of"], row["by"]): row for row in rows}.values())
    noise = [row for row in rows if row["data"] == "noise"]
    # Whole recordings, where there are some: they say more than their excerpts.
    kinds = ([row for row in rows if row["data"].startswith(kind)] for kind in ("recording", "excerpt"))
    real = next(filter(None, kinds), [])
    with plt.rc_context(LOOK):
        figure, (codes, floors, speed) = plt.subplots(1, 3, figsize=(16, 6.4))
        for by, look in _CODES.items():
            _plot(codes, _bytes(noise, "entries", by), label=by, **look)
        economies = sorted({row["data"] for row in rows if row["data"].startswith("noise, ")})
        for economy, colour in zip(economies, ("#56B4E9", "#009E73"), strict=False):
            points = _bytes([row for row in rows if row["data"] == economy], "entries", "tight")
            label = "tight, values in " + economy.removeprefix("noise, ")
            _plot(codes, points, label=label, color=colour, marker="v")
        codes.set(yscale="log", ylim=(0.7, 13), title="bytes of an entry, on noise")
        codes.yaxis.set_major_locator(FixedLocator([0.75, 1, 1.5, 2, 3, 4, 5, 6, 8, 12]))
        codes.yaxis.set_minor_locator(NullLocator())
        codes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))

        for of, label, colour in (("entries", "a site", "#0072B2"), ("sums", "sums of four", "#CC79A7")):
            _plot(floors, _bytes(noise, of, "tight"), label=f"{label}, noise", color=colour, marker="o")
            star = {"linestyle": "", "marker": "*", "markersize": 13, "color": colour}
            _plot(floors, _bytes(real, of, "tight"), label=f"{label}, real training", **star)
            for by, style in (("floor", ":"), ("floor, m known too", "--")):
                _plot(floors, _bytes(noise, of, by), label=f"{by}, {label}", color=colour, linestyle=style)
        floors.set_title("the tight code beside the entropy, bytes of an entry")

        for name in ("tight", "fast"):
            for work, style in (("encode", "-"), ("decode", "--")):
                timed = [row for row in noise if (row["of"], row["by"]) == ("speed", name)]
                points = [(r["density"], r["timed_numel"] / r[f"{work}_p50"] / 1e6) for r in timed]
                _plot(speed, points, label=f"{name}, {work}", **_CODES[name] | {"linestyle": style})
        speed.set(yscale="log", title="million parameters per second, on one core")

        for axis in (codes, floors, speed):
            axis.set(xscale="log", xlabel="density: entries over elements")
            axis.xaxis.set_major_locator(FixedLocator([0.001, 0.003, 0.01, 0.03, 0.1, 0.3]))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.1%}".replace(".0", "")))
            axis.legend(fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.13))
        return saved(figure, table.with_suffix(".png"))


def _bytes(rows: list[Row], of: str, by: str) -> list[tuple[float, float]]:
    return [(row["density"], row["bytes_per_entry"]) for row in rows if (row["of"], row["by"]) == (of, by)]


def draw_link(table: Path) -> Path:
    """Rounds that were measured: a panel for each rate (down) and number of sites (across)."""
    rows = [row for row in latest_run(table) if row["source"] == "measured"]
    rates, counts = list(dict.fromkeys(r["rate_mbit"] for r in rows)), sorted({r["sites"] for r in rows})
    names = [name for name in _METHODS if any(row["method"] == name for row in rows)]
    with plt.rc_context(LOOK):
        size = (3.6 * len(counts) + 2.2, 0.27 * len(names) * len(rates) + 1.6)
        shape = (len(rates), len(counts))
        figure, axes = plt.subplots(*shape, figsize=size, sharey=True, sharex="row", squeeze=False)
        for down, rate in zip(axes, rates, strict=True):
            for axis, sites in zip(down, counts, strict=True):
                cell = {r["method"]: r for r in rows if (r["rate_mbit"], r["sites"]) == (rate, sites)}
                _bars(axis, cell, names)
                axis.set_title(f"{sites:.0f} sites, {rate_name(rate)}")
        for axis in axes[-1]:
            axis.set_xlabel("ms per round (logarithmic)")
        millions, cores = rows[0]["numel"] / 1e6, rows[0]["cores"]
        figure.suptitle(
            f"A round of {millions:.0f}M parameters per site, all sites on {cores:.0f} cores; "
            "light: its exchange"
        )
        return saved(figure, table.with_suffix(".png"))


def _bars(axis: Axes, cell: dict[str, Row], names: list[str]) -> None:
    baseline = cell.get("DiLoCo float32")
    for y, name in enumerate(names):
        if name not in cell:
            continue
        row, ms = cell[name], cell[name]["p50"] * 1e3
        axis.barh(y, ms, height=0.75, color=_METHODS[name][0])
        axis.barh(y, row["exchange_s"] * 1e3, height=0.3, color="white", alpha=0.45)
        below = "" if baseline is None or row is baseline else f" ({baseline['p50'] / row['p50']:.2g}x)"
        axis.text(ms, y, f" {ms:,.0f}{below}", va="center", fontsize=8)
    axis.set_xscale("log")
    times = [row["p50"] * 1e3 for row in cell.values()]
    before = axis.get_xlim()
    low, high = min(times, default=1.0) / 3, max(times, default=1.0) * 6  # to the right is room for figures
    axis.set_xlim(min(low, before[0] or low), max(high, before[1]))
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)


def draw_projection(table: Path) -> Path:
    """Seconds of an exchange by the number of sites: a panel for each rate (across) and size (down)."""
    rows = latest_run(table)
    rates, counts = (sorted({row[name] for row in rows}) for name in ("rate_mbit", "sites"))
    sizes = {"7B": 7e9, "1T": 1e12}
    with plt.rc_context(LOOK):
        size = (3.1 * len(rates), 3.2 * len(sizes) + 1.2)
        figure, axes = plt.subplots(len(sizes), len(rates), figsize=size, sharex=True, squeeze=False)
        for down, (called, numel) in zip(axes, sizes.items(), strict=True):
            for axis, rate in zip(down, rates, strict=True):
                own = [row for row in rows if (row["numel"], row["rate_mbit"]) == (numel, rate)]
                for name, (colour, marker) in _METHODS.items():
                    points = [(row["sites"], row["seconds"]) for row in own if row["method"] == name]
                    _plot(axis, points, marker=marker, color=colour, label=name)
                axis.set_xscale("log", base=2)
                axis.set_yscale("log")
                axis.set_xticks(counts, [f"{count:.0f}" for count in counts])
                axis.set_title(f"{called} parameters, {rate_name(rate)}")
            down[0].set_ylabel("seconds (projected)")
        for axis in axes[-1]:
            axis.set_xlabel("sites")
        at = rows[0]
        figure.suptitle(
            "Projected, not measured: the exchange of a round "
            f"({at['cores']:g} cores code at each site, {at['latency'] * 1e3:g} ms there and back, "
            f"density {at['density']:.1%})"
        )
        handles = axes[0][0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=4, fontsize=9)
        return saved(figure, table.with_suffix(".png"))


def draw_peers(table: Path) -> Path:
    """A round beside other people's: a panel for each size (down) and number of sites (across)."""
    rows = latest_run(table)
    cells = list(dict.fromkeys((row["numel"], row["sites"], row["rate_mbit"]) for row in rows))
    names = list(dict.fromkeys(row["method"] for row in rows))
    across = len({(sites, rate) for _, sites, rate in cells})
    down = -(-len(cells) // across)
    with plt.rc_context(LOOK):
        size = (4.4 * across + 1.4, (0.3 * len(names) + 0.9) * down + 0.4)
        figure, axes = plt.subplots(down, across, figsize=size, sharey=True, squeeze=False)
        for axis, (numel, sites, rate) in zip(axes.flat, cells, strict=False):
            found = [
                row for row in rows if (row["numel"], row["sites"], row["rate_mbit"]) == (numel, sites, rate)
            ]
            for row in found:
                ours = row["sent_bytes"] is not None  # only loco reports them
                y, ms = names.index(row["method"]), row["p50"] * 1e3
                axis.barh(y, ms, height=0.7, color="#0072B2" if ours else "#A0A0A0")
                beside = "" if row["over_torchft"] is None else f" ({row['over_torchft']:.2f})"
                told = f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
                axis.text(ms, y, f" {told}{beside}", va="center", fontsize=8)
            axis.set_xlim(0, 1.3e3 * max(row["p50"] for row in found))
            link = "" if rate is None else f", {rate_name(rate)}"
            groups = f", {found[0]['groups']:.0f} groups" if found[0]["groups"] > 1 else ""
            axis.set_title(f"{numel:,.0f} parameters, {sites:.0f} sites{groups}{link}", fontsize=10)
            axis.set_yticks(range(len(names)), names, fontsize=9)
            axis.set_ylim(len(names) - 0.4, -0.6)
            axis.grid(axis="y", visible=False)
        for axis in axes[-1]:
            axis.set_xlabel("ms per round, on the slowest site (over torchft's DiLoCo)")
        return saved(figure, table.with_suffix(".png"))


DRAW = {
    "kernels": draw_kernels,
    "wire": draw_wire,
    "link": draw_link,
    "projection": draw_projection,
    "peers": draw_peers,
    **sync.DRAW,
}  # by table


def _plot(axis: Axes, points: Sequence[tuple[float, float]], **look: Any) -> None:
    """A line through the points, from left to right, if there are any."""
    if points:
        axis.plot(*zip(*sorted(points), strict=True), **look)
