"""Run methods side by side: equal steps, prompts, seeds and start; a table, plots and a report to send on.

    python -m experiments.compare                          what `make demo` runs, for more steps
    python -m experiments.compare preset=paper             the full one, behind docs/results.md
    python -m experiments.compare steps=320 lr=1e-6 name=slower
    torchrun --nproc-per-node 4 -m experiments.compare     the same, launched by torchrun

Results go to runs/<name>/, by default runs/compare/; presets have names. Each run is kept when it ends: the
same command again goes on where it was stopped, and trains only what is missing or was changed.
"""

from __future__ import annotations

import sys

import torch

from experiments.errors import ExperimentError
from experiments.processes import launch
from experiments.report import write_all
from experiments.settings.config import CompareConfig
from experiments.settings.plan import Run, runs_of
from experiments.tasks.registry import task_of
from experiments.tasks.task import Seat
from experiments.training import session


def prepare(config: CompareConfig) -> None:
    runs = runs_of(config)
    for single in {(run.config.task, run.config.text): run.config for run in runs}.values():
        task_of(single, Seat(0, 1, torch.device("cpu")))  # reads what it needs


def missing(config: CompareConfig) -> list[Run]:
    return [run for run in runs_of(config) if session.stored(run, _folder(config)) is None]


def worlds(config: CompareConfig) -> list[int]:
    """Each number of trainers is one launch, the usual one first."""
    wanted = missing(config)
    done = len(runs_of(config)) - len(wanted)
    if done:
        print(
            f"{done} of {done + len(wanted)} runs are there already, in {_folder(config)}/", file=sys.stderr
        )
    return sorted({run.ranks for run in wanted}, key=lambda ranks: (ranks != config.nproc, ranks))


def work(config: CompareConfig, device: torch.device) -> None:
    """What every rank does."""
    session.work(runs_of(config), _folder(config), device)


def finish(config: CompareConfig) -> None:
    left = missing(config)
    if left:
        sizes = " and ".join(sorted({str(run.ranks) for run in left}))
        raise ExperimentError(
            f"{len(left)} runs need {sizes} trainers, and torchrun launched {config.nproc}: what was run is "
            f"kept; let `python -m experiments.compare` launch the rest"
        )
    write_all(_folder(config), config, session.results_of(runs_of(config), _folder(config)))


def _folder(config: CompareConfig) -> session.Path:
    return session.folder_of(config, default="compare")


PROGRAM = launch.Program(
    module="experiments.compare",
    about=__doc__ or "",
    config=CompareConfig,
    prepare=prepare,
    worlds=worlds,
    work=work,
    finish=finish,
    folder=_folder,
    interrupted=lambda _: "finished runs are kept: the same command goes on from there",
)

if __name__ == "__main__":
    sys.exit(launch.main(PROGRAM))
