"""The course of training: score by step and by bytes, reward, and what the gate does, round by round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from experiments.config import TITLES
from experiments.findings import gap, savings
from experiments.marks import COLOURS, CYCLE, columns_for, line_of, name_lines, wrapped
from experiments.results import Result
from experiments.statistics import Interval, of_mean
from experiments.summary import Comparison, Group
from experiments.table import Scale

Points = Sequence[tuple[float, float]]
BANDS = 6  # where there are more lines, only the broad ones have one: a few dozen hide all lines
_FEW = 6  # points, which a line alone would hide
_ROUNDS_OF_REWARD = 5  # in a moving average: a round's rewards are those of a few hundred answers


def score_by_step(comparison: Comparison) -> Figure:
    figure, axis = plt.subplots(figsize=(9.2, _height(len(comparison.groups))))
    _draw(
        axis, comparison, comparison.groups, lambda r: [(e.step, e.scores[r.metric]) for e in r.evaluations]
    )
    axis.set_xlabel("step")
    axis.set_xlim(0, max(result.steps for result in comparison.results))
    _name_score(axis, comparison)
    axis.set_title(wrapped(gap(comparison), characters=70))
    figure.canvas.draw()
    name_lines(
        axis,
        [
            (
                group.results[0].steps,
                comparison.row(group).final.mean,
                group.label,
                line_of(group, comparison),
            )
            for group in comparison.groups
        ],
    )
    return figure


def score_by_bytes(comparison: Comparison) -> Figure | None:
    """How much each byte on the network buys; the bytes span orders of magnitude."""
    sending = [g for g in comparison.groups if g.results[0].sent_bytes > 0]
    if not sending:
        return None
    figure, axis = plt.subplots(figsize=(9.2, 5.0))
    _draw(
        axis,
        comparison,
        sending,
        lambda r: [(e.sent_bytes / 1e6, e.scores[r.metric]) for e in r.evaluations if e.sent_bytes > 0],
    )
    start = fmean(result.first for result in comparison.results)
    axis.axhline(start, color="#AAAAAA", linewidth=1)
    axis.annotate(
        "warm start",
        (1, start),  # where curves that leave it have left it
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        color="#6B6B6B",
    )
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("sent per rank so far (MB, logarithmic)")
    _name_score(axis, comparison)
    axis.set_title(wrapped(savings(comparison)))
    _legend(figure, comparison, sending)
    return figure


def reward_by_round(comparison: Comparison) -> Figure | None:
    shown = [g for g in comparison.groups if g.results[0].rewards]
    if not shown:
        return None
    figure, axis = plt.subplots(figsize=(9.2, 4.8))
    _draw(axis, comparison, shown, lambda r: _smoothed(r.rewards))
    axis.set_xlabel(f"round (moving average of {_ROUNDS_OF_REWARD})")
    axis.set_ylabel("reward of the rollouts")
    main = [g for g in comparison.main if g in shown] or shown[:1]
    ends = [fmean(fmean(r.rewards[-_ROUNDS_OF_REWARD:]) for r in g.results) for g in main]
    begin = fmean(fmean(r.rewards[:_ROUNDS_OF_REWARD]) for g in main for r in g.results)
    reached = ", ".join(f"{g.label} {end:.2f}" for g, end in zip(main, ends, strict=True))
    axis.set_title(wrapped(f"Reward goes from {begin:.2f} to: {reached}"))
    _legend(figure, comparison, shown)
    return figure


def gate(comparison: Comparison) -> Figure | None:
    """What the gate lets through, and what it holds back."""
    shown = [g for g in comparison.groups if g.method == "pulseloco" and g.results[0].rounds]
    if not shown:
        return None
    about = comparison.pulse or shown[0]
    row = comparison.row(about)
    panels: list[tuple[str, str, str]] = [
        (
            "density",
            "entries a site sends ÷ all",
            f"{about.label} sends {_share(row.density or 0.0)} of the entries",
        )
    ]
    if row.union_density is not None:
        said = f"Its sites together send {_share(row.union_density)}"
        panels.append(("union_density", "entries any site sends ÷ all", said))
    norms = [fmean(r.rounds[place].residual_norm for r in about.results) for place in (_halfway(about), -1)]
    grown = norms[1] / norms[0] if norms[0] > 0 else 1.0
    course = "still grows" if grown > 1.1 else "shrinks" if grown < 0.9 else "stays level"
    said = f"What it withholds {course}: {grown:.2f}x from halfway to the end"
    panels.append(("residual_norm", "L2 norm of the withheld", said))
    if row.age is not None:
        panels.append(
            ("age", "rounds since last sent", f"The withheld has waited {row.age:.1f} rounds on average")
        )
    across = 2 if len(panels) > 1 else 1
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(
        down, across, figsize=(12.4, down * _height(len(shown), least=3.5)), squeeze=False
    )
    for axis, (name, what, title) in zip(axes.flat, panels, strict=False):
        ends = []
        for place, group in enumerate(shown):
            line = {"color": CYCLE[place % len(CYCLE)], "linewidth": 1.3, "zorder": 3}
            if group is about:
                line = {"color": COLOURS["pulseloco"], "linewidth": 2.6, "zorder": 4}
            line["linestyle"] = ("-", (0, (4, 2)), (0, (1, 1.5)))[place // len(CYCLE) % 3]
            course_of = _course(
                [
                    [(one.round, value) for one in r.rounds if (value := getattr(one, name)) is not None]
                    for r in group.results
                ]
            )
            _line(axis, course_of, line, band=len(shown) <= BANDS or group is about)
            if course_of:
                ends.append((course_of[-1][0], course_of[-1][1].mean, group.label, line))
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0, right=max((x for x, *_ in ends), default=1))
        axis.set_title(wrapped(title, characters=52))
        axis.set_ylabel(what)
        axis.set_xlabel("round")
        axis.xaxis.get_major_locator().set_params(integer=True)
        if "density" in name:
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        figure.canvas.draw()
        name_lines(axis, ends)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    return figure


def _share(value: float) -> str:
    """In percent, with two digits that say something: 11%, 1.6%, 0.23%."""
    if value <= 0:
        return "0%"
    return f"{100 * value:.{max(0, 1 - math.floor(math.log10(100 * value)))}f}%"


def _halfway(group: Group) -> int:
    return len(group.results[0].rounds) // 2


def _draw(
    axis: Axes, comparison: Comparison, groups: Sequence[Group], points: Callable[[Result], Points]
) -> None:
    for group in groups:
        course = _course([points(result) for result in group.results])
        band = len(groups) <= BANDS or group in comparison.main
        _line(axis, course, line_of(group, comparison), band=band)


def _course(runs: Sequence[Points]) -> list[tuple[float, Interval]]:
    """Place by place over the seeds: the mean of x, and y with its interval, as far as all of them go."""
    return [
        (fmean(x for x, _ in places), of_mean([y for _, y in places])) for places in zip(*runs, strict=False)
    ]


def _line(axis: Axes, course: Sequence[tuple[float, Interval]], line: dict[str, Any], *, band: bool) -> None:
    xs = [x for x, _ in course]
    marker = "o" if len(course) < _FEW else ""  # a line through one point shows nothing
    axis.plot(xs, [y.mean for _, y in course], **line, marker=marker, markersize=5)
    if band and course and course[0][1].half is not None:
        axis.fill_between(
            xs,
            [y.mean - (y.half or 0.0) for _, y in course],
            [y.mean + (y.half or 0.0) for _, y in course],
            color=line["color"],
            alpha=0.16 if line["linewidth"] > 2 else 0.06,
            linewidth=0,
        )


def _name_score(axis: Axes, comparison: Comparison) -> None:
    one = comparison.one
    if Scale.of(comparison).percent:
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        axis.set_ylabel(f"{one.metric} on held-out problems")
    else:
        axis.set_ylabel(f"{one.metric} on held-out text (nats per byte)")


def _smoothed(values: Sequence[float]) -> Points:
    """Each the mean of itself and what came right before it, from where there is enough of that."""
    size = min(_ROUNDS_OF_REWARD, len(values))
    return [(end, fmean(values[end - size : end])) for end in range(size, len(values) + 1)]


def _legend(figure: Figure, comparison: Comparison, shown: Sequence[Group]) -> None:
    """The broad lines by label; the thin ones by method, each by name where they are few."""
    keys: list[Line2D] = []
    thin = [group for group in shown if group not in comparison.main]
    for group in shown:
        if group in comparison.main or len(thin) <= 4:
            keys.append(Line2D([], [], **line_of(group, comparison), label=group.label))
    if len(thin) > 4:
        for method in dict.fromkeys(group.method for group in thin):
            some = [group for group in thin if group.method == method]
            line = line_of(some[0], comparison)
            keys.append(Line2D([], [], **line, label=f"{len(some)} more of {TITLES[method]}"))
    columns = columns_for([str(key.get_label()) for key in keys], inches=9.2)
    figure.legend(handles=keys, loc="outside lower center", ncols=columns, fontsize=10)


def _height(labels: int, *, least: float = 4.8) -> float:
    """Inches, so that each label's name has a line of its own at the side."""
    return max(least, 0.17 * labels + 1.2)
