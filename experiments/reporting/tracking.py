"""Curves for TensorBoard, written beside the results:

    tensorboard --logdir runs

Another tracker is a function more: it is given every finished run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from experiments.errors import missing_extra
from experiments.reporting.results import Result

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise missing_extra(error) from None

Tracker = Callable[[Result, Path], None]


def writer_in(folder: Path) -> SummaryWriter:
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier training: TensorBoard would draw both as one
    return SummaryWriter(str(folder))


def tensorboard(result: Result, folder: Path) -> None:
    """Scores and rewards by step, and what each round sent, withheld and left to be seen."""
    with writer_in(folder) as writer:
        for point in result.evaluations:
            for name, score in point.scores.items():
                writer.add_scalar(f"score/{name}", score, point.step)
            writer.add_scalar("bytes/sent per rank", point.sent_bytes, point.step)
        for round, reward in enumerate(result.rewards):
            writer.add_scalar("reward", reward, round * result.config["sync_every"])
        for one in result.rounds:
            for name, value in (
                ("density", one.density),
                ("union density", one.union_density),
                ("residual norm", one.residual_norm),
                ("age of the withheld", one.age),
                ("payload bytes", one.payload_bytes),
            ):
                if value is not None:
                    writer.add_scalar(f"round/{name}", value, one.step)


TRACKERS: list[Tracker] = [tensorboard]


def track(result: Result, folder: Path) -> None:
    for tracker in TRACKERS:
        tracker(result, folder)
