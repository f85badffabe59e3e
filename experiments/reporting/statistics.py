"""What a few seeds say about a figure: means, 95% intervals, differences and ratios by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

_NORMAL = 1.959963984540054  # its quantile at 97.5%
_STUDENT = (  # Student's t at 97.5%, by degrees of freedom from 1
    12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814,
    2.20099, 2.17881, 2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596,
)  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """`mean` ± `half` with 95% confidence; `half` is None where one value says nothing of its spread."""

    mean: float
    half: float | None = None

    def times(self, factor: float) -> Interval:
        return Interval(self.mean * factor, None if self.half is None else self.half * abs(factor))


def t_quantile(freedom: int) -> float:
    """Student's t at 97.5%: tabulated, and beyond the table expanded around the normal's quantile."""
    if freedom < 1:
        raise ValueError(f"freedom must be at least 1, got {freedom}")
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def of_mean(values: Sequence[float]) -> Interval:
    """The mean, and Student's interval around it where there are two values or more."""
    if len(values) < 2:
        return Interval(fmean(values))
    return Interval(fmean(values), t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values)))


def of_share(share: float, count: int) -> Interval:
    """A share of `count` problems: half the width of Wilson's interval, which also holds near 0 and 1."""
    z = _NORMAL
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return Interval(share, half)


def difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval | None:
    """values − reference, seed by seed: what a seed does to both cancels. None without a common seed."""
    common = [seed for seed in values if seed in reference]
    return of_mean([values[seed] - reference[seed] for seed in common]) if common else None


def ratio(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval | None:
    """Mean of values ÷ mean of reference over the seeds that both have, ρ = x̄ / ȳ.

    Its interval is that of the mean of x − ρ·y, divided by ȳ (the delta method): seed by seed ratios would
    be thrown by a seed whose reference is near zero. None without a common seed, or if ȳ is not positive.
    """
    common = [seed for seed in values if seed in reference]
    if not common:
        return None
    below = fmean(reference[seed] for seed in common)
    if below <= 0:
        return None
    found = fmean(values[seed] for seed in common) / below
    around = of_mean([values[seed] - found * reference[seed] for seed in common])
    return Interval(found, None if around.half is None else around.half / below)
