"""A model that is sharded over the ranks of a site by FSDP2: BF16 over FP32 masters."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from experiments.models.huggingface import HuggingFaceModel


def shard(model: nn.Module, ranks: int, *, checkpoint_activations: bool) -> None:
    """Leave this rank its part of each weight. Every rank of the site calls this together.

    Args:
        checkpoint_activations: keep only what goes into a layer, and compute the rest of it again in
            backward.
    """
    policy = MixedPrecisionPolicy()  # the model of this repository rounds its weights itself
    if isinstance(model, HuggingFaceModel):
        model.is_rounded = True
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = model.model
    mesh = init_device_mesh("cpu", (ranks,))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in max(lists, key=len, default=()):  # a module each, so that they are gathered one by one
        if checkpoint_activations:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
