"""Checks that the publishers together publish every element that is held, once."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import combinations, pairwise

from torch import Tensor

from ..errors import LayoutError
from ..versions.layout import Region
from .tensors import memory_of


def check_coverage(
    regions: Iterable[Region], tensors: Mapping[str, Tensor], in_parts: Collection[str] = ()
) -> None:
    """
    Args:
        regions: of all publishers; each lies inside the tensor of its name.
        tensors: that are held.
        in_parts: the names of those of which only parts are held.

    Raises:
        LayoutError: an element is published twice, or not at all; names the tensor.
    """
    published = defaultdict[str, list[Region]](list)
    for region in regions:
        published[region.name].append(region)
    for name, parts in published.items():
        numel, total = math.prod(parts[0].shape), sum(region.stop - region.start for region in parts)
        if total != numel or _overlap(parts):
            which = "some are missing" if total < numel else "some are published twice"
            raise LayoutError(
                f"{name} has {numel} elements, and its publishers publish {total} of them: {which}. Each "
                f"rank's shard must be published once"
            )
    memories = {memory_of(tensors[name]) for name in published if name in tensors}
    for name in (*tensors, *in_parts):
        empty_or_shared = name in tensors and memory_of(tensors[name]) in (None, *memories)
        if name not in published and not empty_or_shared:
            raise LayoutError(
                f"{name} is held here, and is not published. If the publisher has it as another name of one "
                f"of its tensors, tie them here too, or leave it out"
            )


def _overlap(regions: list[Region]) -> bool:
    """Whether two of these regions share an element: if the counts fit, another element is then missing."""
    boxes = defaultdict[tuple[tuple[int, ...], tuple[int, ...]], list[Region]](list)
    for region in regions:
        if region.start < region.stop:
            boxes[region.offset, region.size].append(region)
    for shares in boxes.values():
        shares.sort(key=lambda region: region.start)
        if any(a.stop > b.start for a, b in pairwise(shares)):
            return True
    # No publisher cuts a tensor into boxes that overlap, whichever of their elements it publishes.
    return any(
        all(p < q + m and q < p + n for p, n, q, m in zip(*a, *b, strict=True))
        for a, b in combinations(boxes, 2)
    )
