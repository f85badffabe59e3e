"""Train with one method, one rank per process:

    torchrun --nproc-per-node 4 -m experiments.train method=pulseloco
    python -m experiments.train nproc=4 method=diloco steps=320

Any key of the configuration can follow as key=value; preset=NAME reads configs/NAME.yaml first.
Results go to runs/<name>/; the name is the method's unless name= is given. save_every=4 keeps checkpoints
there, every 4 rounds; resume=true goes on from them (without it a folder that holds some is refused), and
ranks that torchrun restarts do so by themselves:

    torchrun --nproc-per-node 4 --max-restarts 3 -m experiments.train save_every=4
"""

from __future__ import annotations

import sys

import torch

from experiments.errors import ExperimentError
from experiments.processes import launch
from experiments.report import write_all
from experiments.settings.config import TITLES, TrainConfig, check_world
from experiments.settings.plan import Run
from experiments.settings.rounds import resolved
from experiments.tasks.registry import task_of
from experiments.tasks.task import Seat
from experiments.training import session
from experiments.training.keeping import newest_round


def run_of(config: TrainConfig) -> Run:
    return Run(TITLES[config.method], resolved(config))


def prepare(config: TrainConfig) -> None:
    assert config.nproc is not None
    line = f"nproc={2 * config.ranks_per_site}` or `torchrun --nproc-per-node {2 * config.ranks_per_site} …"
    check_world(config, config.nproc, launch_line=line)
    kept = _kept(config)
    if kept is not None and not session.resumes(config):
        raise ExperimentError(
            f"{session.checkpoints_of(_folder(config))} holds round {kept} of a run, which starting anew "
            "would remove: add resume=true to go on from there, give this run another name=, or delete the "
            "folder"
        )
    task_of(config, Seat(0, 1, torch.device("cpu")))  # reads what it needs


def work(config: TrainConfig, device: torch.device) -> None:
    """What every rank does."""
    folder = _folder(config)
    session.forget([run_of(config)], folder)
    session.work([run_of(config)], folder, device, single=True)


def finish(config: TrainConfig) -> None:
    folder = _folder(config)
    write_all(folder, config, session.results_of([run_of(config)], folder))


def interrupted(config: TrainConfig) -> str:
    if _kept(config) is None:
        return launch.NOTHING_WRITTEN
    return f"{launch.NOTHING_WRITTEN}; resume=true goes on from {session.checkpoints_of(_folder(config))}"


def _kept(config: TrainConfig) -> int | None:
    """The round of the newest checkpoint that lies where this run saves."""
    if not config.save_every:
        return None
    return newest_round(session.checkpoints_of(_folder(config)), sync_every=config.sync_every)


def _folder(config: TrainConfig) -> session.Path:
    return session.folder_of(config, default=config.method)


PROGRAM = launch.Program(
    module="experiments.train",
    about=__doc__ or "",
    config=TrainConfig,
    prepare=prepare,
    worlds=lambda config: [config.nproc or 1],
    work=work,
    finish=finish,
    interrupted=interrupted,
    folder=_folder,
)

if __name__ == "__main__":
    sys.exit(launch.main(PROGRAM))
