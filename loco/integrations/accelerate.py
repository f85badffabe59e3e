"""Rounds in a loop of Accelerate's.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    handle = attach(accelerator, optimizer, sync_every=8)

Every site starts it as a world of its own, with LOCO_SITES, LOCO_SITE and LOCO_AT set.
"""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch.optim import Optimizer

import loco

from .trainers import rank_file
from .trainers.one_site import log_rounds, topology_of_one_world


def attach(
    accelerator: Accelerator,
    optimizer: AcceleratedOptimizer | Optimizer,
    *,
    topology: loco.SiteTopology | None = None,
    **options: Any,
) -> loco.Attached:
    """Attach loco to a prepared optimizer; `save_state` and `load_state` then handle its rounds.

    Only the steps that Accelerate runs count, so that `accelerator.accumulate` works. Call `handle.sync()`
    when the loop ends, and `handle.eval()` and `handle.train()` around an evaluation, which then sees θ.
    Accelerate's trackers get `handle.metrics()` after each round.

    Args:
        accelerator: that has prepared the optimizer.
        optimizer: what `accelerator.prepare` returned.
        topology: by default `loco.Sites()`, which reads LOCO_SITES, LOCO_SITE and LOCO_AT.
        options: as for `loco.attach`: `sync_every`, `method` and so on.

    Raises:
        ValueError: torch's world is not one site; or mixed_precision is "fp16".
    """
    if accelerator.scaler is not None:
        raise ValueError(
            "mixed_precision='fp16' can't be used with loco: the steps that its gradient scaler skips would "
            "bring this site late to its rounds. Use 'bf16'"
        )
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    handle = loco.attach(inner, topology=topology_of_one_world(topology), in_state_dict=False, **options)
    log_rounds(handle, accelerator.log)
    folder: Path | None = None  # which is being loaded

    def save(models: Any, weights: Any, output_dir: str) -> None:
        if not handle.topology.closed:  # else the accelerator has gone on with another optimizer
            rank_file.save(handle, output_dir, rank_file.fingerprint(inner))

    def remember(models: Any, input_dir: str) -> None:
        nonlocal folder
        if handle.topology.closed:
            return
        folder = Path(input_dir)
        if accelerator.distributed_type == DistributedType.FSDP:  # this comes after model and optimizer
            load(inner)

    def load(_: Optimizer) -> None:
        nonlocal folder
        at, folder = folder, None
        if at is not None:
            rank_file.load(handle, at, rank_file.fingerprint(inner))

    # Else Accelerate loads the models after it, and then the optimizer: only then is it time for the rounds.
    inner.register_load_state_dict_post_hook(load)
    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(remember)
    return handle
