"""Train with one method, one rank per process:

    torchrun --nproc-per-node 4 -m experiments.train method=pulseloco
    python -m experiments.train nproc=4 method=diloco steps=320

Any key of the configuration can follow as key=value; config=NAME reads configs/NAME.yaml first.
Results go to runs/<name>/; the name is the method's unless name= is given.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from experiments import launch
from experiments.config import TrainConfig
from experiments.data import load_corpus
from experiments.loop import run_method
from experiments.methods import Method
from experiments.plots import draw_all
from experiments.report import folder_of, print_table, write
from experiments.warm_start import warm_start


def work(config: TrainConfig, device: torch.device) -> None:
    """What every rank does."""
    corpus = load_corpus(config.data)
    start = warm_start(config, corpus, device)
    method = Method(name=config.method, outer_lr=config.outer_lr, outer_momentum=config.outer_momentum)
    result = run_method(method, config, corpus, start, device)
    if dist.get_rank() == 0:
        print_table([result])
        folder = folder_of(config, default=config.method)
        write(folder, config, [result])
        draw_all([result], folder)
        print(f"\nwritten to {folder}/")


PROGRAM = launch.Program(
    module="experiments.train",
    about=__doc__ or "",
    config=TrainConfig,
    prepare=lambda config: load_corpus(config.data),
    work=work,
)

if __name__ == "__main__":
    sys.exit(launch.main(PROGRAM))
