"""What every rank does for a command: train the runs that are still missing, and keep each as it ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from experiments.models.warm_start import warm_start
from experiments.reporting.results import Result, fields_of, of_fields, read, store
from experiments.reporting.tracking import track
from experiments.settings.config import RunConfig, TrainConfig
from experiments.settings.plan import Run
from experiments.tasks.registry import task_of
from experiments.tasks.task import Seat
from experiments.training.gathering import from_all
from experiments.training.keeping import Saving
from experiments.training.loop import train


def folder_of(config: RunConfig, *, default: str) -> Path:
    return Path("runs") / (config.name or default)


def file_of(run: Run, folder: Path) -> Path:
    return folder / "runs" / f"{run.key}.json"


def stored(run: Run, folder: Path) -> Result | None:
    """The run's result, if it has been kept and was configured as it is now."""
    try:
        result = read(file_of(run, folder))
        return result if run.same_as(result.config) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # missing or damaged
        return None


def checkpoints_of(folder: Path, run: Run | None = None) -> Path:
    """Of a single run; of a run of a comparison a folder of its own."""
    return folder / "checkpoints" / (run.key if run is not None else "")


def resumes(config: TrainConfig) -> bool:
    """A rank that torchrun has restarted goes on, asked or not."""
    return config.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def work(runs: Sequence[Run], folder: Path, device: torch.device, *, single: bool = False) -> None:
    """Every rank calls this together: whatever of `runs` is for as many ranks as there are, and missing.

    `single`: this is not a comparison, and the folder is the only run's.
    """
    seat = Seat(dist.get_rank(), dist.get_world_size(), device)
    mine = {run.key: stored(run, folder) for run in runs} if seat.rank == 0 else {}
    # The others may be on machines that do not have the files.
    found = from_all({key: result and fields_of(result) for key, result in mine.items()})[0]
    results = {key: fields and of_fields(fields) for key, fields in found.items()}
    for place, run in enumerate(runs, start=1):
        if run.ranks != seat.ranks or results[run.key] is not None:
            continue
        task = task_of(run.config, seat)
        start = warm_start(run.config, task, device)
        label = run.label
        if len({other.config.seed for other in runs}) > 1:
            label += f", seed {run.config.seed}"
        if len(runs) > 1:
            label = f"[{place}/{len(runs)}{_time_left(runs, results)}] {label}"
        checkpoints = checkpoints_of(folder, None if single else run)
        saving = Saving(folder=checkpoints, every=run.config.save_every, resume=resumes(run.config))
        result = train(run, task, start, seat, label=label, saving=saving if run.config.save_every else None)
        results[run.key] = result
        if seat.rank == 0:
            store(result, file_of(run, folder))
            track(result, folder / "tensorboard" / run.key)


def _time_left(runs: Sequence[Run], results: dict[str, Result | None]) -> str:
    """By the pace of the runs that are done; a trainer more costs a core's time more."""
    paces = [r.seconds / (r.steps * r.ranks) for r in results.values() if r is not None]
    if not paces:
        return ""
    left = sum(run.config.steps * run.ranks for run in runs if results[run.key] is None) * median(paces)
    return f", {left / 60:.0f} min left" if left >= 90 else f", {left:.0f} s left"


def results_of(runs: Sequence[Run], folder: Path) -> list[Result]:
    found = [stored(run, folder) for run in runs]
    return [result for result in found if result is not None]


def forget(runs: Sequence[Run], folder: Path) -> None:
    """Have them trained anew."""
    if dist.get_rank() == 0:
        for run in runs:
            file_of(run, folder).unlink(missing_ok=True)
    dist.barrier()
