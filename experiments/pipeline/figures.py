"""From what the parts noted to the figures of a run, and to a plot."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

from experiments.pipeline.config import PipelineConfig
from experiments.plots import CYCLE, LOOK, plt, saved

DOINGS = ("training", "sampling", "exchanging", "publishing", "evaluating", "waiting")


def figures(config: PipelineConfig, trained: list[dict[str, Any]], noted: dict[str, Any]) -> dict[str, Any]:
    """
    seconds: from the first version to the last step, without evaluations.
    shares: of the time from the first version to the last step, by part and by what it did.
    """
    begun, ended = trained[0]["begun"], trained[0]["ended"]
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in noted["events"]:
        within = min(event["to"], ended) - max(event["from"], begun)
        spent[event["part"]][event["what"]] += max(0.0, within) / (ended - begun)
    counts = noted["counts"]
    groups = max(1, counts.get("groups", 0))
    used = sum(noted["staleness"].values())
    return {
        "config": dataclasses.asdict(config),
        "seconds": trained[0]["seconds"],
        "seconds_per_step": trained[0]["seconds"] / config.steps,
        "begun": begun,
        "ended": ended,
        "evaluations": trained[0]["evaluations"],
        "reward": counts.pop("reward of groups, in thousandths", 0) / 1000 / groups,
        "digests": [one["digest"] for one in trained],
        "counts": counts,
        "staleness": noted["staleness"],
        "mean_staleness": sum(k * n for k, n in noted["staleness"].items()) / max(1, used),
        "shares": {part: dict(by) for part, by in sorted(spent.items())},
        "events": noted["events"],
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Who did what when; how old the tokens were that were learned from; what was learned."""
    parts = list(found["shares"])
    colors = dict(zip(DOINGS, (*CYCLE[:4], CYCLE[5], "#E6E6E6"), strict=True))
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
        timeline.legend(ncols=len(DOINGS), loc="lower center", bbox_to_anchor=(0.5, 1.08))
        timeline.grid(visible=False)
        total = max(1, sum(found["staleness"].values()))
        ages.bar(list(found["staleness"]), [n / total for n in found["staleness"].values()], color=CYCLE[1])
        ages.set(title="Staleness of the tokens that were learned from", xlabel="versions", ylabel="share")
        ages.xaxis.get_major_locator().set_params(integer=True)
        times = [one["time"] - found["begun"] for one in found["evaluations"]]
        learned.plot(times, [one["scores"]["pass@1"] for one in found["evaluations"]], marker="o")
        learned.set(title="Held-out problems answered rightly", xlabel="seconds", ylabel="pass@1")
        saved(figure, path)
