"""Successive BF16 versions of weights in training, as a trainer would publish them to inference workers.

    python -m experiments.weight_changes runs/traces

saves traces of two kinds of training for `experiments.weight_entropy` and for benchmarks of `loco.sync`:

- `noise`: Gaussian weights under Adam whose gradients are noise. Any number of weights, no structure: where
  and which way a weight changes depends only on its value and its distance from a rounding boundary.
- `training`: the repository's own GRPO on arithmetic, one trainer, with the structure of real gradients.

Masters are FP32; a version is their BF16 cast, as uint16 bit patterns.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from experiments.noise import CHUNK, SIGMA
from loco.kernels.reference import cast

Bits = NDArray[np.uint16]  # BF16 values as bit patterns

NOISE_NUMEL = 8 << 20
NOISE_STEPS = {
    1e-6: (40, 41, 48, 160, 161, 168),
    3e-6: (80, 81, 88),
}  # versions that are kept, by learning rate
# By learning rate, the first version that is kept and the number of steps after it.
TRAINING_STEPS = {1e-6: (100, 64), 3e-6: (100, 32)}


def noise(
    numel: int,
    *,
    lr: float,
    steps: int,
    seed: int = 0,
    after: int = 0,
    betas: tuple[float, float] = (0.9, 0.999),
) -> Iterator[Bits]:
    """The versions after `after`, `after` + 1, …, `steps` steps of Adam on gradients N(0, 1).

    Weights start as BF16 values, N(0, 0.02), as published ones do. Needs 14 bytes of memory per weight; equal
    arguments give equal versions.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = [
        torch.nn.Parameter(cast(torch.randn(size, generator=generator) * SIGMA, torch.bfloat16).float())
        for size in _chunk_sizes(numel)
    ]
    adams = [torch.optim.Adam([w], lr=lr, betas=betas, fused=True) for w in weights]
    gradient = torch.empty(min(CHUNK, numel))
    if after == 0:
        yield _version(weights)
    for step in range(1, steps + 1):
        for w, adam in zip(weights, adams, strict=True):
            w.grad = gradient[: w.numel()].normal_(generator=generator)
            adam.step()
            w.grad = None
        if step >= after:
            yield _version(weights)


def training(*, lr: float, steps: int, seed: int = 0, after: int = 0) -> Iterator[dict[str, Bits]]:
    """The versions after `after`, `after` + 1, …, `steps` steps of GRPO on arithmetic, by parameter name.

    One trainer with the default configuration's model, warm start, AdamW and rollouts. The learning rate
    rises from 0 in the first 20 steps. Needs no launcher, but a process that has no process group yet.
    """
    # What these import is not installed beside vLLM, where `bench sync` needs noise alone.
    from experiments.methods.methods import build
    from experiments.models.warm_start import warm_start
    from experiments.settings.config import RunConfig
    from experiments.tasks import Seat, task_of
    from experiments.training.loop import take_step
    from experiments.training.meter import Meter

    config = RunConfig(method="single", nproc=1, device="cpu", lr=lr, seed=seed)
    seat = Seat(0, 1, torch.device("cpu"))
    task = task_of(config, seat)
    model = task.model()
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model.load_state_dict(warm_start(config, task, seat.device))
    finally:
        dist.destroy_process_group()
    model.to(torch.float32)
    trainee = build(model, config)
    meter = Meter(seat.device, computed_bytes_per_step=0)
    for step in range(steps + 1):
        if step > 0:
            if (step - 1) % config.sync_every == 0:
                task.begin_round(model, (step - 1) // config.sync_every)
            take_step(step, config, task, trainee, model, meter)
        if step >= after:
            yield {name: _bits(parameter) for name, parameter in model.named_parameters()}


def save_traces(folder: Path) -> None:
    """Write every trace that this module's constants name: 320 MB, in a minute on one core.

    `noise_lr1e-06_step40.npy` is a version, [numel]. `training_lr1e-06.npy` is [versions, numel], parameters
    in the model's order, which `training.json` lists with their shapes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for lr, kept in NOISE_STEPS.items():
        versions = noise(NOISE_NUMEL, lr=lr, steps=kept[-1], after=kept[0])
        for step, version in enumerate(versions, start=kept[0]):
            if step in kept:
                np.save(folder / f"noise_lr{lr:g}_step{step}.npy", version)
    for lr, (first, steps) in TRAINING_STEPS.items():
        versions = list(training(lr=lr, steps=first + steps, after=first))
        shapes = [[name, list(bits.shape)] for name, bits in versions[0].items()]
        (folder / "training.json").write_text(json.dumps(shapes, indent=1))
        np.save(folder / f"training_lr{lr:g}.npy", np.stack([_flat(version) for version in versions]))


def _chunk_sizes(numel: int) -> list[int]:
    return [min(CHUNK, numel - start) for start in range(0, numel, CHUNK)]


def _version(weights: list[torch.nn.Parameter]) -> Bits:
    return np.concatenate([_bits(w) for w in weights])


def _bits(weights: torch.Tensor) -> Bits:
    return cast(weights.detach(), torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def _flat(version: dict[str, Bits]) -> Bits:
    return np.concatenate([bits.ravel() for bits in version.values()])


if __name__ == "__main__":
    save_traces(Path(sys.argv[1]))
