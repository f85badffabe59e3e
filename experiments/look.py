"""How all plots look."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")

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
