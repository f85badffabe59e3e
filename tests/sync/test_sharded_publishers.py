"""The ranks of a site publish their own shards: no gather, no copy twice, and the whole model arrives."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from published import cast, same_bits
from scripted import Scripted, parameters
from selection import SHARDINGS
from sharded import Tied
from sites import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import loco
from loco.sync import EngineSlice, LayoutError, Publisher, Subscriber

LAYOUTS = {
    "fsdp": ((2,), ("shard",)),
    "hsdp": ((2, 2), ("replicate", "shard")),
    "fsdp over tp": ((2, 2), ("shard", "tp")),
    "fsdp of two sites": ((2, 2), ("site", "shard")),
}


def divide(model: Tied, layout: str) -> None:
    shape, names = LAYOUTS[layout.removesuffix(", held twice")]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if not layout.endswith("held twice"):
            distribute_module(model, mesh["tp"])  # the others are copies, and say so
            model.head.weight = model.embed.weight
    if {"tp", "site"} & set(names):
        mesh = mesh["shard"]
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = cast(full)
    found["head.weight"] = found["embed.weight"]
    return found


def publishing(rank: int, layout: str, folder: str) -> list[int]:
    """-> the bytes that this rank's versions have in memory"""
    world = dist.get_world_size()
    model = Tied()
    divide(model, layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    topology = loco.Topology(ranks_per_site=2) if layout == "fsdp of two sites" else (rank, world)
    publisher = Publisher(model, folder, stream=topology)
    engine = {name: torch.zeros_like(tensor) for name, tensor in whole(model).items()}
    engine["head.weight"] = engine["embed.weight"]
    subscriber = Subscriber(engine, folder)
    sizes = []
    for step in range(1, 4):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        sizes.append(publisher.publish(step).dense_bytes)
        dist.barrier()
        assert subscriber.update().version == step
        same_bits(engine, whole(model))
        subscriber.verify()
        dist.barrier()
    return sizes


@pytest.mark.check(SHARDINGS)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_rank_publishes_its_own_shards(layout: str, tmp_path: Path) -> None:
    world = torch.tensor(LAYOUTS[layout][0]).prod().item()
    sizes = run_ranks(int(world), publishing, layout, str(tmp_path))
    every = sum(p.numel() for p in Tied().parameters()) * 2
    assert [sum(of_step) for of_step in zip(*sizes, strict=True)] == [every] * 3
    assert max(map(max, sizes)) < every


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Linear(16, 8, bias=False)


def engine_rank(rank: int, ranks: int) -> tuple[dict[str, list[EngineSlice]], dict[str, torch.Tensor]]:
    """What an engine's rank of tensor parallelism holds: rows of `up`, columns of `down`, all of the norm.
    -> its places, and its memory"""
    every, part = slice(0, 8), slice(16 * rank // ranks, 16 * (rank + 1) // ranks)
    regions = {"up.weight": (part, every), "up.bias": (part,), "down.weight": (every, part)}
    regions |= {"norm.weight": (slice(0, 16),), "norm.bias": (slice(0, 16),)}
    held = {
        name: torch.zeros([one.stop - one.start for one in region], dtype=torch.bfloat16)
        for name, region in regions.items()
    }
    return {name: [EngineSlice(region, held[name])] for name, region in regions.items()}, held


def publishing_to_engines(rank: int, folder: str) -> None:
    model, world = Layer(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    distribute_module(model, mesh)
    publisher = Publisher(model, folder, stream=(rank, world))
    engines = [engine_rank(k, ranks) for ranks in (1, 2, 4) for k in range(ranks)]
    followers = [(Subscriber(places, folder), places, held) for places, held in engines]
    for step in range(1, 4):
        with torch.no_grad():
            for p in model.parameters():
                p *= 1.25
        publisher.publish(step)
        dist.barrier()
        expected = {name: cast(p.full_tensor()) for name, p in model.named_parameters()}  # pyright: ignore
        for subscriber, places, held in followers:
            subscriber.update()
            same_bits(held, {name: expected[name][of[0].region].contiguous() for name, of in places.items()})
        dist.barrier()


@pytest.mark.check(SHARDINGS, sample="2")
@pytest.mark.parametrize("trainers", [2, 4])
def test_an_engine_is_divided_otherwise_than_its_trainers(trainers: int, tmp_path: Path) -> None:
    """Tensor parallelism over two or four, into engines of one, two and four ranks."""
    run_ranks(trainers, publishing_to_engines, str(tmp_path))


def publishing_twice(rank: int, layout: str, folder: str) -> str:
    model = Tied()
    divide(model, layout)
    Publisher(model, folder, stream=(rank, 4)).publish(1)
    engine = {name: torch.zeros_like(tensor) for name, tensor in whole(model).items()}
    dist.barrier()
    with pytest.raises(LayoutError) as error:
        Subscriber(engine, folder).update()
    return str(error.value)


@pytest.mark.check(SHARDINGS)
@pytest.mark.parametrize("layout", ["fsdp over tp, held twice", "fsdp of two sites"])
def test_a_shard_that_two_ranks_publish_is_told(layout: str, tmp_path: Path) -> None:
    """Ranks of tensor parallelism that hold the same FSDP shards, whose mesh does not say so; and sites that
    are not told of each other.
    """
    for told in run_ranks(4, publishing_twice, layout, str(tmp_path)):
        assert "scale has 1 elements, and its publishers publish 2 of them: some are published twice" in told


def publishing_after_rounds(rank: int, folder: str, together: bool) -> None:
    topology = loco.Topology(ranks_per_site=2)
    weights = parameters(3, 1003)
    named = {f"p{k}": p for k, p in enumerate(weights)}
    optimizer = loco.PulseLoCo(Scripted(weights, 3, topology.site, 1e-2), sync_every=1, topology=topology)
    if together or rank == 0:
        Publisher(named, folder, stream=topology if together else (0, 1)).after(optimizer)
    engine = {name: torch.zeros_like(p, dtype=torch.bfloat16) for name, p in named.items()}
    subscriber = Subscriber(engine, folder)
    for round in range(1, 4):
        optimizer.step()
        dist.barrier()
        assert subscriber.update().version == round
        same_bits(engine, {name: cast(p.detach()) for name, p in named.items()})
        dist.barrier()


@pytest.mark.check(SHARDINGS, sample="True")
@pytest.mark.parametrize("together", [False, True])
def test_a_round_is_published_when_the_ranks_of_a_site_have_shared_it(together: bool, tmp_path: Path) -> None:
    """Each applies a slice of it, and has the others' only then."""
    run_ranks(4, publishing_after_rounds, str(tmp_path), together)
