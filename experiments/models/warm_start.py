"""The trained model that every method starts from: trained once, then kept in a file.

It stands in for a published checkpoint, so its weights are BF16 values, as published ones are. The default
configuration's came with the code, in experiments/warm_starts/. To make it anew (four minutes on two cores)
delete it, and then:

    python -m experiments.train nproc=2 steps=8 eval_every=8 warm_start.folder=experiments/warm_starts
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.errors import ExperimentError
from experiments.processes.progress import Progress
from experiments.settings.config import RunConfig
from experiments.tasks.task import Task

KEPT = Path(__file__).parents[1] / "warm_starts"
_RECIPE = 2  # to be raised when this file or the model changes what is trained


def warm_start(config: RunConfig, task: Task, device: torch.device) -> dict[str, Tensor]:
    """The same weights on every rank; rank 0 trains them if they are not kept yet.

    A user's own model is its own warm start.
    """
    weights = kept_or_trained(config, task, device) if dist.get_rank() == 0 else {}
    model = task.model()
    model.load_state_dict(weights or model.state_dict())
    weights = model.to(device).state_dict()
    for tensor in weights.values():
        dist.broadcast(tensor, 0)
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def kept_or_trained(config: RunConfig, task: Task, device: torch.device) -> dict[str, Tensor]:
    """On this process alone."""
    model = task.model()
    task.check(model)
    if config.model != "transformer":
        return model.state_dict()
    name = f"{key(config, task)}.pt"
    path = KEPT / name
    if not path.is_file():
        path = Path(config.warm_start.folder) / name
    if not path.is_file():
        weights = train(config, task, device)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        torch.save(weights, unfinished)
        unfinished.replace(path)  # a reader sees the whole file or none
    try:
        model.load_state_dict(torch.load(path, weights_only=True))
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ExperimentError(f"{path} is damaged: delete it, and it is trained again") from error
    return model.state_dict()


def key(config: RunConfig, task: Task) -> str:
    """Everything that decides the weights, in 16 hex digits."""
    recipe = dataclasses.asdict(config.warm_start)
    del recipe["folder"]
    settings = [_RECIPE, recipe, dataclasses.asdict(config.transformer), *task.recipe()]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def train(config: RunConfig, task: Task, device: torch.device) -> dict[str, Tensor]:
    """Train on this process alone, with all of the machine's cores; the result is BF16 values."""
    recipe = config.warm_start
    model = task.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(_cores())  # the other ranks wait
    try:
        with Progress("warm start", total=recipe.steps) as progress:
            for step in range(recipe.steps):
                optimizer.param_groups[0]["lr"] = recipe.lr * _schedule(step, recipe.steps, recipe.decay)
                optimizer.zero_grad()
                loss = task.warm_start_loss(model, step, size=recipe.batch)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                progress.advance(f"loss {loss.item():.2f}" if step % 10 == 0 else "")
    finally:
        torch.set_num_threads(threads)
    return {name: w.to(torch.bfloat16).cpu() for name, w in model.state_dict().items()}


def _schedule(step: int, steps: int, decay: bool, ramp: int = 50) -> float:
    """A short ramp; then constant, or half a cosine down to zero."""
    return min(1.0, (step + 1) / ramp) * (0.5 * (1 + math.cos(math.pi * step / steps)) if decay else 1.0)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
