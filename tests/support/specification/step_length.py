"""An outer step that finds its own length, as docs/outer_step.md says it: with exact fractions, element by
element, and sharing nothing with the library."""

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np


@dataclass
class StepLength:
    """All elements are looked at, as in vectors of up to 2²⁰."""

    eighths: int = -22
    last: dict[int, Fraction] = field(default_factory=dict)
    size: Fraction = Fraction(0)  # |θ|² at the start
    change: int = 0
    compared: bool = False  # in the latest round
    square: Fraction = Fraction(0)  # |g|² of the latest round

    @property
    def lr(self) -> float:
        return 7.0 * 2.0 ** (self.eighths / 8)

    def of_round(self, g: np.ndarray, theta: np.ndarray) -> float:
        """α of this round, which earlier ones have decided."""
        if not self.size:
            self.size = _square(map(Fraction, theta.tolist()))
        if self.eighths == -22 and self.square and not self.compared:
            self.eighths = 0
        self.eighths = min(max(self.eighths + self.change, -40), 88)
        while self.eighths > -40 and self.lr * float(self.square) ** 0.5 > 0.005 * float(self.size) ** 0.5:
            self.eighths -= 1
        new = {i: Fraction(x) for i, x in enumerate(g.tolist()) if x}
        both = new.keys() & self.last.keys()
        dot = sum((new[i] * self.last[i] for i in both), Fraction(0))
        self.compared = bool(both)
        squares = _square(new[i] for i in both) * _square(self.last[i] for i in both)
        cosine = float(dot) / float(squares) ** 0.5 if squares else None
        self.change = 0 if cosine is None else round(min(max(14 * (cosine + 0.08), -2), 4))
        self.square = _square(new.values())
        self.last |= new
        return self.lr


def _square(values) -> Fraction:
    return sum((x * x for x in values), Fraction(0))
