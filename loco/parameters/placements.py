"""How a DTensor is divided, as plain data, and which elements that means."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def describe_placement(placement: Any) -> list[Any]:
    """JSON-able. Raises a ValueError for a sum that is not complete."""
    if placement.is_partial():
        raise ValueError("a DTensor that is a partial sum can't be saved: redistribute it to Shard")
    if placement.is_replicate():
        return ["Replicate"]
    factor = getattr(placement, "split_factor", None)  # FSDP2 over a tensor that was divided before
    return ["Shard", placement.dim] if factor is None else ["StridedShard", placement.dim, factor]


def placement_of(described: Any) -> Any:
    """The inverse of `describe_placement`; a ValueError if that has not written it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    match described:
        case ["Replicate"]:
            return Replicate()
        case ["Shard", int(dim)]:
            return Shard(dim)
        case ["StridedShard", int(dim), int(factor)]:
            return _StridedShard(dim, split_factor=factor)
    raise ValueError(f"a tensor is said to be divided as {described!r}, which loco does not write")


def held_elements(
    shape: Sequence[int], placements: Sequence[Any], mesh: Sequence[int], coordinates: Sequence[Sequence[int]]
) -> Tensor:
    """Which elements of a tensor of this shape a rank holds: their flat positions, in the shape of its part.

    Args:
        placements: described, by dimension of the mesh.
        mesh: its shape.
        coordinates: (dimension of the mesh, position in it), for those along which the tensor is divided.
    """
    held = torch.arange(torch.Size(shape).numel()).view(*shape)
    for dim, at in coordinates:
        kind, along, *factor = placements[dim]
        pieces = _chunks(held, factor[0], along) if kind == "StridedShard" else [held]
        held = torch.cat([_chunks(piece, mesh[dim], along)[at] for piece in pieces], dim=along)
    return held


def _chunks(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
    """As torch.chunk, but the last ones may be empty."""
    size = -(-tensor.shape[dim] // count)
    edges = [min(k * size, tensor.shape[dim]) for k in range(count + 1)]
    return [tensor.narrow(dim, edges[k], edges[k + 1] - edges[k]) for k in range(count)]
