"""report.html of one run: who did what and when, how old the tokens were, and the bytes of each flow."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from experiments.reporting.page import document, figure, table
from experiments.reporting.plots import Plot
from experiments.settings.plan import flat

_FLOWS = {
    "round bytes": "between the sites: their rounds, as sent by all of them",
    "published bytes": "from the sites into the store: patches, anchors and manifests",
    "patch bytes": "from the store to the workers: patches",
    "sample bytes": "from the workers to the trainers: samples",
}


def page(found: dict[str, Any], plot: Path) -> str:
    config, counts = found["config"], found["counts"]
    last = found["evaluations"][-1]["scores"]["pass@1"]
    caption = "What each part did; the age of tokens when they were learned from; what was learned."
    parts = [
        f"<p>{config['sites']} sites, {config['workers']} workers, {config['steps']} steps, at most "
        f"{config['max_staleness']} versions between sampling and training: "
        f"{found['seconds_per_step']:.3f} s a step, pass@1 {last:.1%}.</p>",
        figure(Plot(plot, caption)),
        "<h2>Shares of the time</h2>",
        table(_shares(found), head=["part", *_doings(found)], kind="results"),
        "<h2>Bytes of every flow</h2>",
        table([about, f"{counts.get(name, 0):,}"] for name, about in _FLOWS.items()),
        "<h2>Counted</h2>",
        table([name, f"{count:,}"] for name, count in counts.items() if name not in _FLOWS),
    ]
    if found["said"]:
        parts.append(f"<h2>What went wrong</h2><pre>{escape(chr(10).join(found['said']))}</pre>")
    parts.append("<details><summary>Settings</summary>")
    parts.append(table([key, str(value)] for key, value in flat(config).items()))
    parts.append("</details><h2>Measured on</h2>")
    parts.append(table([key, str(value)] for key, value in found["machine"].items()))
    return document("A pipeline's run", parts)


def _doings(found: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(what for by in found["shares"].values() for what in by))


def _shares(found: dict[str, Any]) -> Iterable[list[str]]:
    doings = _doings(found)
    for part, by in found["shares"].items():
        yield [part, *(f"{by[what]:.0%}" if what in by else "" for what in doings)]
