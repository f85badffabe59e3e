"""Turns what the parts noted into the figures of a run."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from typing import Any

from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Notes
from experiments.reporting import machine


def figures(config: PipelineConfig, digests: list[int], notes: Notes) -> dict[str, Any]:
    """
    begun, ended: when the first version was in the store, and when the last round was done.
    seconds: between the two.
    shares: of the time between the two, by part and by what it did.
    """
    begun = min(event["to"] for event in notes.events if event["what"] == "writing")
    ended = max(event["to"] for event in notes.events if event["what"] == "exchanging")
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in notes.events:
        seconds = min(event["to"], ended) - max(event["from"], begun)
        waited = event.get("all-reduce", 0.0)  # within a step: DDP's ranks for each other
        spent[event["part"]][event["what"]] += max(0.0, seconds - waited)
        if waited:
            spent[event["part"]]["all-reduce"] += waited
    evaluations = [event for event in notes.events if event["what"] == "evaluating"]
    rounds = [event["step"] for event in notes.events if event["what"] == "exchanging" and "step" in event]
    # A run that is resumed begins later.
    steps = max(rounds) - min(rounds) + config.sync_every if rounds else config.steps
    metric = next(iter(evaluations[0]["scores"]))
    counts = Counter(notes.counts)
    reward = counts.pop("reward of groups, in thousandths", 0) / 1000 / max(1, counts["groups"])
    used = sum(notes.staleness.values())
    return {
        "config": dataclasses.asdict(config),
        "machine": machine.describe(),
        "seconds": ended - begun,
        "seconds_per_step": (ended - begun) / steps,
        "begun": begun,
        "ended": ended,
        "metric": metric,  # the score that decides
        "evaluations": [
            {"step": event["step"], "time": event["at"], "scores": event["scores"]}
            | {"score": event["scores"][metric]}
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
