"""Trainings on sharded parameters, and the same on whole ones, to be compared shard by shard."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scripted import bits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import loco

H = 2
Wrap = Callable[[nn.Module, DeviceMesh], Any]


class Tied(nn.Module):
    """Sizes that two ranks can't share evenly, one that leaves a rank empty, and a weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(7, 7, bias=False)
        self.up: nn.Module = nn.Linear(7, 15)
        self.scale = nn.Parameter(torch.ones(1))
        self.down = nn.Linear(15, 7)
        self.head = nn.Linear(7, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.tanh(self.up(self.embed(x))) * self.scale))


def site_mesh(per_site: int = 2) -> DeviceMesh:
    """Of this site: the part of a mesh of the world that FSDP may see."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // per_site, per_site), mesh_dim_names=("site", "shard"))
    return mesh["shard"]


def divide(model: Tied, mesh: DeviceMesh, **options: Any) -> None:
    """Two groups: a layer of its own, and the root with all else."""
    fully_shard(model.up, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def batch(site: int, step: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * site + step))


def as_bf16(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What FSDP2's mixed precision computes: weights and inputs are rounded, and then computed with."""
    rounded = {name: p.bfloat16() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, rounded, (x.bfloat16(),))


def step_of(
    model: Any,
    optimizer: Any,
    site: int,
    step: int,
    *,
    clip: float = 0.0,
    parts: int = 1,
    forward: Callable[[nn.Module, torch.Tensor], torch.Tensor] = nn.Module.__call__,
) -> None:
    """With the same batch on all ranks of a site, whose mean gradient then is each one's, to the bit."""
    optimizer.zero_grad()
    for part in range(parts):
        if parts > 1 and hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(part == parts - 1)
        forward(model, batch(site, parts * step + part)).square().mean().backward()
    if clip:
        # A norm's last bits depend on the order of its sum: halving the gradients does not.
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e30)
        assert float(norm.full_tensor() if isinstance(norm, DTensor) else norm) > clip
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)
    optimizer.step()


def state(optimizer: Any) -> dict[str, list[np.ndarray]]:
    """θ, m, e and w of this rank, by parameter."""
    outer = optimizer.outer_state
    layout = outer.parameters
    assert (outer.start, outer.stop) == (0, layout.numel)
    sizes = [t.numel() for t in layout.tensors]
    found = {"weights": [bits(t.float().cpu()).ravel() for t in layout.tensors]}
    for name in ("anchor", "momentum", "residual"):
        if (tensor := getattr(outer, name)) is not None:
            found[name] = [bits(part.cpu()) for part in tensor.split(sizes)]
    return found


def shard_of_whole(whole: dict[str, list[np.ndarray]], like: Any) -> dict[str, list[np.ndarray]]:
    """What a rank with the parameters of `like` should hold of the state of a site of one rank."""
    cut: dict[str, list[np.ndarray]] = {}
    for name, values in whole.items():
        cut[name] = []
        for value, p in zip(values, like.outer_state.parameters.params, strict=True):
            tensor = torch.from_numpy(value.view(np.int32).copy()).reshape(p.shape)
            if isinstance(p, DTensor):
                tensor = distribute_tensor(tensor, p.device_mesh, p.placements, src_data_rank=None).to_local()
            cut[name].append(tensor.contiguous().numpy().view(np.uint32).ravel())
    return cut


def assert_equal(mine: dict[str, list[np.ndarray]], expected: dict[str, list[np.ndarray]]) -> None:
    assert mine.keys() == expected.keys()
    for name in mine:
        for k, (a, b) in enumerate(zip(mine[name], expected[name], strict=True)):
            np.testing.assert_array_equal(a, b, f"{name} of parameter {k}")


def build(model: nn.Module, kind: str, topology: Any = None, **options: Any) -> Any:
    inner = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    return getattr(loco, kind)(inner, sync_every=H, topology=topology, **options)
