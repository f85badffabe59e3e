"""What training and sampling keep in the memory of GPUs."""

from __future__ import annotations

import math

from experiments.pipeline.plan.config import PlanConfig
from experiments.settings.checks import require

BF16 = 2  # bytes
_TRAINING = 0.8  # share of a GPU's memory for what a site keeps; the rest is for activations
_SAMPLING = 0.9  # for weights, keys and values


def site_bytes(config: PlanConfig) -> float:
    """Of a site, sharded over its ranks: weights, gradients, Adam's moments, and loco's θ, e and m."""
    each = config.target.state_bytes
    if each is None:
        weights = 4 if config.parameters == "float32" else BF16
        each = 4 * weights + (12 if config.outer_momentum else 8)
    return each * config.target.parameters


def cache_bytes(config: PlanConfig) -> float:
    """Of a token's keys and values."""
    target = config.target
    return 2 * target.layers * target.kv_heads * target.head_dim * BF16


def for_cache(config: PlanConfig) -> float:
    """Bytes of a sampler that its weights leave for keys and values."""
    return _SAMPLING * config.gpu.memory_gb * 1e9 - BF16 * config.target.parameters


def ranks_that_fit(config: PlanConfig) -> list[int]:
    """How many GPUs a site may have, so that they hold what it keeps and learn from equally many answers, and
    one GPU is left to sample. The longest answer must fit into that one.

    Raises:
        ExperimentError: nothing fits, and what to set instead.
    """
    gpu, target, sites = config.gpu, config.target, config.sites
    longest = cache_bytes(config) * (target.prompt_tokens + target.longest_tokens)
    require(
        for_cache(config) >= longest,
        f"{target.parameters:.3g} parameters and an answer of target.longest_tokens="
        f"{target.longest_tokens:g} do not fit into gpu.memory_gb={gpu.memory_gb:g}: a GPU here is a whole "
        f"sampler. Count several as one, with their memory, bandwidth_gb and tflops together",
    )
    least = max(1, math.ceil(site_bytes(config) / (_TRAINING * gpu.memory_gb * 1e9)))
    fitting = [ranks for ranks in range(least, target.answers + 1) if target.answers % ranks == 0]
    keeps = f"a site keeps {site_bytes(config) / 1e9:.3g} GB in {least} or more GPUs of {gpu.memory_gb:g} GB"
    require(
        bool(fitting),
        f"{keeps}, which can't share target.answers={target.answers}: set target.answers={least} or more",
    )
    least_gpus = sites * fitting[0] + 1
    require(
        config.gpus >= least_gpus,
        f"gpus={config.gpus} can't be split: {keeps}, {fitting[0]} of them share target.answers="
        f"{target.answers} evenly, and one GPU must sample. Set gpus={least_gpus} or more"
        f"{', or fewer sites' * (sites > 1)}",
    )
    return [ranks for ranks in fitting if sites * ranks < config.gpus]


def sentence(config: PlanConfig) -> str:
    """What is kept, and where."""
    return (
        f"A site keeps {site_bytes(config) / 1e9:.0f} GB, sharded over its GPUs; a sampler keeps "
        f"{BF16 * config.target.parameters / 1e9:.0f} GB of weights and {cache_bytes(config) / 1e6:.2g} MB "
        f"for each token of its answers."
    )
