"""What a configuration requires of its values, in sentences."""

from __future__ import annotations

import difflib
from typing import Any

from experiments.errors import ExperimentError


def require(holds: bool, sentence: str) -> None:
    if not holds:
        raise ExperimentError(sentence)


def at_least(least: int, config: Any, *names: str, part: str = "") -> None:
    for name in names:
        value = getattr(config, name)
        require(value is None or value >= least, f"{part}{name} must be at least {least}, got {value}")


def one_of(config: Any, name: str, known: tuple[str, ...], *, part: str = "") -> None:
    value = getattr(config, name)
    require(value in known, f"unknown {part}{name} '{value}'{nearest(value, known)}")


def nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known are {', '.join(known)}"
