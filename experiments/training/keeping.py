"""A run's checkpoints, of every method: what a run that is resumed needs to end as if it had never stopped.

Tasks are pure functions of (seed, rank, step), so at a round's end there is no state but the optimizer's, the
weights, and what has been measured so far.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import loco
from experiments.errors import ExperimentError
from experiments.methods.methods import Trainee
from experiments.settings.plan import Run
from experiments.tasks.task import Seat
from experiments.training.gathering import from_all
from experiments.training.meter import Measured, Meter


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Where and how often a run is saved, and whether it goes on from there."""

    folder: Path
    every: int  # rounds
    resume: bool


def newest_round(folder: Path, *, sync_every: int) -> int | None:
    """Of the checkpoints there, as their names have it; None: there are none."""
    found = [int(path.name[6:14]) for path in folder.glob("round-????????*")]
    found += [int(path.name[5:13]) // sync_every for path in folder.glob("step-????????.*.pt")]
    return max(found, default=None)


class Keeper:
    """Saves a run at the ends of rounds, and takes it up again. Every rank builds it and calls it together.

    Without `saving.resume` it removes what is there.
    """

    def __init__(
        self, saving: Saving, run: Run, trainee: Trainee, model: nn.Module, seat: Seat, meter: Meter
    ) -> None:
        self._saving, self._run = saving, run
        self._meter, self._observer = meter, trainee.observer
        if not saving.resume:
            if int(os.environ.get("LOCAL_RANK", "0")) == 0:
                shutil.rmtree(saving.folder, ignore_errors=True)
            dist.barrier()
        self._optimizer = trainee.optimizer
        by_loco = isinstance(self._optimizer, loco.PulseLoCo | loco.DiLoCo)
        # Both have the same methods, each for its own kind of optimizer.
        self._files: Any = (
            loco.Checkpoints(saving.folder) if by_loco else _RankFiles(saving.folder, model, seat)
        )

    def resume(self) -> bool:
        """Go on where the run was saved, if it was, and say whether."""
        if not self._saving.resume:
            return False
        try:
            kept = self._files.load(self._optimizer)
        except ValueError as error:
            raise ExperimentError(f"{self._saving.folder}: {error}") from error
        if isinstance(kept, loco.Resumed):
            kept = kept.extra
        if kept is None:
            self._say(f"no checkpoints in {self._saving.folder}: starts anew")
            return False
        if differing := self._run.differing(kept["config"]):
            raise ExperimentError(
                f"{self._saving.folder} is of a run that was configured otherwise ({', '.join(differing)}): "
                f"go on with the same settings, or give this run another name="
            )
        self._meter.found = Measured(**kept["measured"])
        if self._observer is not None:
            self._observer.resume(kept["seen"])
        self._say(f"goes on from round {self._meter.found.step // self._run.config.sync_every}")
        return True

    def _say(self, sentence: str) -> None:
        if dist.get_rank() == 0:
            print(f"{self._run.label}: {sentence}", file=sys.stderr, flush=True)

    def after_step(self) -> None:
        if self._meter.found.step % (self._saving.every * self._run.config.sync_every):
            return
        extra = {
            "config": self._run.stored(),
            "measured": dataclasses.asdict(self._meter.found),
            "seen": self._observer.state() if self._observer is not None else None,
        }
        self._files.save(self._optimizer, extra)

    def close(self) -> None:
        if isinstance(self._files, loco.Checkpoints):
            self._files.close()


class _RankFiles:
    """One trainer's, or DDP's, whose state is a plain optimizer's: a file for each rank, the two newest."""

    def __init__(self, folder: Path, model: nn.Module, seat: Seat) -> None:
        self._folder, self._model, self._rank = folder, model, seat.rank

    def save(self, optimizer: torch.optim.Optimizer, extra: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(extra["measured"]["step"])
        unfinished = path.with_suffix(".partial")
        state = {"optimizer": optimizer.state_dict(), "model": self._model.state_dict()}
        with unfinished.open("wb") as file:
            torch.save(state | {"extra": extra}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        dist.barrier()  # all ranks have this one before any of them removes an older
        for old in self._steps()[:-2]:
            self._path(old).unlink()

    def load(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        found: list[list[int]] = from_all(self._steps())
        # All ranks have a first one before any has a second: who has none then is not of that run.
        if [] in found and max(map(len, found)) > 1:
            raise ExperimentError(
                f"{self._folder} holds no checkpoints of rank {found.index([])}: go on with the same "
                "nproc, and each rank where it was, or give this run another name="
            )
        for step in sorted(set.intersection(*map(set, found)), reverse=True):
            try:
                state = torch.load(self._path(step), map_location="cpu", weights_only=True)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
                state = None
            if all(from_all(state is not None)):
                assert state is not None
                self._model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                return state["extra"]
        return None

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}.rank-{self._rank:05d}.pt"

    def _steps(self) -> list[int]:
        return sorted(int(p.name[5:13]) for p in self._folder.glob(f"step-*.rank-{self._rank:05d}.pt"))
