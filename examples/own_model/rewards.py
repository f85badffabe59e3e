"""Rewards are functions of the prompt, the completion and the prompt's row."""

from typing import Any


def wanted(prompt: list[dict[str, str]], completion: str, row: dict[str, Any]) -> float:
    """A model that knows nothing learns first to say letters, then the wanted one."""
    letters = sum(letter.islower() for letter in completion) / max(1, len(completion))
    return 0.5 * letters + 0.5 * completion.count(row["letter"]) / max(1, len(completion))
