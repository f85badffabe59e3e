"""What the ops are told and what they return; the same for every home of an op."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Entries(NamedTuple):
    """Entries of a flat FP32 vector: sorted positions and values, or a whole vector (no positions)."""

    indices: Tensor | None  # [k] int64, strictly increasing; None: every position, k = n
    values: Tensor  # [k] float32


class Encoded(NamedTuple):
    """What one pass over a site's state finds out."""

    entries: Entries
    digest: int  # of θ, 64 bits
    first_nonfinite: int  # position of the first s that is infinite or NaN, or -1


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Send an entry when its update, times `gain`, would change the BF16 cast of its weight."""

    gain: float = 1.0  # γ


@dataclass(frozen=True, kw_only=True)
class OuterStep:
    """The outer optimizer's constants. They are rounded to FP32 where they meet FP32 tensors."""

    num_sites: int  # R
    lr: float  # α
    momentum: float  # μ
    nesterov: bool
