"""From single runs to what a comparison says of each label: means over its seeds, beside its references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any

from experiments.errors import ExperimentError
from experiments.reporting.results import RATES, Result
from experiments.reporting.statistics import Interval, difference, of_mean, of_share, ratio

SECOND = "sampled"  # the score that stands beside a deciding pass@1: exact and smooth
LEAST_OF_LOSS = 1e-3  # of where it started: a loss of one seed, which has no interval, must fall by more
# What a comparison holds equal beside the task's own settings, where it can: only then is a difference the
# method's.
CONDITIONS = (
    "task", "model", "path", "parameters", "steps", "lr", "nproc",
    "transformer", "warm_start",
)  # fmt: skip
INTERVALS = ("final", "gain", "minus", "share", "share_second")  # of a row
_MEANS = ("sent_bytes", "received_bytes", "one_step_density", "exchange_seconds", "round_seconds")
_STEADY = ("density", "union_density", "visible", "residual_norm", "age")


@dataclass(frozen=True, eq=False)  # one is itself: to compare all that was measured would take long
class Group:
    """The runs of one label."""

    label: str
    results: tuple[Result, ...]  # in the order of their seeds

    @property
    def config(self) -> dict[str, Any]:
        return self.results[0].config

    @property
    def method(self) -> str:
        return self.results[0].method

    @property
    def held_out(self) -> int:
        """Problems that scores are of."""
        return self.config[self.config["task"]]["held_out"]

    @property
    def is_dense(self) -> bool:
        """Whether it is DiLoCo that sends FP32."""
        return self.method == "diloco" and self.config["wire"] in (None, "float32")

    def by_seed(self, figure: Callable[[Result], float]) -> dict[int, float]:
        return {result.seed: figure(result) for result in self.results}

    def mean(self, figure: Callable[[Result], float | None]) -> float | None:
        values = [value for value in map(figure, self.results) if value is not None]
        return fmean(values) if values else None

    def gained_beyond_noise(self, score: str) -> bool:
        """Whether it gained more than the 95% interval over its seeds, or than the one that the size of the
        held-out set leaves (of a loss, which has none: than a thousandth of it)."""
        gains = of_mean([result.gained(score) for result in self.results])
        first = fmean(result.evaluations[0].scores[score] for result in self.results)
        if score in ("pass@1", SECOND):
            # A sampled answer's probabilities spread no more than counts of right answers do.
            ends = first + gains.mean
            least = of_share(min(1.0, max(0.0, ends)), self.held_out).half or 0.0
        else:
            least = LEAST_OF_LOSS * first
        return gains.mean > min(least, least if gains.half is None else gains.half)


@dataclass(frozen=True)
class Row:
    """A label's figures. Scores and differences of scores are as measured, not in percent."""

    label: str
    method: str
    seeds: tuple[int, ...]
    ranks: int
    sites: int
    reference: str | None  # the label of the DiLoCo it is compared with
    differs_in: tuple[str, ...]  # conditions that are not its reference's
    final: Interval
    interval_of: str | None  # final's interval: over "seeds" or the "held-out" set
    gain: Interval
    minus: Interval | None  # final − the reference's; None for the reference
    share: Interval | None  # of the reference's gain; None if that can't be told from noise
    share_second: Interval | None  # the same by the second score
    sent_bytes: float
    received_bytes: float
    bytes_source: str
    kernel_beyond: float | None  # the kernel's count of sent bytes ÷ the accounted ones, − 1
    below_ddp: float | None
    below_diloco: float | None
    payload_per_parameter: float | None
    below_fp32: float | None
    density: float | None
    union_density: float | None
    visible: float | None
    one_step_density: float
    residual_norm: float | None
    age: float | None
    hours: dict[str, float]
    exchange_seconds: float
    round_seconds: float


@dataclass(frozen=True)
class Comparison:
    groups: tuple[Group, ...]

    @staticmethod
    def of(results: Sequence[Result]) -> Comparison:
        """Grouped by label, in the order in which they first appear.

        Raises:
            ExperimentError: no results, or results that decide by different scores.
        """
        if not results:
            raise ExperimentError("there are no finished runs to report")
        metrics = sorted({result.metric for result in results})
        if len(metrics) > 1:
            raise ExperimentError(f"some runs measure {metrics[0]} and some {metrics[1]}: report them apart")
        labels = dict.fromkeys(result.label for result in results)
        return Comparison(
            tuple(
                Group(label, tuple(sorted((r for r in results if r.label == label), key=lambda r: r.seed)))
                for label in labels
            )
        )

    @property
    def results(self) -> list[Result]:
        return [result for group in self.groups for result in group.results]

    @property
    def one(self) -> Result:
        """Any of them, for what they share."""
        return self.groups[0].results[0]

    @property
    def seeds(self) -> list[int]:
        return sorted({result.seed for result in self.results})

    @property
    def has_second(self) -> bool:
        return all(SECOND in result.evaluations[0].scores for result in self.results)

    @property
    def step_seconds(self) -> float:
        """One figure for all methods, whose inner steps are the same work: their differences are noise."""
        return median(result.step_seconds for result in self.results)

    @cached_property
    def reference(self) -> Group | None:
        """The first DiLoCo that sends FP32 and has outer momentum; without one, the first DiLoCo."""
        return next(iter(self._dense or [g for g in self.groups if g.method == "diloco"]), None)

    @cached_property
    def _dense(self) -> list[Group]:
        return [g for g in self.groups if g.is_dense and g.config["outer_momentum"] > 0]

    def reference_of(self, group: Group) -> Group | None:
        """The reference, but of the same learning rate, steps, … where there is a DiLoCo for that."""
        if group.method == "diloco" and self.reference is not None and _alike(group, self.reference):
            return self.reference
        return _most_like(group, self._dense) or self.reference

    def _gainer(self, reference: Group | None, score: str) -> Group | None:
        """It, if there is a gain by that score of which others can have a share."""
        if reference is None or (score == SECOND and not self.has_second):
            return None
        return reference if reference.gained_beyond_noise(score) else None

    def ddp_of(self, group: Group) -> Group | None:
        found = [g for g in self.groups if g.method == "ddp"]
        return _most_like(group, found) or next(iter(found), None)

    @cached_property
    def pulse(self) -> Group | None:
        """The PULSELoCo that stands out: the first, if possible of the reference's conditions."""
        found = [g for g in self.groups if g.method == "pulseloco"]
        alike = _most_like(self.reference, found) if self.reference is not None else None
        return alike or next(iter(found), None)

    @cached_property
    def main(self) -> tuple[Group, ...]:
        """One of each method: what a plot must not lose among the rest."""
        chosen: dict[str, Group] = {}
        for group in (*filter(None, (self.reference, self.pulse)), *self.groups):
            chosen.setdefault(group.method, group)
        return tuple(g for g in self.groups if g in chosen.values())

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return tuple(self._row(group) for group in self.groups)

    def _row(self, group: Group) -> Row:
        reference, ddp, one = self.reference_of(group), self.ddp_of(group), group.results[0]
        other = reference if reference is not group else None
        means = {name: fmean(getattr(r, name) for r in group.results) for name in _MEANS}
        payload = group.mean(lambda result: result.payload_per_parameter)
        final = of_mean([r.final for r in group.results])
        interval_of = "seeds" if final.half is not None else None
        if final.half is None and one.metric == "pass@1":
            final, interval_of = of_share(final.mean, group.held_out), "held-out"
        return Row(
            label=group.label,
            method=group.method,
            seeds=tuple(r.seed for r in group.results),
            ranks=one.ranks,
            sites=one.sites,
            reference=reference.label if reference is not None else None,
            differs_in=() if other is None or group.method in ("single", "ddp") else _differing(group, other),
            final=final,
            interval_of=interval_of,
            gain=of_mean([r.gain for r in group.results]),
            minus=_of_both(difference, group, other, lambda r: r.final),
            share=_of_both(ratio, group, self._gainer(reference, one.metric), lambda r: r.gain),
            share_second=_of_both(ratio, group, self._gainer(reference, SECOND), lambda r: r.gained(SECOND)),
            bytes_source=one.bytes_source,
            kernel_beyond=group.mean(_kernel_beyond),
            below_ddp=_times_below(ddp, means["sent_bytes"]),
            below_diloco=_times_below(reference, means["sent_bytes"]),
            payload_per_parameter=payload,
            below_fp32=4 / payload if payload else None,
            hours={
                rate: fmean(r.projected_hours(bits, step_seconds=self.step_seconds) for r in group.results)
                for rate, bits in RATES.items()
            },
            **{name: group.mean(lambda result, name=name: result.steady(name)) for name in _STEADY},
            **means,
        )


def shared(dicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all of them hold, and hold equal."""
    first, *others = dicts
    return {k: v for k, v in first.items() if all(k in d and d[k] == v for d in others)}


def _differing(one: Group, other: Group) -> tuple[str, ...]:
    keys = (*CONDITIONS, one.config["task"])
    return tuple(key for key in keys if one.config.get(key) != other.config.get(key))


def _alike(one: Group, other: Group) -> bool:
    return not _differing(one, other)


def _most_like(group: Group, found: Sequence[Group]) -> Group | None:
    """The first of the same conditions."""
    return next((g for g in found if _alike(g, group)), None)


def _kernel_beyond(result: Result) -> float | None:
    # With several ranks per site the kernel sees the site's inner traffic too.
    if not result.kernel_sent_bytes or not result.accounted_bytes or result.sites != result.ranks:
        return None
    return result.kernel_sent_bytes / result.accounted_bytes - 1


def _of_both(
    compute: Callable[[dict[int, float], dict[int, float]], Interval | None],
    group: Group,
    other: Group | None,
    figure: Callable[[Result], float],
) -> Interval | None:
    return None if other is None else compute(group.by_seed(figure), other.by_seed(figure))


def _times_below(other: Group | None, sent: float) -> float | None:
    if other is None or sent <= 0:
        return None
    return fmean(r.sent_bytes for r in other.results) / sent
