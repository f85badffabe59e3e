"""Run the methods side by side: equal steps, data, seeds and start; one table, and plots.

    python -m experiments.compare                          what `make demo` runs
    python -m experiments.compare steps=320 lr=1e-6 name=slower
    torchrun --nproc-per-node 4 -m experiments.compare     the same, launched by torchrun

DDP, DiLoCo and PULSELoCo with the configured outer optimizer, then DiLoCo and PULSELoCo once more with
plain averaging (outer_lr 1, outer_momentum 0). Results go to runs/<name>/, by default runs/compare/.
"""

from __future__ import annotations

import sys

import torch

from experiments import launch, session
from experiments.config import CompareConfig
from experiments.data import load_corpus
from experiments.methods import Method


def methods_of(config: CompareConfig) -> list[Method]:
    """What is compared, in the order of the table."""
    outers = [(config.outer_lr, config.outer_momentum)]
    if config.plain_averaging and (1.0, 0.0) not in outers:
        outers.append((1.0, 0.0))
    return [
        Method(name=name, outer_lr=lr, outer_momentum=momentum)
        for lr, momentum in outers
        for name in config.methods
        if name != "ddp" or (lr, momentum) == outers[0]  # DDP has no outer optimizer
    ]


def work(config: CompareConfig, device: torch.device) -> None:
    """What every rank does."""
    session.run(methods_of(config), config, device, folder="compare")


PROGRAM = launch.Program(
    module="experiments.compare",
    about=__doc__ or "",
    config=CompareConfig,
    prepare=lambda config: load_corpus(config.data),
    work=work,
)

if __name__ == "__main__":
    sys.exit(launch.main(PROGRAM))
