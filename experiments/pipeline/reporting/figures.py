"""Turns what the parts noted into the figures of a run, and into a plot."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.reporting.diary import Notes
from experiments.reporting import machine
from experiments.reporting.charts import CYCLE, LOOK, plt, saved

DOINGS = (
    *("training", "sampling", "exchanging", "publishing", "writing", "receiving"),
    *("evaluating", "waiting"),
)


def figures(config: PipelineConfig, digests: list[int], notes: Notes) -> dict[str, Any]:
    """
    begun, ended: when the first version was in the store, and when the last round was done.
    seconds: between the two, without evaluations.
    shares: of the time between the two, by part and by what it did.
    """
    begun = min(event["to"] for event in notes.events if event["what"] == "writing")
    ended = max(event["to"] for event in notes.events if event["what"] == "exchanging")
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in notes.events:
        seconds = min(event["to"], ended) - max(event["from"], begun)
        spent[event["part"]][event["what"]] += max(0.0, seconds)
    evaluating = sum(by.get("evaluating", 0.0) for by in spent.values())
    evaluations = [event for event in notes.events if event["what"] == "evaluating"]
    counts = Counter(notes.counts)
    reward = counts.pop("reward of groups, in thousandths", 0) / 1000 / max(1, counts["groups"])
    used = sum(notes.staleness.values())
    return {
        "config": dataclasses.asdict(config),
        "machine": machine.describe(),
        "seconds": ended - begun - evaluating,
        "seconds_per_step": (ended - begun - evaluating) / config.steps,
        "begun": begun,
        "ended": ended,
        "evaluations": [
            {"step": event["step"], "time": event["at"], "scores": event["scores"]}
            for event in sorted(evaluations, key=lambda event: event["step"])
        ],
        "reward": reward,
        "digests": digests,
        "counts": dict(counts),
        "staleness": dict(sorted(notes.staleness.items())),
        "mean_staleness": sum(k * n for k, n in notes.staleness.items()) / max(1, used),
        "shares": {
            part: {what: seconds / (ended - begun) for what, seconds in by.items()}
            for part, by in sorted(spent.items())
        },
        "said": notes.said,
        "events": notes.events,
    }


def share_of_sites(found: dict[str, Any], doing: str) -> float:
    """The share of the time that sites spend on this, on average."""
    shares = [by.get(doing, 0.0) for by in found["shares"].values() if "training" in by]
    return sum(shares) / len(shares)


def draw(found: dict[str, Any], path: Path) -> None:
    """Who did what and when; how old the tokens were that were learned from; the score."""
    parts = list(found["shares"])
    colors = dict(zip(DOINGS, (*CYCLE[:4], CYCLE[7], CYCLE[4], CYCLE[5], "#E6E6E6"), strict=True))
    with plt.rc_context(LOOK):
        figure, (timeline, ages, learned) = plt.subplots(3, 1, figsize=(9, 8.5), height_ratios=(3, 2, 2))
        for doing in reversed(DOINGS):  # waiting lies below
            for row, part in enumerate(parts):
                bars = [
                    (e["from"] - found["begun"], e["to"] - e["from"])
                    for e in found["events"]
                    if e["part"] == part and e["what"] == doing
                ]
                timeline.broken_barh(bars, (row - 0.4, 0.8), facecolors=colors[doing])
            timeline.barh(0, 0, color=colors[doing], label=doing)
        timeline.set(title="Who did what", xlabel="seconds", xlim=(0, found["ended"] - found["begun"]))
        timeline.set_yticks(range(len(parts)), parts)
        timeline.legend(ncols=len(DOINGS) // 2, loc="lower center", bbox_to_anchor=(0.5, 1.08))
        timeline.grid(visible=False)
        total = max(1, sum(found["staleness"].values()))
        ages.bar(list(found["staleness"]), [n / total for n in found["staleness"].values()], color=CYCLE[1])
        ages.set(title="Staleness of the tokens that were learned from", xlabel="versions", ylabel="share")
        ages.xaxis.get_major_locator().set_params(integer=True)
        times = [one["time"] - found["begun"] for one in found["evaluations"]]
        learned.plot(times, [one["scores"]["pass@1"] for one in found["evaluations"]], marker="o")
        learned.set(title="Held-out problems answered rightly", xlabel="seconds", ylabel="pass@1")
        saved(figure, path)
