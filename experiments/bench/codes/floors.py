"""How few bits an entry could take: empirical entropies, given what both ends know of a weight.

What they know is θ's exponent and, by half octaves, its distance from the nearest border of the gate's cast;
and, where that is asked for, whether m points to that border. Given these, the index (is this weight sent?)
and the side (to which border?) have an entropy. A value is a multiple of some part of an ulp, and lies beyond
the border: how far, by half octaves given the exponent, has an entropy too, and the bits below are plain.

The statistics are those of the very entries, and are not counted: of a few thousand entries they flatter the
floor by some percent. And a code that knows more (m's size, say) may come out below it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from loco.kernels import Entries, Known, reference_tight


class Floor(NamedTuple):
    """Bits of all entries together."""

    blind: float  # knowing nothing but how many are sent
    place: float
    sign: float
    value: float

    def __add__(self, other: object) -> Floor:  # not a longer tuple
        assert isinstance(other, Floor)
        return Floor(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def total(self) -> float:
        return self.place + self.sign + self.value


def floor(known: Known, entries: Entries, *, momentum: bool) -> Floor:
    """
    Args:
        momentum: whether m's sign is known too.
    """
    mantissa, emin, reach, least = reference_tight.reach_of(known.gate)
    seen = reference_tight.views(known, mantissa, emin)
    where = entries.indices().numpy()
    values = entries.values.numpy()

    near_by = half_octave(seen.distance)
    context = seen.exponent * 64 + near_by
    if momentum and known.momentum is not None:
        context = context * 2 + seen.agrees
    every = np.bincount(context)
    sent = np.bincount(context[where], minlength=len(every))
    near = np.signbit(values) == seen.negative[where].astype(bool)
    to_near = np.bincount(context[where], near, minlength=len(every))

    exponent = seen.exponent[where]
    away = np.where(near, seen.distance[where], (seen.step - seen.distance)[where])
    return Floor(
        _yes_or_no(np.array([len(where)]), np.array([len(context)])),
        _yes_or_no(sent, every),
        _yes_or_no(to_near, sent),
        _values(values, exponent, np.maximum(2 * away * reach >> 8, least)),
    )


def half_octave(x: np.ndarray) -> np.ndarray:
    """The bucket of each x ≥ 0: 0, 1, and then two to an octave."""
    octave = np.frexp(x.astype(np.float64))[1] - 1
    second = x >> np.maximum(octave - 1, 0) & 1
    return np.where(x < 2, x, 2 * octave + second)


def _values(values: np.ndarray, exponent: np.ndarray, least: np.ndarray) -> float:
    """Of |s|: in half ulps that the gate lets pass at least `least` of."""
    scaled = np.ldexp(np.abs(values).astype(np.float64), 151 - exponent)
    whole = (scaled == np.floor(scaled)) & (scaled < 2.0**52)
    halves = np.where(whole, scaled, 0).astype(np.int64)
    # What is no multiple of a coarser unit is sent as it is, in 32 bits.
    bits = []
    for shift in range(24):
        fits = whole & (halves & (1 << shift) - 1 == 0)
        x = (halves >> shift) - (least + (1 << shift) - 1 >> shift)
        size = np.where(x < 0, -x - 1, x)
        bucket = half_octave(size)
        plain = np.where(fits, np.maximum((bucket >> 1) - 1, 0), 32)
        symbol = np.where(fits, bucket + 128 * (x < 0), 256)
        bits.append(_entropy(exponent * 512 + symbol, exponent) + float(plain.sum()))
    return min(bits, default=0.0)


def _yes_or_no(yes: np.ndarray, of: np.ndarray) -> float:
    """Bits to say which `yes` of `of` it is, summed over contexts."""
    no = of - yes
    return float((_x_log_x(of) - _x_log_x(yes) - _x_log_x(no)).sum())


def _entropy(symbols: np.ndarray, context: np.ndarray) -> float:
    """Bits of all symbols, each of which belongs to one context only."""
    if not len(symbols):
        return 0.0
    return float(_x_log_x(np.bincount(context)).sum() - _x_log_x(np.bincount(symbols)).sum())


def _x_log_x(x: np.ndarray) -> np.ndarray:
    return x * np.log2(np.maximum(x, 1))
