"""The pre-trained model that every method starts from: trained once, then kept in a file.

It stands in for a published checkpoint, so its weights are BF16 values, as published ones are.
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

from experiments.config import RunConfig
from experiments.data import Corpus, batch
from experiments.errors import ExperimentError
from experiments.model import ByteTransformer
from experiments.progress import Progress

_RECIPE = 1  # to be raised when this file changes what it trains


def warm_start(config: RunConfig, corpus: Corpus, device: torch.device) -> dict[str, Tensor]:
    """The same weights on every rank; rank 0 trains them if they are not kept yet."""
    path = Path(config.warm_start.folder) / f"{key(config, corpus)}.pt"
    model = ByteTransformer(config.model)
    if dist.get_rank() == 0:
        if not path.is_file():
            weights = train(config, corpus, device)
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}.tmp")
            torch.save(weights, unfinished)
            unfinished.replace(path)  # a reader sees the whole file or none
        try:
            model.load_state_dict(torch.load(path, weights_only=True))
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise ExperimentError(f"{path} is damaged: delete it, and it is trained again") from error
    weights = model.to(device).state_dict()
    for tensor in weights.values():
        dist.broadcast(tensor, 0)
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def key(config: RunConfig, corpus: Corpus) -> str:
    """Everything that decides the weights, in 16 hex digits."""
    recipe = dataclasses.asdict(config.warm_start)
    del recipe["folder"]
    settings = json.dumps([_RECIPE, recipe, dataclasses.asdict(config.model)], sort_keys=True)
    digest = hashlib.sha256(settings.encode())
    digest.update(corpus.warm.numpy().tobytes())
    return digest.hexdigest()[:16]


def train(config: RunConfig, corpus: Corpus, device: torch.device) -> dict[str, Tensor]:
    """Pre-train on this process alone, with all of the machine's cores; the result is BF16 values."""
    recipe = config.warm_start
    model = ByteTransformer(config.model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(_cores())  # the other ranks wait
    try:
        with Progress("warm start", total=recipe.steps) as progress:
            for step in range(recipe.steps):
                optimizer.param_groups[0]["lr"] = recipe.lr * _schedule(step, recipe.steps)
                sequences = batch(
                    corpus.warm,
                    size=recipe.batch,
                    context=config.model.context,
                    seed=0,
                    rank=0,
                    ranks=1,
                    step=step,
                ).to(device)
                optimizer.zero_grad()
                loss = model(sequences)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                progress.advance(f"loss {loss.item():.2f}" if step % 10 == 0 else "")
    finally:
        torch.set_num_threads(threads)
    return {name: w.to(torch.bfloat16).to(w.dtype).cpu() for name, w in model.state_dict().items()}


def _schedule(step: int, steps: int, ramp: int = 50) -> float:
    """A short ramp, then half a cosine down to zero."""
    return min(1.0, (step + 1) / ramp) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
