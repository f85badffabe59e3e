"""An outer step that finds its own length, as docs/outer_step.md says it: with exact fractions, element by
element, and sharing nothing with the library."""

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np


@dataclass
class StepLength:
    """All elements are looked at, as in vectors of up to 2²⁰."""

    eighths: int = 0
    held: int = 0
    compared: bool = False
    turned: bool = False
    rounds: list[dict[int, Fraction]] = field(default_factory=list)  # each round's g, where it is not 0
    size: Fraction = Fraction(0)  # |θ|² at the start

    @property
    def lr(self) -> float:
        return 2.0 ** (self.eighths / 8)

    def of_round(self, g: np.ndarray, theta: np.ndarray) -> float:
        """α of this round, which earlier ones have decided."""
        if not self.size:
            self.size = _square(map(Fraction, theta.tolist()))
        if self.rounds and self.rounds[-1]:
            self._move()
        self.rounds.append({i: Fraction(x) for i, x in enumerate(g.tolist()) if x})
        return self.lr

    def _move(self) -> None:
        latest, last, *earlier = [*self.rounds[::-1], {}]
        square = _square(latest.values())
        spread = sum((_square(one.values()) / 4**age for age, one in enumerate(earlier)), Fraction(0))
        longest = 0.005 * float(self.size) ** 0.5 * 2 ** (max(0, self.held - 6) / 8)
        size, wanted, k = float(square) ** 0.5, self.eighths, 0
        if spread:
            along = sum((_dot(latest, one) / 2**age for age, one in enumerate(earlier)), Fraction(0))
            cosine = float(along) / float(square * spread) ** 0.5
            if last:
                beside = float(_dot(latest, last)) / float(square * _square(last.values())) ** 0.5
                cosine = min(cosine, beside + 0.06)
            most = 8 if self.lr * size < longest / 4 else 4
            most = 1 if self.turned else most
            k = min(round(50 * cosine), most) if cosine > 0 else max(round(100 * cosine), -8)
            self.compared, self.turned = True, self.turned or k < -1
            wanted = min(max(self.eighths + k, -16), 112)
        elif not self.compared:
            fitting = [e for e in range(113) if 2 ** (e / 8) * size <= longest / 16]
            wanted = max(fitting, default=0)
        self.eighths = wanted
        while self.eighths > -16 and self.lr * size > longest:
            self.eighths -= 1
        if k > 0 and self.eighths < wanted:
            self.held = min(self.held + 1, 22)


def _dot(one: dict[int, Fraction], other: dict[int, Fraction]) -> Fraction:
    return sum((one[i] * other[i] for i in one.keys() & other.keys()), Fraction(0))


def _square(values) -> Fraction:
    return sum((x * x for x in values), Fraction(0))
