"""Stand-ins for parts of a pipeline that a test does without, and the settings of a small one."""

from collections.abc import Callable
from typing import Any

from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Notes
from experiments.settings.merging import load

# Rounds of 2 steps, 2 sites and 2 prompts: 8 prompts a round, 4 rounds.
SMALL = ["steps=8", "sync_every=2", "eval_every=8", "arithmetic.prompts=2", "lease=4"]


class Remote:
    """A method of an actor, called at once."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> Any:
        return self._method(*arguments)


class NobodysController:
    """Hears what is said and which versions are published, and forgets all other notes."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.versions: list[int] = []
        self.note, self.published, self.newer = (
            Remote(self._note),
            Remote(lambda version, part, parts: self.versions.append(version)),
            Remote(self._newer),
        )

    def _note(self, notes: Notes) -> None:
        self.said += notes.said

    def _newer(self, version: int, wait: float) -> int:
        return max(self.versions, default=0)


def config_of(*more: str) -> PipelineConfig:
    return load(PipelineConfig, [*SMALL, *more])
