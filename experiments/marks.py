"""How a plot tells its labels apart: colours, lines, and names that do not cover one another."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

from experiments.summary import Comparison, Group

# Okabe and Ito's palette, told apart with any colour vision; the shape of the marker repeats it.
COLOURS = {
    "single": "#CC79A7",
    "ddp": "#6B6B6B",
    "diloco": "#0072B2",
    "pulseloco": "#D55E00",
    "sparseloco": "#009E73",
}
MARKERS = {"single": "v", "ddp": "s", "diloco": "o", "pulseloco": "^", "sparseloco": "D"}
CYCLE = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#8C6D1F", "#7A4FBF")
_THIN: tuple[Any, ...] = ((0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1.5, 3)))
_SIZE = 8.5  # of a name beside a line, in points


def line_of(group: Group, comparison: Comparison) -> dict[str, Any]:
    """Colour tells the method; one label of each is a broad line, the others are thin and broken."""
    colour = COLOURS[group.method]
    if group in comparison.main:
        return {"color": colour, "linewidth": 2.6, "linestyle": "-", "zorder": 4}
    others = [g for g in comparison.groups if g.method == group.method and g not in comparison.main]
    return {
        "color": colour,
        "linewidth": 1.2,
        "linestyle": _THIN[others.index(group) % len(_THIN)],
        "alpha": 0.8,
        "zorder": 3,
    }


def spread(wanted: Sequence[float], *, gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """The places nearest to `wanted` (least squares) that keep their order and are `gap` apart.

    Subtracting the gaps makes it isotonic regression: neighbours that are out of order share their mean.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[list[float]] = []  # [sum, count]
    for place, index in enumerate(order):
        blocks.append([wanted[index] - place * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    level = [total / count for total, count in blocks for _ in range(int(count))]
    top = high - (len(wanted) - 1) * gap
    found = [0.0] * len(wanted)
    for place, index in enumerate(order):
        found[index] = max(min(level[place], top), low) + place * gap
    return found


def name_lines(axis: Axes, ends: Sequence[tuple[float, float, str, dict[str, Any]]]) -> None:
    """Write each line's name right of the plot, level with its end (x, y), or led to it.

    It fixes the limits: to be called once everything is drawn.
    """
    low, high = axis.get_ylim()
    left, right = axis.get_xlim()
    axis.set_xlim(left, right)
    axis.set_ylim(low, high)
    figure = axis.get_figure()
    assert figure is not None
    points = axis.get_position().height * figure.get_figheight() * 72  # type: ignore[union-attr]
    gap = min(1.25 * _SIZE / points, 0.95 / max(1, len(ends)))
    wanted = [(y - low) / (high - low) for _, y, _, _ in ends]
    for (x, y, name, line), place in zip(ends, spread(wanted, gap=gap, low=0.02, high=0.97), strict=True):
        axis.annotate(
            name,
            (x, y),
            xytext=(1.035, place),
            textcoords="axes fraction",
            fontsize=_SIZE,
            va="center",
            ha="left",
            color=line["color"],
            fontweight="bold" if line["linewidth"] > 2 else "normal",
            arrowprops={
                "arrowstyle": "-",
                "color": line["color"],
                "linewidth": 0.6,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )


def name_points(
    axis: Axes,
    points: Sequence[tuple[float, float, str, dict[str, Any]]],
    *,
    avoiding: Sequence[Sequence[tuple[float, float]]],
    reaches: Sequence[int] = (7, 12, 20, 30, 42),  # in points, from near by to as far as a name may be
) -> bool:
    """Write each point's name beside it, where it covers no other name, no point and none of the lines.

    Where there is no room beside it, a little further away, with a thin line to the point; whether there was
    room for all. The figure's layout and the limits must be final.
    """
    figure = axis.get_figure()
    assert figure is not None
    renderer = figure.canvas.get_renderer()  # type: ignore[union-attr]
    inside = axis.get_window_extent(renderer)
    pixels = [axis.transData.transform((x, y)) for x, y, _, _ in points]
    fits = True
    taken = [Bbox.from_bounds(px - 9, py - 9, 18, 18) for px, py in pixels]
    for line in avoiding:
        for (px, py), (qx, qy) in pairwise([axis.transData.transform(point) for point in line]):
            parts = max(1, int(max(abs(qx - px), abs(qy - py)) / 6))
            for part in range(parts + 1):
                x, y = px + (qx - px) * part / parts, py + (qy - py) * part / parts
                taken.append(Bbox.from_bounds(x - 1, y - 1, 2, 2))
    ways = [(1, 0.3), (1, -0.3), (0, 1), (0, -1), (-1, 0.3), (-1, -0.3), (0.8, 0.9), (0.8, -0.9)]
    ways += [(-0.8, 0.9), (-0.8, -0.9)]
    # Those with the most neighbours first: they have the fewest places to go.
    crowd = [sum(abs(px - qx) < 160 and abs(py - qy) < 60 for qx, qy in pixels) for px, py in pixels]
    for place in sorted(range(len(points)), key=lambda i: -crowd[i]):
        x, y, name, style = points[place]
        text = None
        for reach in reaches:
            for across, up in ways:
                text = axis.annotate(
                    name,
                    (x, y),
                    xytext=(across * reach, up * reach),
                    textcoords="offset points",
                    ha="left" if across > 0 else "right" if across < 0 else "center",
                    va="bottom" if up >= 0.8 else "top" if up <= -0.8 else "center",
                    fontsize=_SIZE,
                    zorder=6,
                    path_effects=[withStroke(linewidth=2.5, foreground="white")],
                    arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkB": 3}
                    if reach > 12
                    else None,
                    **style,
                )
                box = text.get_window_extent(renderer).padded(1.5)
                if _within(box, inside) and not any(box.overlaps(other) for other in taken):
                    taken.append(box)
                    break
                text.remove()
                text = None
            if text is not None:
                break
        fits = fits and text is not None
    return fits


def columns_for(labels: Sequence[str], *, inches: float) -> int:
    """How many columns of a legend fit below a figure."""
    longest = max((len(label) for label in labels), default=1)
    return max(1, min(len(labels), int(inches / (0.085 * longest + 0.75))))


def wrapped(title: str, *, characters: int = 88) -> str:
    return "\n".join(textwrap.wrap(title, characters))


def _within(box: Bbox, frame: Bbox) -> bool:
    return frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
