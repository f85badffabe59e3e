"""What fewer bytes cost, and how much of an update a BF16 cast shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from experiments.config import TITLES
from experiments.findings import share_of, times
from experiments.marks import COLOURS, MARKERS, columns_for, name_points
from experiments.statistics import Interval
from experiments.summary import Comparison, Group, Row


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which of them no other one beats: as large in both, and larger in one. In the order of the first."""
    best = [
        i
        for i, (x, y) in enumerate(points)
        if not any(u >= x and v >= y and (u > x or v > y) for u, v in points)
    ]
    return sorted(best, key=lambda i: points[i])


def frontier(comparison: Comparison) -> Figure | None:
    """Bytes against gain: each label a point, those that none beats joined."""
    points = []
    for group, row in zip(comparison.groups, comparison.rows, strict=True):
        share = share_of(row)
        has_rounds = group.method not in ("ddp", "single")
        if has_rounds and row.below_diloco is not None and share is not None:
            points.append(_Point(group, row.below_diloco, share))
    if len(points) < 2:
        return None
    for numbered in (False, True):
        figure, fits = _frontier(comparison, points, numbered=numbered)
        if fits or numbered:
            return figure
        plt.close(figure)
    return None


@dataclass(frozen=True)
class _Point:
    group: Group
    x: float
    share: Interval

    @property
    def at(self) -> tuple[float, float]:
        return self.x, self.share.mean

    def mark(self, *, filled: bool) -> dict[str, Any]:
        colour = COLOURS[self.group.method]
        return {
            "marker": "*" if self.group.is_paper else MARKERS[self.group.method],
            "markersize": 15 if self.group.is_paper else 7,
            "color": colour,
            "markerfacecolor": colour if filled else "white",
            "linestyle": "",
        }


def _frontier(comparison: Comparison, points: Sequence[_Point], *, numbered: bool) -> tuple[Figure, bool]:
    """With names beside the points, or with numbers and a list; and whether all of them fit."""
    figure, axis = plt.subplots(figsize=(11.6 if numbered else 9.6, max(5.6, 3.6 + 0.16 * len(points))))
    best = pareto([point.at for point in points])
    joined = [points[i].at for i in best]
    line: dict[str, Any] = {"color": "#333333", "linewidth": 1.1, "linestyle": (0, (4, 2))}
    axis.plot([x for x, _ in joined], [y for _, y in joined], **line, zorder=2)
    names, bars, marks = [], [], []
    for place, point in enumerate(points):
        x, y = point.at
        half = point.share.half
        if half is not None:
            colour = COLOURS[point.group.method]
            axis.errorbar(x, y, yerr=half, color=colour, linewidth=1, capsize=2, alpha=0.35, zorder=3)
            bars.append([(x, y - half), (x, y + half)])
        mark = point.mark(filled=place in best)
        axis.plot(x, y, **mark, zorder=5)
        name = str(place + 1) if numbered else point.group.label
        names.append((x, y, name, {"fontweight": "bold" if place in best else "normal"}))
        mark["markersize"] = 7
        marks.append(Line2D([], [], **mark, label=f"{place + 1}  {point.group.label}"))
    _log_times(axis, [point.x for point in points])
    axis.set_ylabel("share of the reference's gain" + (", by sampled accuracy" * comparison.has_second))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.margins(y=0.14)
    axis.set_xlabel("sent in the run below the reference's (times, logarithmic)")
    axis.set_title(frontier_finding(comparison, [points[i].group for i in best]))
    keys = [
        Line2D([], [], marker=MARKERS[method], color=COLOURS[method], linestyle="", label=TITLES[method])
        for method in dict.fromkeys(point.group.method for point in points)
    ]
    if any(point.group.is_paper for point in points):
        star: dict[str, Any] = {"marker": "*", "markersize": 13, "color": COLOURS["pulseloco"]}
        keys.append(Line2D([], [], linestyle="", **star, label="the paper's setting"))
    keys.append(Line2D([], [], **line, label="filled: no other beats it in both"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=9.5)
    if numbered:
        figure.legend(handles=marks, loc="outside right upper", fontsize=9)
    figure.canvas.draw()
    figure.set_layout_engine("none")  # names are placed by pixels: nothing may move from here on
    if numbered:  # they may lie on bars, and must all be there
        far = (7, 12, 20, 30, 42, 56, 72, 90, 120)
        return figure, name_points(axis, names, avoiding=[joined], reaches=far)
    return figure, name_points(axis, names, avoiding=[joined, *bars])


def frontier_finding(comparison: Comparison, best: Sequence[Group]) -> str:
    """The main setting, and the one with the fewest bytes that costs next to nothing."""
    parts = []
    pulse = comparison.pulse
    for group in dict.fromkeys(filter(None, (pulse, _nearly_free(comparison, best)))):
        row = comparison.row(group)
        share = share_of(row)
        if share is not None and row.below_diloco is not None:
            parts.append(
                f"{group.label} keeps {share.mean:.0%} of the gain, for {times(row.below_diloco)} fewer bytes"
            )
    return "\n".join(parts) or "Gain kept by bytes"


def _nearly_free(comparison: Comparison, best: Sequence[Group]) -> Group | None:
    kept = []
    for group in best:
        share = share_of(comparison.row(group))
        if share is not None and share.mean >= 0.95 and group.method != "diloco":
            kept.append(group)
    return kept[-1] if kept else None


def visibility(comparison: Comparison) -> Figure | None:
    """The share of BF16 casts that a step, and a round, changes at each learning rate."""
    rates = {group.config["lr"] for group in comparison.groups}
    if len(rates) < 2:
        return None
    figure, axis = plt.subplots(figsize=(8.4, 4.8))
    series: dict[str, list[tuple[Group, Row]]] = {}  # of labels that differ in nothing else
    for group, row in zip(comparison.groups, comparison.rows, strict=True):
        rest = {key: value for key, value in group.config.items() if key not in ("lr", "seed", "name")}
        series.setdefault(json.dumps(rest, sort_keys=True), []).append((group, row))
    keys: dict[str, Line2D] = {}
    for found in series.values():
        method = found[0][0].method
        for name, what in (("one_step_density", "one late step"), ("visible", "one round")):
            at = [(g.config["lr"], getattr(r, name)) for g, r in found]
            points = sorted(point for point in at if point[1])  # a logarithmic axis has no place for 0
            if not points:
                continue
            line: dict[str, Any] = {
                "color": COLOURS[method],
                "marker": MARKERS[method],
                "linestyle": "-" if name == "visible" else (0, (1, 1.5)),
                "markerfacecolor": COLOURS[method] if name == "visible" else "white",
            }
            axis.plot([rate for rate, _ in points], [share for _, share in points], **line)
            label = f"{TITLES[method]}, {what}"
            keys.setdefault(label, Line2D([], [], **line, label=label))
    if not keys:
        plt.close(figure)
        return None
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(sorted(rates), [f"{rate:g}" for rate in sorted(rates)])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    axis.set_xlabel("inner learning rate (logarithmic)")
    axis.set_ylabel("share of BF16 casts changed (logarithmic)")
    longest = max(series.values(), key=lambda found: len({group.config["lr"] for group, _ in found}))
    ends = sorted((group.config["lr"], row.one_step_density) for group, row in longest)
    (low, few), *_, (high, many) = ends if len(ends) > 1 else ends * 2
    axis.set_title(f"One late step changes {few:.2%} of the BF16 casts at lr {low:g}, {many:.2%} at {high:g}")
    columns = columns_for(list(keys), inches=8.4)
    figure.legend(handles=list(keys.values()), loc="outside lower center", ncols=columns, fontsize=9.5)
    return figure


def _log_times(axis: Axes, values: Sequence[float]) -> None:
    """Ticks that people read: 1, 2, 5, 10, … times."""
    low, high = min(values) / 1.25, max(values) * 1.35
    ticks = [
        step * 10**power for power in range(-1, 5) for step in (1, 2, 5) if low <= step * 10**power <= high
    ]
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axis.xaxis.set_minor_formatter(NullFormatter())
