"""The tensors of a model or an engine, and what this process holds of them."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from ..versions.layout import Region
from .checkpoint import as_in_checkpoint

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Named = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Callable[[], Mapping[str, Tensor]]
SCALE = "_scale_inv"  # at the end of the names of scales in FP8 checkpoints
DtypeOf = torch.dtype | Callable[[str, Tensor], torch.dtype]


@dataclass(frozen=True)
class EngineSlice:
    """A part of a published tensor, and the view of an engine's memory that holds it.

    Attributes:
        region: one slice with a start and a stop for each dimension of the tensor.
        view: of the region's shape, and of the tensor's dtype.
    """

    region: tuple[slice, ...]
    view: Tensor


def tensors_of(source: Named) -> dict[str, Tensor]:
    """Parameters and the buffers that are saved, by all their names; of a transformers model by those of its
    checkpoint. DTensors stay what they are."""
    if isinstance(source, nn.Module):
        held = _tensors(source.state_dict(keep_vars=True))
        return held if any(map(is_sharded, held.values())) else as_in_checkpoint(source, held)
    return _tensors(dict(source() if callable(source) else source))


def _tensors(named: Mapping[str, Any]) -> dict[str, Tensor]:
    """What is no tensor is a module's extra state."""
    return {name: one.detach() for name, one in named.items() if isinstance(one, Tensor)}


def without_aliases(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """What two names share is listed once, by the first."""
    by_memory: dict[object, str] = {}
    for name, tensor in named.items():
        by_memory.setdefault(memory_of(tensor) or name, name)
    return {name: named[name] for name in by_memory.values()}


def memory_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Equal for tensors that are the same elements; None if there are none."""
    held = local_of(tensor)
    if not held.numel():
        return None
    return (held.device, held.data_ptr(), held.dtype, tuple(held.shape), held.stride())


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor, of which this process holds a part."""
    return hasattr(tensor, "_local_tensor")


def local_of(tensor: Tensor) -> Tensor:
    """The elements that this process holds."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def published_as(name: str, tensor: Tensor, dtype: DtypeOf) -> torch.dtype:
    """FP32 is rounded to the dtype of the receivers' weights, but for scales; other dtypes stay."""
    if tensor.dtype != torch.float32 or name.endswith(SCALE):
        return tensor.dtype
    return dtype(name, tensor) if callable(dtype) else dtype


def shard_of(
    name: str, tensor: "DTensor", dtype: torch.dtype, copy: int, copies: int
) -> tuple[Region, int, int] | None:
    """What this process holds of a DTensor, and which one this is of so many that hold the same; None if it
    holds nothing.

    Args:
        copy, copies: which one this is of so many DTensors of the same elements, each over ranks of its own.

    Raises:
        ValueError: the part is no box of elements.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return None
    offset, size = [0] * tensor.dim(), list(tensor.shape)
    # FSDP over a tensor that tensor parallelism divides: its strided placement comes first, and divides last.
    order = sorted(range(mesh.ndim), key=lambda k: (hasattr(placements[k], "split_factor"), k))
    for k in order:
        if placements[k].is_replicate():
            copy, copies = copy * mesh.shape[k] + coordinates[k], copies * mesh.shape[k]
        elif (dim := getattr(placements[k], "dim", None)) is not None:
            chunk = -(-size[dim] // mesh.shape[k])
            start, stop = (min(chunk * at, size[dim]) for at in (coordinates[k], coordinates[k] + 1))
            offset[dim], size[dim] = offset[dim] + start, stop - start
    if tuple(size) != tuple(local_of(tensor).shape):
        raise ValueError(
            f"{name} is divided as {placements}, of which this rank holds {list(local_of(tensor).shape)}; "
            f"loco.sync publishes tensors that are divided by Shard or copied by Replicate"
        )
    part = Region(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype,
        offset=tuple(offset),
        size=tuple(size),
        start=0,
        stop=math.prod(size),
    )
    return part, copy, copies
