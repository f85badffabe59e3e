"""Whether the sum of all sites' entries is finite: asked before the last vote, in every exchange."""

from collections.abc import Sequence

import torch

from loco import kernels
from loco.kernels import Entries


def adds_up_to_infinity(contributions: Sequence[Entries], numel: int) -> bool:
    """Whether an element of the sum of finite contributions is infinite.

    A single contribution is a sum that was checked where it was made, or that of one site alone. Others are
    added up only if their largest values could overflow.
    """
    if len(contributions) <= 1:
        return False
    bounds = [entries.values.aminmax() for entries in contributions if entries.values.numel()]
    if sum(max(-float(low), float(high)) for low, high in bounds) <= torch.finfo(torch.float32).max:
        return False
    return not kernels.all_finite(kernels.add_up(contributions, numel).values)
