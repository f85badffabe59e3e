"""Other people's ways to train sites together, for comparisons."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from experiments.noise import SYNC_EVERY

os.environ.setdefault("RUST_LOG", "error")  # or torchft writes some lines about every round


class AllReduce:
    """What a collective takes for as many FP32 values, without a round around it."""

    def __init__(self, weights: list[torch.nn.Parameter], lighthouse: str) -> None:
        self.weights: list[Tensor] = []
        self._vector = torch.zeros(sum(w.numel() for w in weights))

    def round(self) -> None:
        dist.all_reduce(self._vector)


class PostLocalSGD:
    """torch's: the mean of all sites' weights, and no outer optimizer."""

    def __init__(self, weights: list[torch.nn.Parameter], lighthouse: str) -> None:
        self.weights: list[Tensor] = [w.detach() for w in weights]
        self._parameters = weights
        self._averager = PeriodicModelAverager(period=SYNC_EVERY)

    def round(self) -> None:
        for parameter in self._parameters:  # those that have no gradient it passes over
            parameter.grad = parameter.detach()
        for _ in range(SYNC_EVERY):  # it is told of each step, and averages in one of them
            self._averager.average_parameters(self._parameters)
        for parameter in self._parameters:
            parameter.grad = None
        self.weights = [w.detach() for w in self._parameters]  # they are in other memory now


class Ddp:
    """What DistributedDataParallel does in an inner step: gradients travel, from the last layer's on, while
    those of the layers before are made.

    Args:
        numel: of the gradients.
        buckets: in which they travel.
    """

    def __init__(self, numel: int, buckets: int) -> None:
        self._buckets = torch.zeros(numel).tensor_split(buckets)

    def step(self, forward: Callable[[], object], backward: Callable[[], object]) -> None:
        """`backward` makes one bucket's gradients."""
        forward()
        works = []
        for bucket in self._buckets:
            backward()
            works.append(dist.all_reduce(bucket, async_op=True))
        for work in works:
            assert work is not None
            work.wait()


class Torchft:
    """torchft's DiLoCo, with the published outer optimizer.

    Args:
        fragments: parts of the weights, each of which is synchronised once in `sync_every` steps.
        delay: inner steps for which a fragment may travel.
        address: of this machine; its sites find each other by a store at it.
    """

    def __init__(
        self,
        weights: list[torch.nn.Parameter],
        inner: torch.optim.Optimizer,
        lighthouse: str,
        *,
        sync_every: int,
        fragments: int = 1,
        delay: int = 0,
        address: str = "127.0.0.1",
    ) -> None:
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        logging.getLogger("torchft").setLevel(logging.ERROR)
        # A group of one replica is torchft's unit; its ranks find each other by a store of their own.
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        limit = timedelta(seconds=600)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=limit),
            load_state_dict=lambda _: None,
            state_dict=dict,
            min_replica_size=dist.get_world_size(),
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=limit,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"site{dist.get_rank()}",
            hostname=address,
            init_sync=False,
        )
        each = len(weights) // fragments
        parts = [weights[k * each : (k + 1) * each if k < fragments - 1 else None] for k in range(fragments)]
        outer: list[torch.optim.Optimizer] = [
            torch.optim.SGD(part, lr=0.7, momentum=0.9, nesterov=True) for part in parts
        ]
        models: list[torch.nn.Module] = [torch.nn.ParameterList(part) for part in parts]
        self._diloco = DiLoCo(
            self._manager, models, inner, outer, sync_every=sync_every, fragment_sync_delay=delay
        )
        self._diloco.__enter__()

    @property
    def rounds(self) -> int:
        """Of one fragment each, that counted."""
        return self._manager.current_step()


class TorchftDiLoCo:
    """torchft's, of one fragment."""

    def __init__(self, weights: list[torch.nn.Parameter], lighthouse: str) -> None:
        self.weights: list[Tensor] = [w.detach() for w in weights]
        # The noise has moved the weights already: torchft's hooks only wait for this optimizer's step.
        self._step = torch.optim.SGD(weights, lr=0.0)
        self._torchft = Torchft(weights, self._step, lighthouse, sync_every=1)

    def round(self) -> None:
        before = self._torchft.rounds
        self._step.step()
        if self._torchft.rounds != before + 1:
            raise RuntimeError("torchft did not commit the round")


def start_lighthouse(stack: ExitStack, sites: int, bind: str = "127.0.0.1:0") -> str:
    """torchft's, until the stack is closed. -> its address"""
    try:
        from torchft.coordination import LighthouseServer
    except ImportError:
        sys.exit("torchft's DiLoCo needs torchft: pip install torchft, or choose other --methods")
    server = LighthouseServer(bind=bind, min_replicas=sites)
    stack.callback(server.shutdown)
    return server.address()
