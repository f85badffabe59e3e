"""Train with one method, one rank per process:

    torchrun --nproc-per-node 4 -m experiments.train method=pulseloco
    python -m experiments.train nproc=4 method=diloco steps=320

Any key of the configuration can follow as key=value; preset=NAME reads configs/NAME.yaml first.
Results go to runs/<name>/; the name is the method's unless name= is given.
"""

from __future__ import annotations

import sys

import torch

from experiments import launch, session
from experiments.config import TITLES, TrainConfig, check_world, resolved
from experiments.plan import Run
from experiments.report import write_all
from experiments.tasks import Seat, task_of


def run_of(config: TrainConfig) -> Run:
    return Run(TITLES[config.method], resolved(config))


def prepare(config: TrainConfig) -> None:
    assert config.nproc is not None
    line = f"nproc={2 * config.ranks_per_site}` or `torchrun --nproc-per-node {2 * config.ranks_per_site} …"
    check_world(config, config.nproc, launch_line=line)
    task_of(config, Seat(0, 1, torch.device("cpu")))  # reads what it needs


def work(config: TrainConfig, device: torch.device) -> None:
    """What every rank does."""
    folder = session.folder_of(config, default=config.method)
    session.forget([run_of(config)], folder)
    session.work([run_of(config)], folder, device)


def finish(config: TrainConfig) -> None:
    folder = session.folder_of(config, default=config.method)
    write_all(folder, config, session.results_of([run_of(config)], folder))


PROGRAM = launch.Program(
    module="experiments.train",
    about=__doc__ or "",
    config=TrainConfig,
    prepare=prepare,
    worlds=lambda config: [config.nproc or 1],
    work=work,
    finish=finish,
)

if __name__ == "__main__":
    sys.exit(launch.main(PROGRAM))
