"""The plots of a comparison and of an elastic run. `bench.plots` has those of the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from experiments.config import TITLES
from experiments.errors import missing_extra
from experiments.results import Result
from experiments.statistics import Interval, of_mean
from experiments.summary import Comparison, Group

try:
    import matplotlib
except ImportError as error:
    raise missing_extra(error) from None
matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

LOOK: dict[Any, Any] = {
    "figure.dpi": 160,
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}
# Okabe and Ito's palette, told apart with any colour vision; the shape of the marker repeats it.
COLOURS = {
    "single": "#CC79A7",
    "ddp": "#6B6B6B",
    "diloco": "#0072B2",
    "pulseloco": "#D55E00",
    "sparseloco": "#009E73",
}
MARKERS = {"single": "v", "ddp": "s", "diloco": "o", "pulseloco": "^", "sparseloco": "D"}
CYCLE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#7A4FBF")
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1.5, 3)))
BANDS = 6  # where there are more lines, only the broad ones have one: a few dozen hide all lines
_FEW = 6  # points, which a line alone would hide
_ROUNDS_OF_REWARD = 5  # in a moving average: a round's rewards are those of a few hundred answers

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    path: Path
    caption: str


def draw_all(comparison: Comparison, folder: Path) -> list[Plot]:
    """Write the PNG files into `folder`; a plot that has nothing to show is left out, an old one removed."""
    several = any(len(group.results) > 1 for group in comparison.groups)
    drawn = []
    with plt.rc_context(LOOK):
        for name, draw, caption in _OF_A_COMPARISON:
            path = folder / f"{name}.png"
            figure = draw(comparison)
            if figure is None:
                path.unlink(missing_ok=True)
                continue
            bars = (
                " Bands and bars are 95% intervals over the seeds."
                if several and name != "visibility"
                else ""
            )
            drawn.append(Plot(saved(figure, path), caption + bars))
    return drawn


def score_by_step(comparison: Comparison) -> Figure:
    figure, axis = plt.subplots(figsize=(10.4, _height(comparison.groups)))
    _courses(
        axis, comparison, comparison.groups, lambda r: [(e.step, e.scores[r.metric]) for e in r.evaluations]
    )
    axis.set_xlim(0, max(result.steps for result in comparison.results))
    axis.set_xlabel("inner steps")
    return _of_scores(figure, axis, comparison)


def score_by_bytes(comparison: Comparison) -> Figure | None:
    sending = [group for group in comparison.groups if group.results[0].sent_bytes > 0]
    if not sending:
        return None
    figure, axis = plt.subplots(figsize=(10.4, _height(sending)))
    _courses(
        axis,
        comparison,
        sending,
        lambda r: [(e.sent_bytes / 1e6, e.scores[r.metric]) for e in r.evaluations if e.sent_bytes > 0],
    )
    axis.axhline(
        fmean(result.first for result in comparison.results), color="#AAAAAA", label="warm start", linewidth=1
    )
    axis.set_xscale("log")
    _plain_numbers(axis)
    axis.set_xlabel("sent per rank so far (MB, logarithmic)")
    return _of_scores(figure, axis, comparison)


def reward_by_round(comparison: Comparison) -> Figure | None:
    shown = [group for group in comparison.groups if group.results[0].rewards]
    if not shown:
        return None
    figure, axis = plt.subplots(figsize=(10.4, _height(shown)))
    _courses(axis, comparison, shown, lambda r: _smoothed(r.rewards))
    axis.set_xlabel(f"round (moving average of {_ROUNDS_OF_REWARD})")
    axis.set_ylabel("reward of the rollouts")
    _legend(figure, axis)
    return figure


def gate(comparison: Comparison) -> Figure | None:
    shown = [g for g in comparison.groups if g.method == "pulseloco" and g.results[0].rounds]
    panels = [
        (name, title)
        for name, title in (
            ("density", "entries a site sends ÷ all"),
            ("union_density", "entries any site sends ÷ all"),
            ("residual_norm", "L2 norm of the withheld"),
            ("age", "rounds since the withheld was last sent"),
        )
        if any(getattr(one, name) is not None for g in shown for r in g.results for one in r.rounds)
    ]
    if not panels:
        return None
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(down, across, figsize=(13, max(3.5 * down, _height(shown))), squeeze=False)
    for axis, (name, title) in zip(axes.flat, panels, strict=False):
        for k, group in enumerate(shown):
            broad = group in comparison.main
            line = {"color": CYCLE[k % len(CYCLE)], "linestyle": DASHES[k // len(CYCLE) % len(DASHES)]}
            line |= {"linewidth": 2.6 if broad else 1.3, "zorder": 4 if broad else 3, "label": group.label}
            rounds = [
                [(one.round, value) for one in r.rounds if (value := getattr(one, name)) is not None]
                for r in group.results
            ]
            _line(axis, _course(rounds), line, band=len(shown) <= BANDS or broad)
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.set_title(title)
        axis.set_xlabel("round")
        axis.xaxis.get_major_locator().set_params(integer=True)
        if "density" in name:
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    _legend(figure, axes[0][0])
    return figure


def pareto(points: Points) -> list[int]:
    """Which of them no other one beats: as large in both, and larger in one. In the order of the first."""
    best = [
        i
        for i, (x, y) in enumerate(points)
        if not any(u >= x and v >= y and (u > x or v > y) for u, v in points)
    ]
    return sorted(best, key=lambda i: points[i])


def frontier(comparison: Comparison) -> Figure | None:
    """Bytes against gain: each label a numbered point, those that none beats joined."""
    points: list[tuple[Group, float, Interval]] = []
    for group, row in zip(comparison.groups, comparison.rows, strict=True):
        share = row.share_second or row.share  # the score that has less noise
        if group.method not in ("ddp", "single") and row.below_diloco is not None and share is not None:
            points.append((group, row.below_diloco, share))
    if len(points) < 2:
        return None
    figure, axis = plt.subplots(figsize=(11.6, max(5.6, _height([group for group, *_ in points]) + 0.6)))
    best = pareto([(x, share.mean) for _, x, share in points])
    axis.plot(
        [points[i][1] for i in best],
        [points[i][2].mean for i in best],
        color="#333333",
        linewidth=1.1,
        linestyle=DASHES[1],
        label="no label beats these in both",
    )
    for k, (group, x, share) in enumerate(points):
        colour, paper = COLOURS[group.method], group.is_paper
        mark: dict[str, Any] = {
            "color": colour,
            "linestyle": "",
            "markerfacecolor": colour if k in best else "white",
        }
        mark |= {"marker": "*" if paper else MARKERS[group.method], "markersize": 14 if paper else 7}
        if share.half is not None:
            axis.errorbar(x, share.mean, yerr=share.half, color=colour, linewidth=1, capsize=2, alpha=0.35)
        name = f"{k + 1}  {group.label}" + " (the paper's setting)" * paper
        axis.plot(x, share.mean, **mark, label=name, zorder=5)
    _log_times(axis, [x for _, x, _ in points])
    axis.set_ylabel("share of the reference's gain" + (", by sampled accuracy" * comparison.has_second))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.margins(y=0.14)
    axis.set_xlabel("sent in the run below the reference's (times, logarithmic)")
    _legend(figure, axis, by_height=False)
    figure.canvas.draw()
    figure.set_layout_engine("none")  # numbers are placed by pixels: nothing may move from here on
    _number(axis, [(x, share.mean) for _, x, share in points], bold=best)
    return figure


def _number(axis: Axes, points: Points, *, bold: Sequence[int]) -> None:
    """1, 2, 3, … beside the points, each where it covers no other number and no point if there is room."""
    figure = axis.get_figure()
    assert isinstance(figure, Figure)
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    pixels = [axis.transData.transform(point) for point in points]
    ways = [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)]
    offsets = [(reach * across, reach * up) for reach in (9, 15, 22, 30) for across, up in ways]
    taken: list[Any] = []
    for k, point in enumerate(points):
        text = axis.annotate(
            str(k + 1),
            point,
            xytext=offsets[0],
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=8,
            fontweight="bold" if k in bold else "normal",
        )
        for offset in offsets:
            text.set_position(offset)
            box = text.get_window_extent(renderer)
            if not any(box.overlaps(other) for other in taken) and not any(
                box.contains(*at) for at in pixels
            ):
                break
        taken.append(text.get_window_extent(renderer))


def visibility(comparison: Comparison) -> Figure | None:
    """One line for labels that differ in nothing but the learning rate, and their seeds."""
    rates = sorted({group.config["lr"] for group in comparison.groups})
    if len(rates) < 2:
        return None
    series: dict[str, list[tuple[Group, Any]]] = {}
    for group, row in zip(comparison.groups, comparison.rows, strict=True):
        rest = {key: value for key, value in group.config.items() if key not in ("lr", "seed", "name")}
        series.setdefault(json.dumps(rest, sort_keys=True), []).append((group, row))
    figure, axis = plt.subplots(figsize=(9.4, 4.8))
    keys: dict[str, Line2D] = {}
    for found in series.values():
        method = found[0][0].method
        for name, what in (("one_step_density", "one late step"), ("visible", "one round")):
            whole = name == "visible"
            line: dict[str, Any] = {"color": COLOURS[method], "marker": MARKERS[method]}
            line |= {
                "linestyle": "-" if whole else DASHES[2],
                "markerfacecolor": COLOURS[method] if whole else "white",
            }
            # A logarithmic axis has no place for 0.
            points = sorted((g.config["lr"], getattr(row, name)) for g, row in found if getattr(row, name))
            if points:
                axis.plot(*zip(*points, strict=True), **line)
                label = f"{TITLES[method]}, {what}"
                keys.setdefault(label, Line2D([], [], **line, label=label))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    axis.set_xlabel("inner learning rate (logarithmic)")
    axis.set_ylabel("share of BF16 casts changed (logarithmic)")
    figure.legend(handles=list(keys.values()), loc="outside right upper", fontsize=9)
    return figure


_OF_A_COMPARISON: tuple[tuple[str, Callable[[Comparison], Figure | None], str], ...] = (
    (
        "score_by_step",
        score_by_step,
        "Score on held-out data by inner steps. Colour tells the method; of each method one label is broad. "
        "The legend is in the order of the lines' ends.",
    ),
    ("score_by_bytes", score_by_bytes, "The same by what a rank has sent so far: further left is cheaper."),
    (
        "frontier",
        frontier,
        "What fewer bytes cost: up is more of the reference's gain, right is fewer bytes. No label beats the "
        "joined, filled ones in both.",
    ),
    ("gate", gate, "What PULSELoCo's gate sends in each round, and what it withholds."),
    ("reward_by_round", reward_by_round, "Mean reward of the rollouts that training learns from."),
    (
        "visibility",
        visibility,
        "Share of weights whose BF16 cast changes, in one late inner step and in a round's steps, by "
        "learning rate.",
    ),
)


def _courses(
    axis: Axes, comparison: Comparison, groups: Sequence[Group], points: Callable[[Result], Points]
) -> None:
    """Colour tells the method; one label of each is a broad line, the others are thin and broken."""
    thin = {method: cycle(DASHES[1:]) for method in COLOURS}
    for group in groups:
        broad = group in comparison.main
        line: dict[str, Any] = {"color": COLOURS[group.method], "label": group.label}
        line |= {"linewidth": 2.6, "zorder": 4} if broad else {"linewidth": 1.2, "alpha": 0.8, "zorder": 3}
        line["linestyle"] = "-" if broad else next(thin[group.method])
        course = _course([points(result) for result in group.results])
        _line(axis, course, line, band=len(groups) <= BANDS or broad)


def _course(runs: Sequence[Points]) -> list[tuple[float, Interval]]:
    """Point by point over the seeds: the mean of x, and y with its interval, as far as all of them go."""
    return [(fmean(x for x, _ in at), of_mean([y for _, y in at])) for at in zip(*runs, strict=False)]


def _line(axis: Axes, course: Sequence[tuple[float, Interval]], line: dict[str, Any], *, band: bool) -> None:
    xs, ys = [x for x, _ in course], [y for _, y in course]
    # A line through one point shows nothing.
    axis.plot(xs, [y.mean for y in ys], **line, marker="o" if len(course) < _FEW else "", markersize=5)
    if band and ys and ys[0].half is not None:
        low, high = ([y.mean + sign * (y.half or 0.0) for y in ys] for sign in (-1, 1))
        axis.fill_between(xs, low, high, color=line["color"], alpha=0.14, linewidth=0)


def _of_scores(figure: Figure, axis: Axes, comparison: Comparison) -> Figure:
    metric = comparison.one.metric
    if metric == "pass@1":
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axis.set_ylabel(f"{metric} on held-out {'problems' if metric == 'pass@1' else 'text (nats per byte)'}")
    _legend(figure, axis)
    return figure


def _legend(figure: Figure, axis: Axes, *, by_height: bool = True) -> None:
    """At the right, in the order of the lines' ends."""
    lines = [line for line in axis.lines if not str(line.get_label()).startswith("_")]
    if by_height:
        lines.sort(key=lambda line: -np.asarray(line.get_ydata(), dtype=float)[-1])
    figure.legend(handles=lines, loc="outside right upper", fontsize=8.5, handlelength=2.6)


def _height(labels: Sequence[Any]) -> float:
    """Inches, so that each label has a line of the legend."""
    return max(4.8, 0.185 * len(labels) + 0.8)


def _smoothed(values: Sequence[float]) -> Points:
    """Each the mean of itself and what came right before it, from where there is enough of that."""
    size = min(_ROUNDS_OF_REWARD, len(values))
    return [(end, fmean(values[end - size : end])) for end in range(size, len(values) + 1)]


def _plain_numbers(axis: Axes) -> None:
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _log_times(axis: Axes, values: Sequence[float]) -> None:
    """Ticks that people read: 1, 2, 5, 10, … times."""
    low, high = min(values) / 1.25, max(values) * 1.35
    ticks = [
        tick for power in range(-1, 5) for step in (1, 2, 5) if low <= (tick := step * 10**power) <= high
    ]
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axis.xaxis.set_minor_formatter(NullFormatter())


def saved(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    plt.close(figure)
    return path


def draw_elastic(disturbed: list[dict[str, Any]], undisturbed: list[dict[str, Any]], path: Path) -> None:
    """The loss of each site over time and over rounds, with the moments at which one dies and comes back."""
    rounds = {
        name: [e for e in events if e["event"] == "round"]
        for name, events in (("disturbed", disturbed), ("undisturbed", undisturbed))
    }
    start = min(event["time"] for event in disturbed if event["event"] == "joined")
    started = next(event for event in disturbed if event["event"] == "started")
    # Of the joinings, that of the site that was started again is the one that counts.
    back = next(e for e in disturbed if e["event"] == "joined" and e["time"] > started["time"])
    killed = next(event for event in disturbed if event["event"] == "killed")
    moments = ((killed, "killed"), (back, "back, with the others' θ"))
    with plt.rc_context(LOOK):
        figure, (by_time, by_sites, by_round) = plt.subplots(
            3, 1, figsize=(8.5, 9.5), height_ratios=(3, 1, 3)
        )
        for k, site in enumerate(sorted({event["site"] for event in disturbed})):
            own = [e for e in rounds["disturbed"] if e["site"] == site]
            cut = started["time"] if site == started["site"] else float("inf")
            for life in ([e for e in own if e["time"] < cut], [e for e in own if e["time"] > cut]):
                style = {"color": CYCLE[k % len(CYCLE)], "linestyle": DASHES[k % len(DASHES)]}
                label = site if life and life[0] is own[0] else None
                by_time.plot(
                    [e["time"] - start for e in life], [e["loss"] for e in life], label=label, **style
                )
        by_time.set(title="Training loss of each site, mean of a round, by time", ylabel="nats per byte")
        by_time.legend(loc="upper right")
        in_time = sorted(rounds["disturbed"], key=lambda event: event["time"])
        by_sites.step(
            [e["time"] - start for e in in_time], [e["sites"] for e in in_time], where="post", color="#4D4D4D"
        )
        by_sites.set(title="R, the sites of a round", xlabel="seconds", ylim=(0, None))
        by_sites.sharex(by_time)
        for name, label, style in (
            ("undisturbed", "undisturbed", {"color": "#6B6B6B", "linewidth": 4, "alpha": 0.35}),
            ("disturbed", "a site dies and comes back", {"color": CYCLE[0], "linewidth": 1.4}),
        ):
            found = sorted({e["round"]: e["held_out"] for e in rounds[name]}.items())
            by_round.plot(*zip(*found, strict=True), label=label, **style)
        by_round.set(title="Held-out loss of θ, by round", xlabel="rounds", ylabel="nats per byte")
        by_round.legend(loc="upper right")
        for event, word in moments:
            for axis, at in (
                (by_time, event["time"] - start),
                (by_sites, event["time"] - start),
                (by_round, event["round"]),
            ):
                axis.axvline(at, color="#333333", linewidth=1, linestyle=":")
                if axis is not by_sites:
                    place: dict[str, Any] = {
                        "xycoords": ("data", "axes fraction"),
                        "textcoords": "offset points",
                    }
                    axis.annotate(f"{event['site']} {word}", (at, 0.5), xytext=(4, 0), fontsize=9, **place)
        saved(figure, path)
