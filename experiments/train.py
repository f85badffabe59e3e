"""Train with one method, one rank per process:

    torchrun --nproc-per-node 4 -m experiments.train method=pulseloco
    python -m experiments.train nproc=4 method=diloco steps=320

Any key of the configuration can follow as key=value; config=NAME reads configs/NAME.yaml first.
Results go to runs/<name>/; the name is the method's unless name= is given.
"""

from __future__ import annotations

import sys

import torch

from experiments import launch, session
from experiments.config import TrainConfig
from experiments.data import load_corpus
from experiments.methods import Method


def work(config: TrainConfig, device: torch.device) -> None:
    """What every rank does."""
    method = Method(name=config.method, outer_lr=config.outer_lr, outer_momentum=config.outer_momentum)
    session.run([method], config, device, folder=config.method)


PROGRAM = launch.Program(
    module="experiments.train",
    about=__doc__ or "",
    config=TrainConfig,
    prepare=lambda config: load_corpus(config.data),
    work=work,
)

if __name__ == "__main__":
    sys.exit(launch.main(PROGRAM))
