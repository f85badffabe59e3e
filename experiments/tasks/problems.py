"""Problems written as text; and our own, each with its right answer: sums, differences, products.

" 47+85=" -> "132"        " 9-31=" -> "-22"        "64*7=" -> "448"
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    prompt: str  # for the built-in model as wide as every other prompt
    answer: str = ""  # where it is known
    slip: str = ""  # what a careless pupil answers; the answer itself where nothing is easily overlooked
    row: dict[str, Any] = field(default_factory=dict, compare=False)  # of the file that it comes from


def is_right(problem: Problem, text: str) -> bool:
    """Nothing but the answer will do."""
    return text == problem.answer


@dataclass(frozen=True)
class Problems:
    """
    held_out: for evaluation, never trained on.
    reward: of an answer, by the verifier; 1 for a right one.
    answers_known: if not, only the reward tells how good an answer is.
    """

    train: list[Problem]
    held_out: list[Problem]
    reward: Callable[[Problem, str], float] = is_right
    answers_known: bool = True


def arithmetic(*, largest: int, held_out: int) -> Problems:
    """All problems with operands below `largest` (a product's second one below 10), in an order that looks
    random and is the same whatever the run's seed. A slip is what comes of forgetting a carry."""
    width = len(f"{largest - 1}+{largest - 1}=")
    found = [
        Problem(f"{a}{sign}{b}=".rjust(width), str(answer), str(answer - 10 if answer >= 10 else answer))
        for a in range(largest)
        for b in range(largest)
        for sign, answer in (("+", a + b), ("-", a - b), ("*", a * b))
        if sign != "*" or b < 10
    ]
    random.Random(0).shuffle(found)
    return Problems(found[held_out:], found[:held_out])
