"""Problems written as text, each with its right answer; and our own: sums, differences, products.

" 47+85=" -> "132"        " 9-31=" -> "-22"        "64*7=" -> "448"
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    prompt: str  # as wide as every other prompt
    answer: str
    slip: str  # what a careless pupil answers; the answer itself where nothing is easily overlooked


def is_right(problem: Problem, text: str) -> bool:
    """Nothing but the answer will do."""
    return text == problem.answer


@dataclass(frozen=True)
class Problems:
    """
    held_out: for evaluation, never trained on.
    reward: of an answer, by the verifier; 1 for a right one.
    """

    train: list[Problem]
    held_out: list[Problem]
    reward: Callable[[Problem, str], float] = is_right


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
