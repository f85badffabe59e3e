"""What every rank does for a command: train the methods one after another, and let rank 0 report."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from experiments.config import RunConfig
from experiments.data import load_corpus
from experiments.loop import run_method
from experiments.methods import Method
from experiments.plots import draw_all
from experiments.report import folder_of, print_table, write
from experiments.warm_start import warm_start


def run(methods: Sequence[Method], config: RunConfig, device: torch.device, *, folder: str) -> None:
    """Every method from the same warm start on the same batches; results in runs/<name or folder>/."""
    corpus = load_corpus(config.data)
    start = warm_start(config, corpus, device)
    results = [run_method(method, config, corpus, start, device) for method in methods]
    if dist.get_rank() == 0:
        print_table(results)
        path = folder_of(config, default=folder)
        write(path, config, results)
        draw_all(results, path)
        print(f"\nwritten to {path}/")
