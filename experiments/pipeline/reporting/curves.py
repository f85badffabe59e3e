"""What the parts do, written for TensorBoard during the run:

tensorboard --logdir runs
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from experiments.errors import missing_extra
from experiments.pipeline.reporting.diary import Notes

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise missing_extra(error) from None


class Curves:
    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # TensorBoard would draw an earlier run and this one as one
        self._writer = SummaryWriter(str(folder))
        self._leases: Counter[str] = Counter()  # by worker

    def __enter__(self) -> Curves:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()

    def add(self, notes: Notes, version: int) -> None:
        """
        Args:
            version: the trainers' current one.
        """
        for event in notes.events:
            self._add_event(event)
        tokens = sum(notes.staleness.values())
        if tokens:
            age = sum(age * count for age, count in notes.staleness.items()) / tokens
            self._writer.add_scalar("staleness of tokens", age, version)
        self._writer.flush()

    def _add_event(self, event: dict[str, Any]) -> None:
        part, what, seconds = event["part"], event["what"], event["to"] - event["from"]

        def put(name: str, value: float, step: int) -> None:
            self._writer.add_scalar(name, value, step, walltime=event["to"])

        if what == "evaluating":
            for name, score in event.get("scores", {}).items():
                put(f"score/{name}", score, event["step"])
        elif what == "sampling":
            self._leases[part] += 1
            put(f"tokens per second/{part}", event["tokens"] / max(seconds, 1e-9), self._leases[part])
        elif what == "writing" and "bytes" in event:
            put("bytes/of a version", event["bytes"], event["version"])
        elif "step" in event:
            put(f"seconds of {what}/{part}", seconds, event["step"])
