"""What differs between the methods: which module the loop calls and which optimizer steps."""

import inspect
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import loco
from experiments.errors import ExperimentError
from experiments.methods.observer import Observer
from experiments.methods.sparseloco import SparseLoCo
from experiments.methods.variants import forgetting, whole_ulps
from experiments.settings.checks import nearest
from experiments.settings.config import RunConfig, wire_of
from experiments.settings.rounds import outer_options


class AllReduceWait:
    """How long DDP keeps the trainer waiting: from the last gradient's hand-over to the end of backward.

    What DDP exchanges while backward still computes costs nothing, and is not counted.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._on_gpu = next(model.parameters()).is_cuda
        self._handed_over = self._mark()
        model.register_comm_hook(None, self._hook)

    def seconds(self) -> float:
        """To be asked right after `backward()`."""
        now = self._mark()
        if isinstance(now, torch.cuda.Event):
            now.synchronize()
            return self._handed_over.elapsed_time(now) / 1e3
        return now - self._handed_over

    # DDP insists on this annotation, as an object: no `from __future__ import annotations` in this file.
    def _hook(
        self,
        group: Any,
        bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
    ) -> torch.futures.Future[Tensor]:
        self._handed_over = self._mark()
        return allreduce_hook(group, bucket)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # the host runs ahead of the GPU
        event.record()
        return event


@dataclass
class Trainee:
    """A model made ready for its method."""

    module: nn.Module  # what the loop calls
    optimizer: torch.optim.Optimizer
    wait: AllReduceWait | None  # of a gradient all-reduce in every step, where there is one
    observer: Observer | None  # of what PULSELoCo's gate does


def build(model: nn.Module, config: RunConfig) -> Trainee:
    """Wrap `model` and its inner optimizer. Every rank calls this together."""
    inner = inner_of(model, config)
    if config.method == "single":
        return Trainee(model, inner, None, None)
    if config.method == "ddp":
        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return Trainee(module, inner, AllReduceWait(module), None)

    topology = loco.Topology(ranks_per_site=config.ranks_per_site, timeout=config.timeout_s)
    module, wait = model, None
    if config.ranks_per_site > 1:
        module = DistributedDataParallel(
            model, process_group=topology.site_group, gradient_as_bucket_view=True
        )
        wait = AllReduceWait(module)
    if config.method == "sparseloco":
        own = {"outer_lr": config.outer_lr, "settings": config.sparseloco}
        optimizer = SparseLoCo(inner, sync_every=config.sync_every, topology=topology, **own)
        return Trainee(module, optimizer, wait, None)
    optimizer = in_rounds(inner, topology, config)
    trainee = Trainee(module, optimizer, wait, None)
    if not isinstance(optimizer, loco.PulseLoCo):
        return trainee
    if config.whole_ulps:
        whole_ulps(optimizer)
    if not config.error_feedback:
        forgetting(optimizer)
    if config.gate != "open" and config.overlap is None:
        trainee.observer = Observer(optimizer)  # registered last: it sees what the variants leave to the gate
    return trainee


_OTHERS = ("Optimizer", "LBFGS", "SparseAdam")  # that need a closure, or sparse gradients


def inner_of(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """An optimizer of torch.optim, by its name."""
    kinds = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in _OTHERS
    }
    if config.optimizer not in kinds:
        raise ExperimentError(
            f"torch.optim has no optimizer '{config.optimizer}'{nearest(config.optimizer, kinds)}"
        )
    kind = kinds[config.optimizer]
    takes = inspect.signature(kind).parameters
    own = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
    if twice := sorted(own.keys() & config.optimizer_options.keys()):
        raise ExperimentError(f"optimizer_options: {', '.join(twice)} has a key of its own: set {twice[0]}=")
    options = {name: value for name, value in own.items() if name in takes} | config.optimizer_options
    try:
        return kind(model.parameters(), **options)
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"{config.optimizer}: {error}") from error


def in_rounds(
    inner: torch.optim.Optimizer, topology: loco.Topology | loco.Sites, config: RunConfig
) -> loco.DiLoCo | loco.PulseLoCo:
    outer: dict[str, Any] = outer_options(config) | {"topology": topology, "wire": wire_of(config)}
    if config.method == "diloco":
        return loco.DiLoCo(inner, **outer)
    return loco.PulseLoCo(inner, exchange=config.exchange, **outer)
