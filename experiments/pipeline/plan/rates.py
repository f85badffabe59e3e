"""What one device does by itself: measured by two short runs, or worked out from what is known of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.pipeline.plan.config import PlanConfig

_BF16 = 2  # bytes
_TRAINING, _FORWARD = 6, 2  # floating-point operations for each parameter and token
_WARM = 2  # events of a part that don't count: memory is new, and threads start
_FOR_CACHE = 0.9  # share of a device's memory that weights, keys and values may have


@dataclass(frozen=True)
class Rates:
    """Seconds of one device, but where something else is said."""

    answer_tokens: float  # of an answer, the mean
    longest_tokens: float  # of the longest one
    slot_tokens: (
        float  # steps for which an answer holds its place: where all wait for the longest, its tokens
    )
    token_s: float  # of a step that gives every answer of a batch a token, however many they are
    sequence_s: float  # more of it for each of them
    step_s: float  # of a training step, however many answers it learns from
    answer_s: float  # more of it for each of them
    round_s: float  # of a round, without its bytes' way
    publish_s: float  # of a version, at the site that publishes, before a thread writes it
    write_s: float  # until it is there
    round_bytes: float  # that a site sends in a round, and as many that it receives
    take_s: float = 0.0  # until a trainer has the samples of a step, if they are there
    lease_s: float = 0.0  # between two batches of a sampler, if it may go on
    call_s: float = 0.0  # core-seconds of all other processes for each of these two calls
    others: float = 0.0  # cores that all other processes take besides
    most_answers: float | None = None  # that fit into the memory of one device that samples

    def of_token(self, batch: float) -> float:
        return self.token_s + batch * self.sequence_s

    def of_batch(self, batch: float) -> float:
        """Of answers that begin together, until the last of them has its end."""
        return self.slot_tokens * self.of_token(batch)

    def of_longest(self, batch: float) -> float:
        """Between the first token of the longest answer and its last."""
        return self.longest_tokens * self.of_token(batch)


def measured(few: dict[str, Any], many: dict[str, Any]) -> Rates:
    """From the figures of two runs, of which the second samples and learns from more answers at once.

    A part's seconds are those that its process computed: with too few cores, a clock counts others', too.
    """
    config, counts = many["config"], many["counts"]
    group = config[config["task"]]["group"]
    longest = max(event["longest"] for event in _of(many, "sampling"))
    batch_s, in_batch_s = _line([_cost(run, "sampling") for run in (few, many)])
    step_s, answer_s = _line([_cost(run, "training") for run in (few, many)])
    rounds = config["steps"] // config["sync_every"]
    others, call_s = _others([_spent_by_others(run) for run in (few, many)])
    return Rates(
        answer_tokens=counts["tokens"] / (counts["groups"] * group),
        longest_tokens=longest,
        slot_tokens=longest,
        token_s=batch_s / longest,
        sequence_s=in_batch_s / longest,
        step_s=step_s,
        answer_s=answer_s,
        round_s=_median(many, "exchanging", "cpu"),
        publish_s=_median(many, "publishing", "cpu"),
        write_s=median(event["to"] - event["from"] for event in _of(many, "writing")),
        round_bytes=counts["round bytes"] / rounds / config["sites"],
        take_s=_shortest(e["to"] - e["from"] for e in _of(many, "waiting") if e["part"].startswith("site")),
        lease_s=_shortest(_gaps(many, "sampling")),
        call_s=call_s,
        others=others,
    )


def worked_out(config: PlanConfig) -> Rates:
    """A token's step reads all weights once, and each sequence's keys and values, unless computing takes
    longer; training computes at the share of the peak that `utilisation` says."""
    gpu, target = config.gpu, config.target
    flops, bandwidth = gpu.tflops * 1e12 * gpu.utilisation, gpu.bandwidth_gb * 1e9
    kv = 2 * target.layers * target.kv_heads * target.head_dim * _BF16  # bytes of a token
    context = target.prompt_tokens + target.answer_tokens / 2  # of a sequence, over its life
    weights = _BF16 * target.parameters
    token_s = weights / bandwidth if target.token_ms is None else target.token_ms / 1e3
    trained = target.prompt_tokens + target.answer_tokens
    of_token = _TRAINING * target.parameters / flops
    if target.trained_tokens_s is not None:
        of_token = 1 / target.trained_tokens_s
    free = _FOR_CACHE * gpu.memory_gb * 1e9 - weights
    return Rates(
        answer_tokens=target.answer_tokens,
        longest_tokens=target.longest_tokens,
        slot_tokens=target.answer_tokens,  # another takes its place
        token_s=token_s,
        sequence_s=max(kv * context / bandwidth, _FORWARD * target.parameters / flops),
        step_s=0.0,
        answer_s=trained * of_token,
        round_s=0.0,
        publish_s=0.0,
        write_s=0.0,
        round_bytes=target.round_bytes * target.parameters,
        most_answers=free / (kv * context),
    )


def _shortest(seconds: Iterable[float]) -> float:
    """A tenth of them is shorter: those in which nothing was waited for, and a little more."""
    return quantiles(seconds, n=10)[0]


def _gaps(run: dict[str, Any], what: str) -> list[float]:
    """From the end of what a part did to its next beginning."""
    by_part: dict[str, list[dict[str, Any]]] = {}
    for event in _of(run, what):
        by_part.setdefault(event["part"], []).append(event)
    return [b["from"] - a["to"] for events in by_part.values() for a, b in pairwise(events)]


def _spent_by_others(run: dict[str, Any]) -> tuple[float, float, float]:
    """Core-seconds, in so many seconds and for so many calls."""
    calls = sum(event["what"] == "waiting" for event in run["events"])
    return max(0.0, (run["busy"] or run["cpu"]) - run["cpu"]), run["ended"] - run["begun"], calls


def _others(runs: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Cores that are always taken, and core-seconds of a call, from two runs; neither is below 0."""
    (one, seconds, calls), (other, more_seconds, more_calls) = runs
    both = seconds * more_calls - more_seconds * calls
    if both:
        always = (one * more_calls - other * calls) / both
        call = (seconds * other - more_seconds * one) / both
        if always >= 0 and call >= 0:
            return always, call
        if always < 0:
            return 0.0, (one + other) / (calls + more_calls)
    return (one + other) / (seconds + more_seconds), 0.0


def _of(run: dict[str, Any], what: str) -> list[dict[str, Any]]:
    by_part: dict[str, list[dict[str, Any]]] = {}
    for event in run["events"]:
        if event["what"] == what:
            by_part.setdefault(event["part"], []).append(event)
    return [event for events in by_part.values() for event in events[_WARM:]]


def _median(run: dict[str, Any], what: str, about: str) -> float:
    return median(event[about] for event in _of(run, what))


def _cost(run: dict[str, Any], what: str) -> tuple[float, float]:
    """Answers at once, and seconds."""
    return _median(run, what, "answers"), _median(run, what, "cpu")


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Through two points: where it begins, and how it rises; noise doesn't make it fall, or begin below 0."""
    (few, fast), (many, slow) = points
    rise = max(0.0, (slow - fast) / (many - few))
    return max(0.0, slow - rise * many), rise
