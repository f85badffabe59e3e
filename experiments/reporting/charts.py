"""How every plot looks, and one plot for any table: a panel for each case, with bars or lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.errors import missing_extra

try:
    import matplotlib
except ImportError as error:
    raise missing_extra(error) from None
matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib import ticker as ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

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
# Okabe and Ito's palette, told apart with any colour vision.
CYCLE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#7A4FBF")
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1.5, 3)))
_COLOURS = 64  # of a file, which is a third as long as with all


def saved(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    plt.close(figure)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(_COLOURS, method=Image.Quantize.MEDIANCUT)
    small.save(path, optimize=True)
    return path


def panels(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    panel: Sequence[str],
    x: str,
    y: str,
    line: Sequence[str] = (),
    label: str | None = None,
    factor: float = 1.0,
) -> Path:
    """A panel for each case of the columns `panel`: lines of `y` over `x`, one for each case of the columns
    `line`; or without these a bar for each `x`, as long as its `y`.

    Args:
        label: of the values; by default the column's name.
        factor: of the values, as 1000 for seconds in milliseconds.
    """
    rows = [row for row in rows if row.get(y) is not None]
    cases = list(dict.fromkeys(tuple(row[name] for name in panel) for row in rows))
    names = list(dict.fromkeys(row[x] for row in rows))
    across = min(3, len(cases))
    down = -(-len(cases) // across)
    height = 3.4 if line else 0.3 * len(names) + 1.0
    with plt.rc_context(LOOK):
        size = (4.6 * across + 1.4, height * down)
        figure, axes = plt.subplots(down, across, figsize=size, sharey=True, squeeze=False)
        for axis, case in zip(axes.flat, cases, strict=False):
            found = [row for row in rows if tuple(row[name] for name in panel) == case]
            told = zip(panel, case, strict=True)
            title = ", ".join(f"{name} {_text(value)}" for name, value in told if value is not None)
            axis.set_title(title, fontsize=10)
            if line:
                for k, of in enumerate(dict.fromkeys(tuple(row[name] for name in line) for row in rows)):
                    own = [r for r in found if tuple(r[name] for name in line) == of]
                    points = sorted((row[x], factor * row[y]) for row in own)
                    look = {"color": CYCLE[k % len(CYCLE)], "marker": "o", "label": ", ".join(map(str, of))}
                    axis.plot(*zip(*points, strict=True) if points else ([], []), **look)
                axis.set(xlabel=x, xscale="log", ylim=(0, None))
                continue
            for row in found:
                place, value = names.index(row[x]), factor * row[y]
                axis.barh(place, value, height=0.7, color=CYCLE[1])
                axis.text(value, place, f" {value:.3g}", va="center", fontsize=8)
            axis.margins(x=0.2)
            axis.set_yticks(range(len(names)), names, fontsize=9)
            axis.set(ylim=(len(names) - 0.4, -0.6), xlabel=label or y)
            axis.grid(axis="y", visible=False)
        for axis in axes.flat[len(cases) :]:
            axis.set_visible(False)
        if line:
            axes[0][0].set_ylabel(label or y)
            axes[0][0].legend(fontsize=8)
        return saved(figure, path)


def stacked(axis: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """A bar for each name, which its parts make up; waiting is grey."""
    left = [0.0] * len(names)
    for k, (part, values) in enumerate(parts.items()):
        color = "#D9D9D9" if part == "waiting" else CYCLE[k % len(CYCLE)]
        axis.barh(names, values, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, -0.5))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
