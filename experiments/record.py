"""Record what the sites hold and send in a late round of PULSELoCo, for measurements of the wire:

    python -m experiments.record lr=1e-6
    python -m experiments.record lr=3e-6 outer_lr=1 outer_momentum=0
    torchrun --nproc-per-node 4 -m experiments.record      the same, launched by torchrun

Trains as experiments.train does, up to the round that would follow the last step, and records θ and m before
it and every site's entries: all of it in runs/recorded/, and an excerpt (the same share of every parameter)
in experiments/results/recorded/. Any key of the configuration can follow as key=value.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import loco
from experiments import launch
from experiments.config import RecordConfig, check_world
from experiments.gathering import from_all
from experiments.loop import warm_up
from experiments.methods import build
from experiments.progress import Progress
from experiments.recording import Recording, middles
from experiments.tasks import Seat, Task, task_of
from experiments.warm_start import warm_start
from loco import kernels
from loco.kernels import Entries


def work(config: RecordConfig, device: torch.device) -> None:
    """What every rank does."""
    seat = Seat(dist.get_rank(), dist.get_world_size(), device)
    task = task_of(config, seat)
    model = task.model()
    model.load_state_dict(warm_start(config, task, device))
    model.to(device)
    optimizer = build(model, config).optimizer
    assert isinstance(optimizer, loco.PulseLoCo)
    train(model, optimizer, task, config)
    recording = record(optimizer, config)
    if seat.rank == 0:
        keep(recording, optimizer.outer_state.parameters.params, config)


def train(model: nn.Module, optimizer: loco.PulseLoCo, task: Task, config: RecordConfig) -> None:
    """All steps, and all rounds but the one after the last step."""
    with Progress("pulseloco", total=config.steps, shown=dist.get_rank() == 0) as progress:
        for step in range(1, config.steps + 1):
            if optimizer.local_step == 0:
                task.begin_round(model, optimizer.round)
            warm_up(optimizer, step, config)
            optimizer.zero_grad()
            task.loss(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            (optimizer if step < config.steps else optimizer.inner).step()
            progress.advance()


def record(optimizer: loco.PulseLoCo, config: RecordConfig) -> Recording:
    """Every rank calls this together; rank 0 gets all sites' entries."""
    outer = optimizer.outer_state
    assert outer.gate is not None
    with outer.parameters.pieces(outer.start, outer.stop) as weights:
        mine = kernels.encode(outer.anchor, weights, outer.residual, outer.gate).entries.to("cpu")
    sites = [Entries(*parts) for parts in from_all(tuple(mine))]
    about = {
        "round": outer.rounds_done + 1,
        "sites": len(sites),
        "lr": config.lr,
        "outer_lr": config.outer_lr,
        "outer_momentum": config.outer_momentum,
        "sync_every": config.sync_every,
        "seed": config.seed,
        "gate": dataclasses.asdict(outer.gate) | {"dtype": str(outer.gate.dtype).removeprefix("torch.")},
    }
    momentum = None if outer.momentum is None else outer.momentum.cpu()
    return Recording(about, outer.anchor.cpu(), momentum, sites)


def keep(recording: Recording, params: list[torch.Tensor], config: RecordConfig) -> None:
    """Write the recording and its excerpt, and say what is in them."""
    name = config.name or f"lr{config.lr:g}-alpha{config.outer_lr:g}-mu{config.outer_momentum:g}"
    runs = list(middles([p.numel() for p in params], config.excerpt))
    for kept, folder in (
        (recording, Path("runs/recorded")),
        (recording.excerpt(runs), Path(config.excerpts)),
    ):
        path = folder / f"{name}.npz"
        kept.save(path)
        entries = sum(site.values.numel() for site in kept.sites) / len(kept.sites)
        print(
            f"{path}: {path.stat().st_size:,} bytes, round {kept.about['round']}, "
            f"{kept.anchor.numel():,} elements, density {entries / kept.anchor.numel():.2%}"
        )


def prepare(config: RecordConfig) -> None:
    assert config.nproc is not None
    check_world(config, config.nproc, launch_line="nproc=4")
    task_of(config, Seat(0, 1, torch.device("cpu")))  # reads what it needs


PROGRAM = launch.Program(
    module="experiments.record",
    about=__doc__ or "",
    config=RecordConfig,
    prepare=prepare,
    worlds=lambda config: [config.nproc or 1],
    work=work,
)

if __name__ == "__main__":
    sys.exit(launch.main(PROGRAM))
