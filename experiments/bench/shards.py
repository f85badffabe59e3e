"""A round of sharded sites: its time, and what a rank holds and sends, against sites that are not divided.

    python -m experiments.bench shards
    python -m experiments.bench shards --layers 4 16 --repeats 15

Two sites over this machine's loopback, in three arrangements: one rank each, which holds everything; two
ranks each that hold the same weights, as DDP has it; two ranks each that FSDP2 shards over. A model is so
many linear layers of 1024 x 1024. All arrangements take the same steps, from noise, and their rounds take
turns. A round's time is the slowest rank's, from when all are ready. After each round their θ is compared.
Rows go to runs/bench/shards.csv.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import loco
from experiments.bench.measuring import append, arguments_of
from experiments.bench.processes.sites import Sites

RANKS = {"whole": 1, "ddp": 2, "fsdp2": 2}  # of each of the two sites
_LR = 1e-6


class Noisy(torch.optim.Optimizer):
    """Steps of about the learning rate, the same for each element however the parameters are divided."""

    def __init__(self, parameters: Any, site: int) -> None:
        super().__init__(parameters, {})
        self._chance = torch.Generator().manual_seed(site)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                noise = torch.randn(p.shape, generator=self._chance).mul_(_LR)
                if isinstance(p, DTensor):
                    noise = noise.chunk(p.device_mesh.size())[p.device_mesh.get_local_rank()]
                    p.to_local().sub_(noise)
                else:
                    p.sub_(noise)
        return None


class Rank:
    def __init__(self, rank: int, arrangement: str, layers: int, width: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        each = RANKS[arrangement]
        mesh = init_device_mesh("cpu", (2, each), mesh_dim_names=("site", "shard"))
        if arrangement == "fsdp2":
            for part in (*model, model):
                fully_shard(part, mesh=mesh["shard"])
        topology = loco.Topology(mesh=mesh["site"])
        self._inner = Noisy(model.parameters(), topology.site)
        self._optimizer = loco.PulseLoCo(self._inner, sync_every=8, topology=topology)

    def round(self) -> dict[str, Any]:
        for _ in range(8):
            self._inner.step()
        dist.barrier()
        begun = time.perf_counter()
        report = self._optimizer.sync()
        seconds = time.perf_counter() - begun
        outer = self._optimizer.outer_state
        state = [t for t in (outer.anchor, outer.momentum, outer.residual) if t is not None]
        return {
            "seconds": seconds,
            "state_bytes": sum(t.nbytes for t in state),
            "sent_bytes": report.sent_bytes,
            "site_bytes": report.site_bytes,
            "density": report.density,
            "anchor": _sum_of_bits(outer.anchor),
        }


def _sum_of_bits(anchor: Tensor) -> int:
    """Of parts, these add up to that of the whole."""
    return int(anchor.view(torch.int32).sum(dtype=torch.int64))


def main(arguments: list[str]) -> None:
    parser = arguments_of("shards", __doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=11, help="rounds of each arrangement that count")
    options = parser.parse_args(arguments)
    for layers in options.layers:
        rows = _compare(layers, options.width, options.repeats)
        append(options.out / "shards.csv", rows)


def _compare(layers: int, width: int, repeats: int) -> list[dict[str, Any]]:
    rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in RANKS}
    with ExitStack() as closing:
        running = {
            name: closing.enter_context(Sites(2 * each, Rank, name, layers, width, timeout=600.0))
            for name, each in RANKS.items()
        }
        for _ in range(repeats + 2):  # the first two are sparser, and warm everything up
            for name, sites in running.items():
                rounds[name].append(sites.call("round"))
            if len({sum(one["anchor"] for one in rounds[name][-1]) for name in RANKS}) != 1:
                raise RuntimeError("the arrangements do not hold the same θ: their times mean nothing")
    took = {
        name: [max(one["seconds"] for one in ranks) for ranks in found[2:]] for name, found in rounds.items()
    }
    rows = []
    for name in RANKS:
        last = rounds[name][-1]
        against = median(mine / whole for mine, whole in zip(took[name], took["whole"], strict=True))
        row = {
            "numel": layers * width**2,
            "arrangement": name,
            "ranks": RANKS[name],
            "seconds": median(took[name]),
        }
        row |= {"against_whole": against}
        row |= {what: max(one[what] for one in last) for what in ("state_bytes", "sent_bytes", "site_bytes")}
        rows.append(row | {"density": last[0]["density"]})
        state, sent, inside = (row[what] / 1e6 for what in ("state_bytes", "sent_bytes", "site_bytes"))
        print(
            f"{row['numel'] / 1e6:6.1f}M {name:6} {1e3 * row['seconds']:8.1f} ms, {against:5.2f} x whole; of "
            f"a rank: {state:6.1f} MB of state, {sent:6.2f} MB sent, {inside:6.2f} MB inside the site",
            flush=True,
        )
    return rows
