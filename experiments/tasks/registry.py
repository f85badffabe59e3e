"""The task that a configuration asks for."""

from __future__ import annotations

from experiments.settings.config import RunConfig
from experiments.tasks.task import Seat, Task
from experiments.tasks.text import Text
from experiments.tasks.verified import Verified


def task_of(config: RunConfig, seat: Seat) -> Task:
    return (Text if config.task == "text" else Verified)(config, seat)
