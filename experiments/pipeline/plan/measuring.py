"""What this machine does, from two short runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from experiments.pipeline.plan.prediction import Layout, work_of
from experiments.pipeline.plan.rates import Rates

_WARM = 2  # events of a part that don't count: memory is new, and threads start


def measured(runs: Sequence[tuple[Layout, dict[str, Any]]]) -> Rates:
    """From the figures of two runs, of which the second samples and learns from more answers at once.

    A part's seconds are those that its process computed: where cores are shared, a clock counts others too.
    """
    few, many = (run for _, run in runs)
    config, counts = many["config"], many["counts"]
    group = config[config["task"]]["group"]
    longest = max(event["longest"] for event in _of(many, "sampling"))
    token_s, sequence_s = _line([_token_cost(run) for run in (few, many)])
    step_s, answer_s = _line([_cost(run, "training") for run in (few, many)])
    rounds = config["steps"] // config["sync_every"]
    taking = [e["to"] - e["from"] for e in _of(many, "waiting") if e["part"].startswith("site")]
    rates = Rates(
        answer_tokens=counts["tokens"] / (counts["groups"] * group),
        longest_tokens=longest,
        slot_tokens=_slot_tokens(many, runs[1][0].batch),
        token_s=token_s,
        sequence_s=sequence_s,
        step_s=step_s,
        answer_s=answer_s,
        round_s=_median(many, "exchanging", "cpu"),
        publish_s=_median(many, "publishing", "cpu"),
        write_s=median(event["to"] - event["from"] for event in _of(many, "writing")),
        round_bytes=counts["round bytes"] / rounds / config["sites"],
        take_s=_shorter(taking),
        lease_s=_shorter(_gaps(many, "sampling")),
    )
    shared = [
        (layout.cores * run["seconds_per_step"] * layout.sync_every, work_of(rates, layout), layout.calls)
        for layout, run in runs
        if layout.cores is not None and layout.cores <= layout.parts
    ]
    if len(shared) < len(runs):
        return rates
    shared_s, call_s = _shared(shared)
    return replace(rates, shared_s=shared_s, call_s=call_s)


def _shorter(seconds: Sequence[float]) -> float:
    """A fourth of them is shorter: nothing was waited for then, but the call itself."""
    return quantiles(seconds, n=4)[0]


def _gaps(run: dict[str, Any], what: str) -> list[float]:
    """From the end of what a part did to its next beginning."""
    return [b["from"] - a["to"] for events in _by_part(run, what) for a, b in pairwise(events)]


def _shared(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """What a second of work takes where cores are shared, and what a call adds. Noise does not make the first
    less than a second, or the second less than nothing.

    Args:
        rounds: of two runs: core-seconds that there were, seconds of work, and calls.
    """
    (there, work, calls), (more_there, more_work, more_calls) = rounds
    both = work * more_calls - more_work * calls
    second = (there * more_calls - more_there * calls) / both if both else 0.0
    call = (work * more_there - more_work * there) / both if both else 0.0
    if second < 1:
        return 1.0, max(0.0, (there - work + more_there - more_work) / (calls + more_calls))
    if call < 0:
        return max(1.0, (there + more_there) / (work + more_work)), 0.0
    return second, call


def _of(run: dict[str, Any], what: str) -> list[dict[str, Any]]:
    return [event for events in _by_part(run, what) for event in events]


def _by_part(run: dict[str, Any], what: str) -> list[list[dict[str, Any]]]:
    """The events that count, of one part after the other."""
    by_part: dict[str, list[dict[str, Any]]] = {}
    for event in run["events"]:
        if event["what"] == what:
            by_part.setdefault(event["part"], []).append(event)
    return [events[_WARM:] for events in by_part.values()]


def _median(run: dict[str, Any], what: str, about: str) -> float:
    return median(event[about] for event in _of(run, what))


def _cost(run: dict[str, Any], what: str) -> tuple[float, float]:
    """Answers at once, and seconds."""
    return _median(run, what, "answers"), _median(run, what, "cpu")


def _token_cost(run: dict[str, Any]) -> tuple[float, float]:
    """Answers that are sampled at once, and seconds in which each of them gets a token."""
    events = _of(run, "sampling")
    return median(one["at_once"] for one in events), median(one["cpu"] / one["steps"] for one in events)


def _slot_tokens(run: dict[str, Any], batch: float) -> float:
    """Steps for which an answer's place in a batch of this size is taken, the mean."""
    events = [event for event in run["events"] if event["what"] == "sampling"]
    return batch * sum(event["steps"] for event in events) / sum(event["answers"] for event in events)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Through two points: where it begins, and how it rises; noise doesn't make it fall, or begin below 0."""
    (few, fast), (many, slow) = points
    rise = max(0.0, (slow - fast) / (many - few))
    return max(0.0, slow - rise * many), rise
