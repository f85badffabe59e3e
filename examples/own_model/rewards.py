"""Rewards are functions of the prompt, the completion and the prompt's row. An environment replies to each
completion, and says when it has heard enough."""

from typing import Any


def wanted(prompt: list[dict[str, str]], completion: str, row: dict[str, Any]) -> float:
    """A model that knows nothing learns first to say letters, then the wanted one."""
    letters = sum(letter.islower() for letter in completion) / max(1, len(completion))
    return 0.5 * letters + 0.5 * completion.count(row["letter"]) / max(1, len(completion))


class Tries:
    """An answer without the letter is told so, and may be given once more, for half of the reward."""

    def reset(self, row: dict[str, Any]) -> None:
        self.row, self.tries = row, 0

    def step(self, completion: str) -> tuple[str | None, float]:
        self.tries += 1
        if self.row["letter"] not in completion and self.tries == 1:
            return f"no, say {self.row['letter']}", 0.0
        return None, wanted([], completion, self.row) / self.tries
