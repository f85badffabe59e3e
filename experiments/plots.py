"""The pictures of a comparison, each with what it shows in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.curves import gate, reward_by_round, score_by_bytes, score_by_step
from experiments.frontier import frontier, visibility
from experiments.look import LOOK
from experiments.summary import Comparison


@dataclass(frozen=True)
class Plot:
    path: Path
    caption: str


_BAND = "A band is the 95% interval over the seeds. "
_PLOTS: tuple[tuple[str, Callable[[Comparison], Figure | None], str], ...] = (
    (
        "score_by_step",
        score_by_step,
        "Score on held-out data by inner steps. Colour tells the method; of each method one label is broad. ",
    ),
    ("score_by_bytes", score_by_bytes, "The same by what a rank has sent so far: further left is cheaper. "),
    (
        "frontier",
        frontier,
        "What fewer bytes cost: up is more of the reference's gain, right is fewer bytes. No label "
        "beats the joined ones in both. ",
    ),
    ("gate", gate, "What PULSELoCo's gate lets through in each round, and what it holds back. "),
    ("reward_by_round", reward_by_round, "Mean reward of the rollouts that training learns from. "),
    (
        "visibility",
        visibility,
        "The share of weights whose BF16 cast changes, in one late inner step and in a round's steps, by "
        "learning rate. ",
    ),
)


def draw_all(comparison: Comparison, folder: Path) -> list[Plot]:
    """Write the PNG files into `folder`; a plot that has nothing to show is left out, an old one removed."""
    several = any(len(group.results) > 1 for group in comparison.groups)
    drawn = []
    with plt.rc_context(LOOK):
        for name, draw, caption in _PLOTS:
            path = folder / f"{name}.png"
            figure = draw(comparison)
            if figure is None:
                path.unlink(missing_ok=True)
                continue
            figure.savefig(path)
            plt.close(figure)
            band = _BAND if several and name not in ("frontier", "visibility") else ""
            bars = "Bars are 95% intervals over the seeds. " if several and name == "frontier" else ""
            drawn.append(Plot(path, (caption + band + bars).strip()))
    return drawn
