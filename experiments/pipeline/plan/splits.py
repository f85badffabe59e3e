"""Ways to divide devices between training and sampling: a table and a plot of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.errors import ExperimentError
from experiments.pipeline.plan.config import PlanConfig
from experiments.pipeline.plan.memory import ranks_that_fit
from experiments.pipeline.plan.prediction import Layout, Prediction, predict
from experiments.pipeline.plan.rates import Rates
from experiments.reporting.charts import CYCLE, LOOK, plt, saved
from experiments.reporting.markdown import markdown

_BATCHES = sorted({round(1.1**k) for k in range(90)})  # answers that a device samples at once


@dataclass(frozen=True)
class Row:
    """A layout, and what is to be expected of it."""

    layout: Layout
    expected: Prediction
    limit: str = ""  # what keeps its samplers from a larger batch


def splits(config: PlanConfig, rates: Rates) -> list[Row]:
    """Each way to split the GPUs into equal sites and samplers, with the batch that gives most."""
    rows, oldest = [], math.inf
    for ranks in ranks_that_fit(config):
        layout = Layout(
            sites=config.sites,
            ranks=ranks,
            samplers=config.gpus - config.sites * ranks,
            batch=1,
            step_answers=config.target.answers / ranks,
            sync_every=config.sync_every,
            max_staleness=config.max_staleness,
            link=config.link,
        )
        found: list[Row] = []
        for batch in _BATCHES:
            tried = replace(layout, batch=batch)
            expected = predict(rates, tried)
            oldest = min(oldest, expected.staleness)
            limit = ""
            if rates.most_answers is not None and batch > rates.most_answers:
                limit = "memory"
            elif expected.staleness > config.max_staleness:
                limit = "staleness"
            if limit:
                found = [replace(row, limit=limit) if row is found[-1] else row for row in found]
                break
            found.append(Row(tried, expected))
        if found:
            rows.append(max(found, key=lambda row: (row.expected.answers_s, -row.layout.batch)))
    if not rows:
        raise ExperimentError(
            f"no split keeps the longest answer within max_staleness={config.max_staleness}: it takes "
            f"{oldest:.1f} rounds at least. Set max_staleness={math.ceil(oldest)}, or "
            f"sync_every={config.sync_every * math.ceil(oldest / max(1, config.max_staleness))}"
        )
    return rows


def table(rows: Sequence[Row], best: Row) -> str:
    lines = []
    for row in rows:
        layout, expected = row.layout, row.expected
        bound = expected.bound + (f", {row.limit}" if row.limit and expected.bound == "sampling" else "")
        split = ["→" if row is best else "", f"{layout.sites} × {layout.ranks}", f"{layout.samplers}"]
        speed = [f"{layout.batch:.0f}", f"{expected.answers_s:.1f}", f"{expected.staleness:.2f}"]
        lines.append([*split, *speed, bound])
    head = ("training", "sampling", "answers at once", "answers/s", "longest staleness", "bound by")
    return markdown(["", *head], lines)


def sentence(row: Row, max_staleness: int) -> str:
    layout, expected = row.layout, row.expected
    return (
        f"sites={layout.sites} of {layout.ranks}, workers={layout.samplers}, {layout.batch:.0f} answers at "
        f"once: {expected.answers_s:.1f} answers/s, a round in {expected.round_s:.2f} s, bound by "
        f"{expected.bound}; the longest answer is {expected.staleness:.2f} versions old, at most "
        f"{max_staleness}"
    )


def draw(rows: Sequence[Row], max_staleness: int, path: Path) -> None:
    """Throughput, and the age of the longest answer, over the split."""
    names = [f"{row.layout.sites * row.layout.ranks}:{row.layout.samplers}" for row in rows]
    places = range(len(rows))
    marked = {"marker": "." if len(rows) < 30 else ""}
    with plt.rc_context(LOOK):
        figure, (speed, age) = plt.subplots(2, 1, figsize=(9, 7), sharex=True)
        for k, bound in enumerate(("training", "sampling", "cores", "links")):
            alone = [
                row.layout.answers / row.expected.bounds[bound] if bound in row.expected.bounds else math.nan
                for row in rows
            ]
            if not all(math.isnan(one) for one in alone):
                speed.plot(places, alone, "--", color=CYCLE[k + 1], label=f"{bound} alone", **marked)
        both = [row.expected.answers_s for row in rows]
        speed.plot(places, both, color=CYCLE[0], linewidth=2.5, label="expected", **marked)
        speed.set(title="Answers per second", ylim=(0, 1.5 * max(both)))
        speed.legend(loc="upper left")
        age.plot(places, [row.expected.staleness for row in rows], color=CYCLE[0], **marked)
        age.axhline(max_staleness, color=CYCLE[3], linestyle="--", label="max_staleness")
        age.set(
            title="Age of the longest answer", xlabel="devices that train : that sample", ylabel="versions"
        )
        age.set_ylim(bottom=0)
        age.legend()
        every = max(1, math.ceil(len(rows) / 16))
        age.set_xticks(list(places)[::every], names[::every])
        saved(figure, path)
