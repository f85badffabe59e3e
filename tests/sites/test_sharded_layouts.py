"""Replicas, tensor parallelism, whole parameters among shards, and ranks that hold nothing."""

from typing import Any

import numpy as np
import pytest
import torch
from scripted import bits, move
from selection import SHARDINGS
from sharded import Tied, assert_equal, build, divide, shard_of_whole, state, step_of
from sites import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import loco

STEPS = 5
Result = tuple[dict[str, list[np.ndarray]], loco.SyncReport]


def replicas(rank: int, per_site: int, kind: str, expected: list[Result]) -> Result:
    """One site: of one rank, or of two replicas of two shards, with one parameter that all ranks hold."""
    topology, model = loco.Topology(ranks_per_site=per_site), Tied()
    if per_site > 1:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        divide(model, mesh, ignored_params={model.scale})
    optimizer = build(model, kind, topology)
    for step in range(STEPS):
        step_of(model, optimizer, topology.site, step)
    report = optimizer.last_report
    if expected:
        assert_equal(state(optimizer), shard_of_whole(expected[0][0], optimizer))
    return state(optimizer), report


@pytest.mark.check(SHARDINGS, sample="PulseLoCo")
@pytest.mark.parametrize("kind", ["PulseLoCo", "DiLoCo"])
def test_a_site_of_two_replicas_of_two_shards_equals_one_rank(kind: str) -> None:
    expected = run_ranks(1, replicas, 1, kind, [])
    results = run_ranks(4, replicas, 4, kind, expected)
    for _, report in results:
        # Each element of the model counts once, however many ranks hold it.
        assert report.update_norms == pytest.approx(expected[0][1].update_norms, rel=1e-6)
        # Digests of two pairs of replicas and of what all four hold, a norm; refusals and votes.
        assert report.site_bytes == 3 * (3 * 8 + 12 + 2 * 64)


class Steps(torch.optim.Optimizer):
    """w ← w − d with d known in advance, element by element of the whole parameter."""

    def __init__(self, named: Any, places: list[torch.Tensor], site: int) -> None:
        super().__init__(named, {"lr": 1.0})
        self.places, self.site, self.count = places, site, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for k, (p, places) in enumerate(zip(self.param_groups[0]["params"], self.places, strict=True)):
            d = torch.from_numpy(move(k, self.site, self.count, 1000, 1e-3))[places.long()]
            held = p.to_local() if isinstance(p, DTensor) else p
            held.sub_(d)
        self.count += 1


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7))


def tensor_parallel(rank: int, per_site: int) -> tuple[list[tuple[np.ndarray, ...]], list[str], Any]:
    """-> by parameter the places of this rank's elements in it, w, θ and e; and how they are divided."""
    topology, model = loco.Topology(ranks_per_site=per_site), layers()
    for p in model.parameters():
        p.data = torch.arange(p.numel(), dtype=torch.float32).view(p.shape)
    if per_site > 1:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
    params: list[Any] = list(model.parameters())
    held = [p.to_local().detach() if isinstance(p, DTensor) else p.detach() for p in params]
    places = [tensor.clone() for tensor in held]
    start = torch.from_numpy(move(0, 9, 9, 1000, 0.02))
    for tensor, at in zip(held, places, strict=True):
        tensor.copy_(start[at.long()])
    optimizer = loco.PulseLoCo(
        Steps(model.named_parameters(), places, topology.site), sync_every=2, topology=topology
    )
    for _ in range(STEPS):
        optimizer.step()
    outer = optimizer.outer_state
    sizes = [tensor.numel() for tensor in held]
    assert outer.residual is not None
    columns = zip(
        places, outer.parameters.tensors, outer.anchor.split(sizes), outer.residual.split(sizes), strict=True
    )
    found = [tuple(bits(x).ravel() for x in column) for column in columns]
    divided = [str(p.placements) for p in outer.parameters.params if isinstance(p, DTensor)]
    strided = [
        any(isinstance(x, _StridedShard) for x in getattr(p, "placements", ()))
        for p in outer.parameters.params
    ]
    return found, divided, (strided, optimizer.last_report)


@pytest.mark.check(SHARDINGS)
def test_tensor_parallel_shards_of_fsdp_equal_one_rank() -> None:
    expected, _, (_, alone) = run_ranks(1, tensor_parallel, 1)[0]
    results = run_ranks(4, tensor_parallel, 4)
    seen = [np.zeros(len(expected[k][0]), dtype=int) for k in range(len(expected))]
    for found, divided, (strided, report) in results:
        assert len(divided) == 4
        assert any(strided)
        assert report.update_norms == pytest.approx(alone.update_norms, rel=1e-6)
        for k, (places, *values) in enumerate(found):
            at = places.view(np.float32).astype(int)
            seen[k][at] += 1
            for mine, whole in zip(values, expected[k][1:], strict=True):
                np.testing.assert_array_equal(mine, whole[at])
    assert all(counts.min() >= 1 for counts in seen)


def one_element(rank: int) -> tuple[int, list[float], tuple[float, ...]]:
    """Two sites of two shards, of which the second holds nothing at all."""
    topology, model = loco.Topology(ranks_per_site=2), nn.Linear(1, 1, bias=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))["shard"]
    with torch.no_grad():
        model.weight.fill_(1.0)
    fully_shard(model, mesh=mesh)
    optimizer = loco.PulseLoCo(
        torch.optim.SGD(model.parameters(), lr=1.0),
        sync_every=1,
        outer_lr=1.0,
        outer_momentum=0.0,
        topology=topology,
    )
    model(torch.full((1, 1), 0.25 * (topology.site + 1))).sum().backward()
    optimizer.step()
    assert optimizer.last_report is not None
    assert isinstance(model.weight, DTensor)
    whole = model.weight.full_tensor().ravel().tolist()
    return optimizer.outer_state.numel, whole, optimizer.last_report.update_norms


def test_a_rank_whose_shards_are_all_empty_takes_part() -> None:
    results = run_ranks(4, one_element)
    assert [numel for numel, _, _ in results] == [1, 0, 1, 0]
    assert {(*whole, *norms) for _, whole, norms in results} == {(1 - (0.25 + 0.5) / 2, 0.25, 0.5)}
