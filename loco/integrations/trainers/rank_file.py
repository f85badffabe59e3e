"""The state of one rank's rounds, in a file beside what a framework saves of the whole site."""

import os
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import loco


def save(handle: loco.Attached, folder: str | Path, weights: list[int]) -> None:
    """
    Args:
        weights: the `fingerprint` of those that the framework saves.
    """
    path = path_of(handle.topology, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({"weights": weights, "loco": handle.state_dict()["loco"]}, partial)
    os.replace(partial, path)


def load(handle: loco.Attached, folder: str | Path, weights: list[int]) -> None:
    """Load the rounds, once the framework has loaded the model and the optimizer.

    Args:
        weights: the `fingerprint` of those that the framework has loaded.

    Raises:
        ValueError: the file is not there, or belongs to other weights.
    """
    path = path_of(handle.topology, folder)
    if not path.exists():
        raise ValueError(
            f"{path.parent} has no {path.name}, this rank's state of the rounds: it was saved without "
            f"optimizer, without loco, or not to the end. Resume from another checkpoint, or start anew "
            f"from its model"
        )
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if saved["weights"] != weights:
        raise ValueError(
            f"{path} was saved beside other weights than those that were loaded: resume from {path.parent}, "
            f"or say where the checkpoint is"
        )
    handle.load_state_dict({**handle.inner.state_dict(), "loco": saved["loco"]})


def fingerprint(optimizer: Optimizer) -> list[int]:
    """Of the weights, each parameter's. Cheap, and made where the parameter is."""
    params = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in params]
    return [int(torch.hash_tensor(p).view(torch.int64)) if p.numel() else 0 for p in local]


def path_of(topology: loco.SiteTopology, folder: str | Path) -> Path:
    """Of this rank's file in a checkpoint."""
    return Path(folder) / f"loco_rank{topology.rank_in_site}.pt"
