"""Record what the sites hold and send in a late round of PULSELoCo, for measurements of the wire:

    python -m experiments.record lr=1e-6
    python -m experiments.record lr=3e-6 outer_lr=1 outer_momentum=0
    torchrun --nproc-per-node 4 -m experiments.record      the same, launched by torchrun

Trains as experiments.train does, and records the last round: θ and m before it and every site's entries. All
of it goes to runs/recorded/, and an excerpt (the same share of every parameter) to
experiments/results/recorded/. Any key of the configuration can follow as key=value.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import loco
from experiments.methods.methods import build
from experiments.models.warm_start import warm_start
from experiments.processes import launch
from experiments.processes.progress import Progress
from experiments.recording import Recording, middles
from experiments.settings.config import RecordConfig, check_world
from experiments.tasks import Seat, task_of
from experiments.training.gathering import from_all
from experiments.training.loop import take_step
from experiments.training.meter import Meter
from loco.kernels import Entries


def work(config: RecordConfig, device: torch.device) -> None:
    """What every rank does."""
    seat = Seat(dist.get_rank(), dist.get_world_size(), device)
    task = task_of(config, seat)
    model = task.model()
    model.load_state_dict(warm_start(config, task, device))
    model.to(device)
    trainee, meter = build(model, config), Meter(device, computed_bytes_per_step=0)
    optimizer = trainee.optimizer
    assert isinstance(optimizer, loco.PulseLoCo)
    found: dict[str, Any] = {}

    def capture(progress: loco.RoundProgress) -> None:
        if progress.phase == "encoded" and progress.number == config.steps // config.sync_every:
            assert progress.entries is not None
            state = progress.state
            found["entries"] = [part if part is None else part.clone() for part in progress.entries.to("cpu")]
            found["anchor"] = state.anchor.cpu().clone()
            found["momentum"] = None if state.momentum is None else state.momentum.cpu().clone()

    optimizer.register_round_hook(capture)
    with Progress("pulseloco", total=config.steps, shown=seat.rank == 0) as progress:
        for step in range(1, config.steps + 1):
            if optimizer.local_step == 0:
                task.begin_round(model, optimizer.round)
            take_step(step, config, task, trainee, model, meter)
            progress.advance()
    sites = [Entries(*parts) for parts in from_all(found["entries"])]
    if seat.rank == 0:
        recording = Recording(_about(optimizer, config), found["anchor"], found["momentum"], sites)
        keep(recording, [p.numel() for p in optimizer.outer_state.parameters.params], config)


def _about(optimizer: loco.PulseLoCo, config: RecordConfig) -> dict[str, Any]:
    gate = optimizer.outer_state.gate
    assert gate is not None
    names = ("lr", "outer_lr", "outer_momentum", "sync_every", "seed")
    return {
        "round": optimizer.round,
        "sites": dist.get_world_size(),
        **{name: getattr(config, name) for name in names},
        "gate": dataclasses.asdict(gate) | {"dtype": str(gate.dtype).removeprefix("torch.")},
    }


def keep(recording: Recording, sizes: list[int], config: RecordConfig) -> None:
    """Write the recording and its excerpt, and say what is in them."""
    name = config.name or f"lr{config.lr:g}-alpha{config.outer_lr:g}-mu{config.outer_momentum:g}"
    excerpt = recording.excerpt(list(middles(sizes, config.excerpt)))
    for kept, folder in ((recording, Path("runs/recorded")), (excerpt, Path(config.excerpts))):
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
