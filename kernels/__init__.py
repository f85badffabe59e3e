"""What touches every element of the outer state, dispatched by the device the state lives on.

`reference` is the specification, and serves every device that has no faster home yet.
"""

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from . import reference
from .types import Encoded, Entries, Gate, OuterStep

__all__ = [
    "Encoded",
    "Entries",
    "Gate",
    "OuterStep",
    "apply",
    "digest",
    "encode",
    "norm",
    "write_weights",
]

_homes: dict[str, ModuleType] = {}  # device type -> a module with the ops of `reference`


def _home(tensor: Tensor) -> ModuleType:
    return _homes.get(tensor.device.type, reference)


def encode(anchor: Tensor, weights: Sequence[Tensor], residual: Tensor | None, gate: Gate | None) -> Encoded:
    return _home(anchor).encode(anchor, weights, residual, gate)


def apply(
    anchor: Tensor,
    momentum: Tensor | None,
    weights: Sequence[Tensor],
    residual: Tensor | None,
    own: Entries,
    contributions: Sequence[Entries],
    outer: OuterStep,
) -> None:
    _home(anchor).apply(anchor, momentum, weights, residual, own, contributions, outer)


def write_weights(anchor: Tensor, weights: Sequence[Tensor]) -> None:
    _home(anchor).write_weights(anchor, weights)


def digest(data: Tensor) -> int:
    return _home(data).digest(data)


def norm(x: Tensor) -> float:
    return _home(x).norm(x)
