"""The plots of a comparison and of an elastic run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from experiments.reporting.charts import CYCLE, DASHES, LOOK, Axes, Figure, plt, saved, ticker
from experiments.reporting.results import Result
from experiments.reporting.statistics import Interval, of_mean
from experiments.reporting.summary import Comparison, Group

# The shape of the marker repeats the colour.
METHODS = {
    "single": ("#CC79A7", "v"),
    "ddp": ("#6B6B6B", "s"),
    "diloco": ("#0072B2", "o"),
    "pulseloco": ("#D55E00", "^"),
    "sparseloco": ("#009E73", "D"),
}
BANDS = 6  # where there are more lines, only the broad ones have one: a few dozen hide all lines
_FEW = 6  # points, which a line alone would hide
_NAMED = 16  # points of a plane: of more, only those that stand out have names

Points = Sequence[tuple[float, float]]
Event = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    path: Path
    caption: str


def draw_all(comparison: Comparison, folder: Path) -> list[Plot]:
    """Write the PNG files into `folder`; a plot that has nothing to show is left out, an old one removed."""
    several = any(len(group.results) > 1 for group in comparison.groups)
    bars = " Bands and bars are 95% intervals over the seeds." if several else ""
    drawn = []
    with plt.rc_context(LOOK):
        for draw, caption in _OF_A_COMPARISON.items():
            path = folder / f"{draw.__name__}.png"
            figure = draw(comparison)
            if figure is None:
                path.unlink(missing_ok=True)
            else:
                drawn.append(Plot(saved(figure, path), caption + bars))
    return drawn


def score_by_step(comparison: Comparison) -> Figure:
    figure, axis = _scores(
        comparison, comparison.groups, lambda r: [(e.step, e.scores[r.metric]) for e in r.evaluations]
    )
    axis.set(xlabel="inner steps", xlim=(0, max(result.steps for result in comparison.results)))
    return figure


def score_by_bytes(comparison: Comparison) -> Figure | None:
    sending = [group for group in comparison.groups if group.results[0].sent_bytes > 0]
    if not sending:
        return None
    figure, axis = _scores(
        comparison,
        sending,
        lambda r: [(e.sent_bytes / 1e6, e.scores[r.metric]) for e in r.evaluations if e.sent_bytes > 0],
    )
    axis.axhline(fmean(result.first for result in comparison.results), color="#AAAAAA", linewidth=1)
    axis.set(xscale="log", xlabel="sent per rank so far (MB, logarithmic)")
    axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    return figure


def _scores(
    comparison: Comparison, groups: Sequence[Group], points: Callable[[Result], Points]
) -> tuple[Figure, Axes]:
    """Colour tells the method; one label of each is a broad line, the others are thin and broken."""
    figure, axis = plt.subplots(figsize=(10.4, _height(groups)))
    thin = {method: cycle(DASHES[1:]) for method in METHODS}
    for group in groups:
        broad = group in comparison.main
        line: dict[str, Any] = {"color": METHODS[group.method][0], "label": group.label}
        line |= {"linewidth": 2.6, "zorder": 4} if broad else {"linewidth": 1.2, "alpha": 0.8, "zorder": 3}
        line["linestyle"] = "-" if broad else next(thin[group.method])
        _line(axis, [points(result) for result in group.results], line, band=len(groups) <= BANDS or broad)
    metric = comparison.one.metric
    if metric == "pass@1":
        axis.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=None))
    axis.set_ylabel(f"{metric} on held-out {'text (nats per byte)' if metric == 'loss' else 'problems'}")
    _legend(figure, axis)
    return figure, axis


def gate(comparison: Comparison) -> Figure | None:
    shown = [g for g in comparison.groups if g.method == "pulseloco" and g.results[0].rounds]
    titles = {
        "density": "entries a site sends ÷ all",
        "union_density": "entries any site sends ÷ all",
        "residual_norm": "L2 norm of the withheld",
        "age": "rounds since the withheld was last sent",
    }
    rounds = [one for group in shown for result in group.results for one in result.rounds]
    panels = [name for name in titles if any(getattr(one, name) is not None for one in rounds)]
    if not panels:
        return None
    figure, axes = plt.subplots(2, 2, figsize=(13, max(7, _height(shown))))
    for axis, name in zip(axes.flat, panels, strict=False):
        for k, group in enumerate(shown):
            broad = group in comparison.main
            line = {"color": CYCLE[k % len(CYCLE)], "linestyle": DASHES[k // len(CYCLE) % len(DASHES)]}
            line |= {"linewidth": 2.6 if broad else 1.3, "zorder": 4 if broad else 3, "label": group.label}
            runs = [
                [(one.round, value) for one in r.rounds if (value := getattr(one, name)) is not None]
                for r in group.results
            ]
            _line(axis, runs, line, band=len(shown) <= BANDS or broad)
        axis.set(ylim=(0, None), xlim=(0, None), title=titles[name], xlabel="round")
        axis.xaxis.get_major_locator().set_params(integer=True)
        if "density" in name:
            axis.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=None))
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    _legend(figure, axes[0][0])
    return figure


def pareto(points: Points) -> list[int]:
    """Which of them no other one beats: as large in both, and larger in one. In the order of the first."""

    def is_beaten(x: float, y: float) -> bool:
        return any(u >= x and v >= y and (u > x or v > y) for u, v in points)

    best = [i for i, point in enumerate(points) if not is_beaten(*point)]
    return sorted(best, key=lambda i: points[i])


def frontier(comparison: Comparison) -> Figure | None:
    """Bytes against gain: each label a point, those that no other of the method beats joined and named."""
    found: list[tuple[Group, float, Interval]] = []
    for group, row in zip(comparison.groups, comparison.rows, strict=True):
        share = row.share_second or row.share  # the score that has less noise
        if row.below_diloco is not None and share is not None:
            found.append((group, row.below_diloco, share))
    if len(found) < 2:
        return None
    points = [(x, share.mean) for _, x, share in found]
    best = {
        method: [of[k] for k in pareto([points[k] for k in of])]
        for method in METHODS
        if (of := [k for k, (group, *_) in enumerate(found) if group.method == method])
    }
    on_one = {k for line in best.values() for k in line}
    kept = on_one | {k for k, (group, *_) in enumerate(found) if group in comparison.main}
    named = [k for k in range(len(found)) if len(found) <= _NAMED or k in kept]
    figure, axis = plt.subplots(figsize=(11.6, max(5.6, _height(named) + 0.6)))
    for method, line in best.items():
        axis.plot(*zip(*(points[k] for k in line), strict=True), color=METHODS[method][0], linewidth=1.4)
    for k, (group, x, share) in enumerate(found):
        colour, marker = METHODS[group.method]
        if share.half is not None:
            axis.errorbar(x, share.mean, yerr=share.half, color=colour, linewidth=1, capsize=2, alpha=0.35)
        mark: dict[str, Any] = {"color": colour, "linestyle": "", "marker": marker, "markersize": 7}
        mark["markerfacecolor"] = colour if k in on_one else "white"
        number = f"{named.index(k) + 1}  {group.label}" if k in named else "_"
        axis.plot(x, share.mean, **mark, label=number, zorder=5)
    low, high = min(points)[0] / 1.25, max(points)[0] * 1.35
    ticks = [step * 10.0**power for power in range(-1, 5) for step in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axis.set(xscale="log", xlim=(low, high))
    axis.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    axis.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=None))
    axis.margins(y=0.14)
    axis.set_xlabel("sent in the run below the reference's (times, logarithmic)")
    axis.set_ylabel("share of the reference's gain" + (", by sampled accuracy" * comparison.has_second))
    _legend(figure, axis, by_height=False)
    figure.canvas.draw()
    figure.set_layout_engine("none")  # numbers are placed by pixels: nothing may move from here on
    _number(figure, axis, [points[k] for k in named], points)
    return figure


def _number(figure: Figure, axis: Axes, named: Points, points: Points) -> None:
    """1, 2, 3, … beside the named points, where they cover no other number and, given room, no point."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    pixels = [axis.transData.transform(point) for point in points]
    ways = [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)]
    offsets = [(reach * across, reach * up) for reach in (9, 15, 22, 30) for across, up in ways]
    look: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 8}
    taken: list[Any] = []
    for k, point in enumerate(named):
        text = axis.annotate(str(k + 1), point, xytext=offsets[0], **look)
        for offset in offsets:
            text.set_position(offset)
            box = text.get_window_extent(renderer)
            covers = any(box.overlaps(other) for other in taken) or any(box.contains(*at) for at in pixels)
            if not covers:
                break
        taken.append(text.get_window_extent(renderer))


_OF_A_COMPARISON: dict[Callable[[Comparison], Figure | None], str] = {
    score_by_step: "Score on held-out data by inner steps. Colour tells the method; of each one label is "
    "broad. The legend is in the order of the lines' ends.",
    score_by_bytes: "The same by what a rank has sent so far: further left is cheaper. Grey: the warm start.",
    frontier: "What fewer bytes cost: up is more of the reference's gain, right is fewer. Filled and joined: "
    "no label of the same method is better in both.",
    gate: "What PULSELoCo's gate sends in each round, and what it withholds.",
}


def _line(axis: Axes, runs: Sequence[Points], line: dict[str, Any], *, band: bool) -> None:
    """Point by point over the seeds: the mean of x, and y with its interval, as far as all of them go."""
    together = list(zip(*runs, strict=False))
    xs, ys = [fmean(x for x, _ in at) for at in together], [of_mean([y for _, y in at]) for at in together]
    # A line through one point shows nothing.
    axis.plot(xs, [y.mean for y in ys], **line, marker="o" if len(xs) < _FEW else "", markersize=5)
    if band and ys and ys[0].half is not None:
        low, high = ([y.mean + sign * (y.half or 0.0) for y in ys] for sign in (-1, 1))
        axis.fill_between(xs, low, high, color=line["color"], alpha=0.14, linewidth=0)


def _legend(figure: Figure, axis: Axes, *, by_height: bool = True) -> None:
    """At the right, in the order of the lines' ends."""
    lines = [line for line in axis.lines if not str(line.get_label()).startswith("_")]
    if by_height:
        lines.sort(key=lambda line: -np.asarray(line.get_ydata(), dtype=float)[-1])
    figure.legend(handles=lines, loc="outside right upper", fontsize=8.5, handlelength=2.6)


def _height(labels: Sequence[Any]) -> float:
    """Inches, so that each label has a line of the legend."""
    return max(4.8, 0.185 * len(labels) + 0.8)


def draw_elastic(disturbed: list[Event], undisturbed: list[Event], path: Path) -> None:
    """The loss of each site over time and over rounds, with the moments at which one dies and comes back."""
    rounds, before = ([e for e in events if e["event"] == "round"] for events in (disturbed, undisturbed))
    start = min(event["time"] for event in disturbed if event["event"] == "joined")
    killed, started = (next(e for e in disturbed if e["event"] == what) for what in ("killed", "started"))
    # Of the joinings, that of the site that was started again is the one that counts.
    back = next(e for e in disturbed if e["event"] == "joined" and e["time"] > started["time"])
    with plt.rc_context(LOOK):
        figure, (by_time, by_sites, by_round) = plt.subplots(
            3, 1, figsize=(8.5, 9.5), height_ratios=(3, 1, 3)
        )
        for k, site in enumerate(sorted({event["site"] for event in rounds})):
            own = [e for e in rounds if e["site"] == site]
            if site == started["site"]:  # a gap while it is away
                own.append({"time": started["time"], "loss": float("nan")})
            own.sort(key=lambda event: event["time"])
            look = {"color": CYCLE[k % len(CYCLE)], "linestyle": DASHES[k % len(DASHES)], "label": site}
            by_time.plot([e["time"] - start for e in own], [e["loss"] for e in own], **look)
        by_time.set(title="Training loss of each site, mean of a round, by time", ylabel="nats per byte")
        rounds.sort(key=lambda event: event["time"])
        times, sites = [e["time"] - start for e in rounds], [e["sites"] for e in rounds]
        by_sites.step(times, sites, where="post", color="#4D4D4D")
        by_sites.set(title="R, the sites of a round", xlabel="seconds", ylim=(0, None))
        by_sites.sharex(by_time)
        looks = {"color": "#6B6B6B", "linewidth": 4, "alpha": 0.35}, {"color": CYCLE[0], "linewidth": 1.4}
        for events, label, look in zip(
            (before, rounds), ("undisturbed", "a site dies and comes back"), looks, strict=True
        ):
            found = sorted({e["round"]: e["held_out"] for e in events}.items())
            by_round.plot(*zip(*found, strict=True), label=label, **look)
        by_round.set(title="Held-out loss of θ, by round", xlabel="rounds", ylabel="nats per byte")
        place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        for event, word in ((killed, "killed"), (back, "back, with the others' θ")):
            time = event["time"] - start
            for axis, at in ((by_time, time), (by_sites, time), (by_round, event["round"])):
                axis.axvline(at, color="#333333", linewidth=1, linestyle=":")
                if axis is not by_sites:
                    axis.annotate(f"{event['site']} {word}", (at, 0.5), xytext=(4, 0), fontsize=9, **place)
        for axis in (by_time, by_round):
            axis.legend(loc="upper right")
        saved(figure, path)
