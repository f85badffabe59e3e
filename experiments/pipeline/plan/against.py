"""Predictions of runs of `compare`, held against what those runs took."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from statistics import median
from typing import Any

from experiments.errors import ExperimentError
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.plan.prediction import Layout, predict
from experiments.pipeline.plan.rates import Rates
from experiments.reporting.charts import CYCLE, LOOK, plt, saved
from experiments.reporting.markdown import markdown
from experiments.settings.merging import derive

_PAIRS = 20  # of layouts, of which the better one is predicted


def runs_in(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Labels, and the figures of each run."""
    runs = [
        (path.name.split(".seed")[0], json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(folder.glob("runs/*.json"))
    ]
    if len(runs) < 2:
        raise ExperimentError(f"against={folder}: two runs or more are needed there, of `compare`")
    return runs


def hold(
    runs: list[tuple[str, dict[str, Any]]], rates: Rates, config: PipelineConfig, cores: int, folder: Path
) -> str:
    """What was to be expected of these runs, and what came of them."""
    by_label: dict[str, list[tuple[float, float]]] = {}
    expected: dict[str, tuple[float, float]] = {}
    for label, one in runs:
        its = derive(PipelineConfig, config, one["config"], where=label)
        layout = Layout.of(its, cores=cores, link=None)
        found = predict(rates, layout)
        expected[label] = found.answers_s, found.age
        answers_s = layout.answers / (one["seconds_per_step"] * its.sync_every)
        by_label.setdefault(label, []).append((answers_s, one["mean_staleness"]))
    seen = {
        label: (median(speed for speed, _ in values), median(age for _, age in values))
        for label, values in by_label.items()
    }
    text = held_against(expected, seen)
    (folder / "against.md").write_text(text, encoding="utf-8")
    draw_against(expected, seen, folder / "against.png")
    return text


def held_against(expected: dict[str, tuple[float, float]], seen: dict[str, tuple[float, float]]) -> str:
    """Markdown: of every layout answers per second and how old tokens are when they are learned from; and of
    twenty pairs which is the faster one."""
    off = {label: expected[label][0] / seen[label][0] - 1 for label in seen}
    ages = {label: expected[label][1] - seen[label][1] for label in seen}
    rows = [
        [label, f"{expected[label][0]:.0f}", f"{seen[label][0]:.0f}", f"{off[label]:+.0%}"]
        + [f"{one[label][1]:.1f}" for one in (expected, seen)]
        for label in seen
    ]
    pairs = list(itertools.combinations(sorted(seen), 2))
    chosen = random.Random(0).sample(pairs, min(_PAIRS, len(pairs)))
    right = sum((expected[a] > expected[b]) == (seen[a] > seen[b]) for a, b in chosen)
    errors = f"{max(map(abs, off.values())):.0%}, and {max(map(abs, ages.values())):.1f} versions"
    return (
        markdown(
            ("layout", "answers/s, expected", "measured", "off by", "staleness, expected", "measured"), rows
        )
        + f"\nThe better of two was predicted in {right} of {len(chosen)} pairs, chosen by a seed.\n"
        f"The largest error: {errors}.\n"
    )


def draw_against(
    expected: dict[str, tuple[float, float]], seen: dict[str, tuple[float, float]], path: Path
) -> None:
    """Answers per second."""
    predicted, measured = ([found[label][0] for label in seen] for found in (expected, seen))
    with plt.rc_context(LOOK):
        figure, axis = plt.subplots(figsize=(9, 0.45 * len(seen) + 2))
        for k, both in enumerate(zip(predicted, measured, strict=True)):
            axis.plot(both, [k, k], color="#B0B0B0", zorder=1)
        axis.plot(measured, range(len(seen)), "o", color=CYCLE[0], label="measured")
        axis.plot(predicted, range(len(seen)), "D", color=CYCLE[1], label="expected")
        axis.set_yticks(range(len(seen)), list(seen))
        axis.set(title="Answers per second", xlim=(0, None))
        axis.invert_yaxis()
        axis.legend()
        saved(figure, path)
