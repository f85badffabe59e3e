"""Boxes in tensors: which box of a tensor a view of it covers, and what several boxes cover."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

Box = tuple[slice, ...]  # one slice with a start and a stop for each dimension


def box_of(part: Tensor, whole: Tensor) -> Box | None:
    """The box of `whole` that its view `part` covers, whatever the order of its dimensions.

    Only geometry is read, so meta tensors will do. None if the elements of `part` are no box: they lie some
    steps apart, or one is repeated, or `whole` doesn't hold one of them.
    """
    if not part.numel():
        return tuple(slice(0, 0) for _ in whole.shape)
    first = int(part.storage_offset() - whole.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    low, high = _coordinates(first, whole), _coordinates(last, whole)
    if low is None or high is None:
        return None
    box = tuple(slice(start, end + 1) for start, end in zip(low, high, strict=True))
    region = _in_memory_order(whole[box])
    try:
        laid_out = _in_memory_order(part).view(region.shape)
    except RuntimeError:  # of another size, or its strides are not those of any box
        return None
    return box if laid_out.stride() == region.stride() else None


def memory_order(tensor: Tensor) -> list[int]:
    """The dimensions, those with the largest stride first."""
    return sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))


def sizes(box: Box) -> list[int]:
    return [one.stop - one.start for one in box]


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two of the boxes, by index, that have an element in common; None if no two have."""
    if len(boxes) < 2:
        return None
    starts, stops = (
        torch.tensor([[getattr(one, side) for one in box] for box in boxes]) for side in ("start", "stop")
    )
    meet = (torch.maximum(starts[:, None], starts) < torch.minimum(stops[:, None], stops)).all(-1)
    pairs = meet.triu(diagonal=1).nonzero()
    return (int(pairs[0, 0]), int(pairs[0, 1])) if len(pairs) else None


def elements_outside(boxes: Sequence[Box], shape: torch.Size) -> int:
    """How many elements of a tensor of this shape are in none of the boxes."""
    if first_overlap(boxes) is None:
        return shape.numel() - sum(prod(sizes(box)) for box in boxes)
    reached = torch.zeros(shape, dtype=torch.bool)
    for box in boxes:
        reached[box] = True
    return int((~reached).sum())


def _coordinates(offset: int, whole: Tensor) -> list[int] | None:
    """Of the element of `whole` that lies `offset` elements after its first."""
    found = [0] * whole.ndim
    for dim in memory_order(whole):
        if whole.shape[dim] > 1:
            found[dim], offset = divmod(offset, whole.stride(dim))
    inside = all(0 <= at < size for at, size in zip(found, whole.shape, strict=True))
    return found if inside and offset == 0 else None


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The same elements with the largest stride first, without dimensions of one."""
    return tensor.squeeze().permute(memory_order(tensor.squeeze()))
