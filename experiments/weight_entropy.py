"""How few bytes describe the BF16 weights that changed, and how many others' formats take.

    python -m experiments.weight_entropy

prints a table in Markdown of the versions that `experiments.weight_changes` produces; about three minutes on
one core. Needs `zstandard`.

Bits per changed weight are code lengths of adaptive codes: a table of counts per context that starts empty
(Krichevsky–Trofimov, half a count per symbol), so that what learning the tables costs is included. A code has
three parts: the place (for every weight, whether it changed), the direction (away from zero or towards it)
and the size, in ulps: steps in the order of all BF16 numbers. Contexts are what both sides know:

- the old version: exponent, tensor, row, column;
- the past: how many steps ago each weight last changed (age), and which way; how much more often a row or a
  column changed in the last steps than its weights' exponents let expect (heat);
- places sent already: how much more often the weights just before this one changed (nearby).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.weight_changes import NOISE_NUMEL, Bits, noise, training
from experiments.weight_formats import FORMATS, Shapes

Array = NDArray[Any]

HEATS = 9  # classes of heat, half an octave each; the middle one is "as expected"
AGES = 8  # classes of age: 1, 2, 3–4, 5–8, 9–16, 17–32, more, never
FORGETTING = 0.9  # of a row's and a column's counts, in each step
NEARBY = 128  # weights before this one
GIVEN_EXPONENTS = "in all, given the exponent"
_TOTALS = {
    GIVEN_EXPONENTS: ("place | exponent", "direction | exponent", "size | exponent"),
    "in all, given everything": (
        "place | exponent, age, row and column heat",
        "direction | exponent, age, last direction",
        "size | exponent",
    ),
}
_SIZES = 16 + 16  # sizes up to 16 have a symbol each, then each octave has one, with plain bits behind it


def ordered(bits: Bits) -> NDArray[np.int32]:
    """BF16 numbers as integers in the same order, one apart where they are neighbours; −0 is below +0."""
    return np.where(bits < 0x8000, bits.astype(np.int32), 0x7FFF - bits.astype(np.int32))


@dataclass
class Table:
    """An adaptive code's counts, [contexts, symbols]."""

    counts: Array
    plain_bits: float = 0.0

    def add(self, contexts: Array, symbols: Array) -> None:
        size = self.counts.shape
        joint = contexts.astype(np.int64) * size[1] + symbols
        self.counts += np.bincount(joint.ravel(), minlength=size[0] * size[1]).reshape(size)

    def bits(self) -> float:
        """The code's length for all symbols added."""
        used = self.counts[:, self.counts.any(axis=0)]
        n, alphabet = torch.from_numpy(used).double(), used.shape[1]
        gamma = torch.lgamma
        half = torch.tensor(0.5).double()
        rows = (
            (gamma(n + 0.5) - gamma(half)).sum(1)
            - gamma(n.sum(1) + alphabet / 2)
            + gamma(torch.tensor(alphabet / 2).double())
        )
        return -rows.sum().item() / np.log(2) + self.plain_bits


class History:
    """What both sides remember of the versions so far, per weight, row and column."""

    def __init__(self, shapes: Shapes) -> None:
        tensors = [(s if len(s) == 2 else (1, int(np.prod(s)))) for s in shapes]
        self.numel = sum(rows * columns for rows, columns in tensors)
        self.tensor = np.repeat(np.arange(len(tensors)), [r * c for r, c in tensors])
        rows, columns, first_row, first_column = [], [], 0, 0
        for height, width in tensors:
            rows.append(np.repeat(np.arange(first_row, first_row + height), width))
            columns.append(np.tile(np.arange(first_column, first_column + width), height))
            first_row, first_column = first_row + height, first_column + width
        self.row, self.column = np.concatenate(rows), np.concatenate(columns)
        self._seen = {"row": np.zeros((2, first_row)), "column": np.zeros((2, first_column))}
        self.last_change = np.full(self.numel, -(1 << 30))
        self.went_up = np.zeros(self.numel, dtype=bool)
        self.step = 0

    def age(self) -> Array:
        ages = np.minimum(self.step - self.last_change, 1 << 20)
        classes = np.ceil(np.log2(np.maximum(ages, 1))).astype(np.int64)
        return np.where(self.last_change < 0, AGES - 1, np.minimum(classes, AGES - 2))

    def heat(self, name: str) -> Array:
        """Class of how much more often each row or column changed than expected."""
        return heat_class(*self._seen[name])

    def append(self, old: Bits, new: Bits) -> None:
        changed = old != new
        expected = expected_changes(old, changed)
        for name, seen in self._seen.items():
            groups = self.row if name == "row" else self.column
            seen *= FORGETTING
            seen[0] += np.bincount(groups, weights=changed, minlength=seen.shape[1])
            seen[1] += np.bincount(groups, weights=expected, minlength=seen.shape[1])
        where = np.flatnonzero(changed)
        self.went_up[where] = ordered(new[where]) > ordered(old[where])
        self.step += 1
        self.last_change[where] = self.step - 1


def expected_changes(old: Bits, changed: Array) -> Array:
    """Each weight's share of changes if only the exponent counted."""
    exponent = exponents(old)
    many = np.bincount(exponent, minlength=256)
    return (np.bincount(exponent, weights=changed, minlength=256) / np.maximum(many, 1))[exponent]


def exponents(bits: Bits) -> Array:
    return (bits >> 7) & 0xFF


def heat_class(observed: Array, expected: Array) -> Array:
    """log2 of observed over expected, both with one more, in half octaves, 0 to `HEATS` − 1."""
    octaves = np.log2((observed + 1) / (expected + 1))
    return np.clip(np.rint(2 * octaves) + HEATS // 2, 0, HEATS - 1).astype(np.int64)


@dataclass
class Measured:
    """Sums over the pairs of versions that were measured."""

    tables: dict[str, Table] = field(default_factory=dict)
    weights: int = 0
    changed: int = 0
    formats: dict[str, int] = field(default_factory=dict)  # bytes

    def add_given_exponents(self, old: Bits, new: Bits) -> None:
        """What the old exponents alone tell."""
        changed = old != new
        where = np.flatnonzero(changed)
        self.weights += old.size
        self.changed += where.size
        step = ordered(new[where]) - ordered(old[where])
        exponent, size = exponents(old[where]), np.abs(step)
        self._count("place | exponent", exponents(old), changed, contexts=256, symbols=2)
        away = (step > 0) != (old[where] >= 0x8000)
        self._count("direction | exponent", exponent, away, contexts=256, symbols=2)
        octave = np.floor(np.log2(size)).astype(np.int64)
        symbol = np.where(size <= 16, size - 1, 12 + octave)
        self._count("size | exponent", exponent, symbol, contexts=256, symbols=_SIZES)
        self.tables["size | exponent"].plain_bits += octave[size > 16].sum()

    def add(self, old: Bits, new: Bits, history: History) -> None:
        self.add_given_exponents(old, new)
        changed = old != new
        where = np.flatnonzero(changed)
        self._add_places(old, changed, history)
        negative, exponent = old[where] >= 0x8000, exponents(old[where])
        away = (ordered(new[where]) > ordered(old[where])) != negative
        last = np.where(history.last_change[where] < 0, 2, history.went_up[where] != negative)
        aged = (exponent * AGES + history.age()[where]) * 3 + last
        self._count(
            "direction | exponent, age, last direction", aged, away, contexts=256 * AGES * 3, symbols=2
        )

    def _add_places(self, old: Bits, changed: Array, history: History) -> None:
        exponent = exponents(old)
        expected = expected_changes(old, changed)
        sums = [np.concatenate([[0], np.cumsum(x)]) for x in (changed, expected)]
        here = np.arange(old.size)
        observed, expected_near = (s[here] - s[np.maximum(here - NEARBY, 0)] for s in sums)
        nearby = heat_class(observed, expected_near)
        row, column = history.heat("row")[history.row], history.heat("column")[history.column]
        age = history.age()
        contexts: dict[str, tuple[Array | int, int]] = {
            "exponent, tensor": (history.tensor, int(history.tensor[-1]) + 1),
            "exponent, row heat": (row, HEATS),
            "exponent, column heat": (column, HEATS),
            "exponent, row and column heat": (row * HEATS + column, HEATS**2),
            "exponent, nearby": (nearby, HEATS),
            "exponent, age": (age, AGES),
            "exponent, age, row and column heat": ((age * HEATS + row) * HEATS + column, HEATS**2 * AGES),
        }
        self._count("place", np.zeros_like(exponent), changed, contexts=1, symbols=2)
        for name, (context, many) in contexts.items():
            joint = exponent.astype(np.int64) * many + context
            self._count(f"place | {name}", joint, changed, contexts=256 * many, symbols=2)

    def _count(self, name: str, context: Array, symbol: Array, *, contexts: int, symbols: int) -> None:
        table = self.tables.setdefault(name, Table(np.zeros((contexts, symbols), dtype=np.int64)))
        table.add(context, symbol)

    def bits(self, name: str) -> float:
        """Per changed weight."""
        return self.tables[name].bits() / self.changed

    def bytes_in_all(self, label: str = GIVEN_EXPONENTS) -> float:
        """Per changed weight, of place, direction and size."""
        return sum(self.bits(part) for part in _TOTALS[label]) / 8


def measure(versions: Iterable[Bits], shapes: Shapes, *, first: int, every: int) -> Measured:
    """Code the step after every `every`-th version, from the `first` on; both sides have seen all before."""
    measured, history = Measured(), History(shapes)
    for at, (old, new) in enumerate(pairwise(versions)):
        if at >= first and (at - first) % every == 0:
            measured.add(old, new, history)
            for name, size in FORMATS.items():
                measured.formats[name] = measured.formats.get(name, 0) + size(old, new, shapes)
        history.append(old, new)
    return measured


def measure_all() -> dict[str, Measured]:
    """By what was trained and at what learning rate, one step apart and eight."""
    found = {}
    shape = [(NOISE_NUMEL >> 12, 1 << 12)]
    for lr, steps, first, every in ((1e-6, 161, 40, 120), (3e-6, 81, 80, 1)):
        versions = noise(NOISE_NUMEL, lr=lr, steps=steps)
        found[f"noise, {lr:g}"] = measure(versions, shape, first=first, every=every)
    versions = islice(noise(NOISE_NUMEL, lr=1e-6, steps=168), None, None, 8)
    found["noise, 1e-06, 8 apart"] = measure(versions, shape, first=20, every=1)
    shapes = [bits.shape for bits in next(training(lr=1e-6, steps=0)).values()]
    for lr in (1e-6, 3e-6):
        for apart, every in ((1, 4), (8, 1)):
            versions = (_flat(version) for version in islice(training(lr=lr, steps=240), None, None, apart))
            name = f"GRPO, {lr:g}" + (", 8 apart" if apart > 1 else "")
            found[name] = measure(versions, shapes, first=80 // apart, every=every)
    return found


def table(found: dict[str, Measured]) -> str:
    """In Markdown, a column for each trace."""
    rows = {"": list(found), "density, %": [f"{100 * m.changed / m.weights:.2f}" for m in found.values()]}
    for name in next(iter(found.values())).tables:
        rows[f"{name}, bits"] = [f"{m.bits(name):.2f}" for m in found.values()]
    for label in _TOTALS:
        rows[f"{label}, bytes"] = [f"{m.bytes_in_all(label):.3f}" for m in found.values()]
    for name in FORMATS:
        rows[f"{name}, bytes"] = [f"{m.formats[name] / m.changed:.2f}" for m in found.values()]
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join([lines[0], "|---" * (len(found) + 1) + "|", *lines[1:]])


def _flat(version: dict[str, Bits]) -> Bits:
    return np.concatenate([bits.ravel() for bits in version.values()])


if __name__ == "__main__":
    print(table(measure_all()))
