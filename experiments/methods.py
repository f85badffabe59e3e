"""What differs between DDP, DiLoCo and PULSELoCo: which module the loop calls and which optimizer steps."""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import loco
from experiments.config import RunConfig, wire_of
from experiments.errors import ExperimentError


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train: its name and, where it has one, its outer optimizer."""

    name: str
    outer_lr: float
    outer_momentum: float

    @property
    def title(self) -> str:
        return {"ddp": "DDP", "diloco": "DiLoCo", "pulseloco": "PULSELoCo"}[self.name]

    @property
    def outer(self) -> str:
        """The outer optimizer in the paper's letters; empty for DDP, which has none."""
        if self.name == "ddp":
            return ""
        return f"α {self.outer_lr:g}, μ {self.outer_momentum:g}"

    def __str__(self) -> str:
        return f"{self.title} ({self.outer})" if self.outer else self.title


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


def build(method: Method, model: nn.Module, config: RunConfig) -> Trainee:
    """Wrap `model` and its AdamW. Every rank calls this together."""
    try:
        inner = torch.optim.AdamW(
            model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
    except ValueError as error:
        raise ExperimentError(f"AdamW: {error}") from error
    if method.name == "ddp":
        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return Trainee(module, inner, AllReduceWait(module))

    topology = loco.Topology(ranks_per_site=config.ranks_per_site, timeout=config.timeout_s)
    module, wait = model, None
    if config.ranks_per_site > 1:
        module = DistributedDataParallel(
            model, process_group=topology.site_group, gradient_as_bucket_view=True
        )
        wait = AllReduceWait(module)
    outer: dict[str, Any] = {
        "sync_every": config.sync_every,
        "outer_lr": method.outer_lr,
        "outer_momentum": method.outer_momentum,
        "nesterov": config.nesterov,
        "topology": topology,
    }
    if method.name == "diloco":
        return Trainee(module, loco.DiLoCo(inner, **outer), wait)
    own = ("gate", "gate_gain", "gate_margin", "value_steps", "exchange")
    gate: dict[str, Any] = {name: getattr(config, name) for name in own}
    gate["wire"] = wire_of(config)
    return Trainee(module, loco.PulseLoCo(inner, **outer, **gate), wait)
