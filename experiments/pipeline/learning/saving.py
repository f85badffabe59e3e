"""Checkpoints of a pipeline: each trainer saves its state, and which prompts the rounds so far have used.

There is nothing else to save. Samples that no round has used are sampled anew, versions are published anew,
and what chance decides is a function of the seed and of tickets.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import loco
from experiments.errors import ExperimentError
from experiments.pipeline.cluster import answer_of
from experiments.pipeline.config import PipelineConfig
from experiments.pipeline.diary import Diary
from experiments.settings.plan import flat

# What may be another in a run that is resumed.
_FREE = (
    *("name", "steps", "eval_every", "save_every", "resume", "timeout_s", "port"),
    *("workers", "lease", "engine", "vllm", "in_flight", "recompute_cache", "reward_processes"),
    *("reward_timeout_s", "weights", "patches", "address", "sites_on", "workers_on"),
)


def newest_round(folder: Path) -> int | None:
    """Of a run's checkpoints. None: there are none."""
    found = [int(path.name.removeprefix("round-")) for path in folder.glob("**/round-????????")]
    return max(found, default=None)


class Saving:
    """Of one trainer; those of a site that stays the same load together."""

    def __init__(
        self, config: PipelineConfig, folder: Path, controller: Any, diary: Diary, *, trainer: int
    ) -> None:
        self._trainer = trainer
        self._config, self._controller, self._diary = config, controller, diary
        self._checkpoints = loco.Checkpoints(folder)
        self._deciding = _deciding(config)

    def clear(self) -> None:
        """Remove those of an earlier run."""
        shutil.rmtree(self._checkpoints.folder, ignore_errors=True)

    def resume(self, optimizer: loco.PulseLoCo | loco.DiLoCo) -> None:
        """Go on from the newest checkpoint, if there is one: the run's, or that of a site that was lost."""
        optimizer_state: Any = optimizer
        try:
            resumed = self._checkpoints.load(optimizer_state)
        except ValueError as error:
            raise ExperimentError(f"{self._checkpoints.folder}: {error}") from error
        if resumed is None and self._config.resume and not self._config.elastic:
            raise ExperimentError(f"resume=true: there are no checkpoints in {self._checkpoints.folder}")
        if resumed is None:
            return
        then, now = resumed.extra["config"], self._deciding
        differing = [key for key in now | then if now.get(key) != then.get(key)]
        if differing:
            said = ", ".join(f"{key}: {then.get(key)} then, {now.get(key)} now" for key in differing)
            raise ExperimentError(
                f"{self._checkpoints.folder} is of a run that was configured otherwise ({said}): go on with "
                "the same settings, or give this run another name="
            )
        answer_of(self._controller.resume.remote(resumed.extra["version"], resumed.extra["tickets"]))

    def after_round(self, optimizer: loco.PulseLoCo | loco.DiLoCo, version: int) -> None:
        every = self._config.save_every
        if not every or (version - 1) % every or not optimizer.round:
            return
        with self._diary.doing("saving", version=version):
            tickets = answer_of(self._controller.used.remote(self._trainer, version))
            optimizer_state: Any = optimizer
            self._checkpoints.save(
                optimizer_state, {"config": self._deciding, "tickets": tickets, "version": version}
            )

    def close(self) -> None:
        self._checkpoints.close()


def _deciding(config: PipelineConfig) -> dict[str, Any]:
    settings = flat(json.loads(json.dumps(dataclasses.asdict(config))))
    deciding = {key: value for key, value in settings.items() if key.partition(".")[0] not in _FREE}
    for name in ("file", "held_out_file"):
        path = getattr(config.prompts, name)
        if path is not None:
            deciding[f"what is in prompts.{name}"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return deciding
