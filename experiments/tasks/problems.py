"""Sums, differences and products written as text, each with its one right answer.

    " 47+85=" -> "132"        " 9-31=" -> "-22"        "64*7=" -> "448"

All problems with operands below `largest` (a product's second one below 10) are put in a fixed order that
looks random; the first `held_out` of them are for evaluation and never trained on.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    prompt: str  # as wide as every other prompt
    answer: str
    slip: str  # what comes of forgetting a carry; the answer itself where there is none to forget


@dataclass(frozen=True)
class Problems:
    train: list[Problem]
    held_out: list[Problem]


def make_problems(*, largest: int, held_out: int) -> Problems:
    """Every problem there is, split. The same whatever the run's seed."""
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


def is_right(problem: Problem, text: str) -> bool:
    """The verifier: nothing but the answer will do."""
    return text == problem.answer
