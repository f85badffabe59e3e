"""The weights beside θ: whether they are still its cast, and θ shown in their place for an evaluation."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from loco.kernels.reference import cast

from .outer_state import OuterState

_logger = logging.getLogger(__name__)
_AT_A_TIME = 1 << 20  # elements


def require_cast_of_anchor(state: OuterState) -> None:
    """
    Raises:
        ValueError: a weight of this rank's slice is not cast(θ) or, where rounds overlap, cast(θ − β·v).
    """
    if name := first_changed(state, _began_from(state)):
        since = f"round {state.rounds_done}" if state.rounds_done else "the optimizer was built"
        raise ValueError(
            f"parameter {name} was changed from outside since {since}, so it is no longer the cast of θ, "
            f"which all sites hold: load the weights before you build the optimizer, or call "
            f"optimizer.adopt_weights() on every rank once they are loaded"
        )


@torch.no_grad()
def first_changed(state: OuterState, expected: Callable[[slice], Tensor]) -> str | None:
    """The first parameter of this rank's slice whose weights are not the cast of what is expected, in values;
    None if all are.

    One pass, which reads 4 bytes of θ for each parameter, and the weights.
    """
    position = state.start
    with state.parameters.pieces(state.start, state.stop) as pieces:
        for weights in pieces:
            for part in weights.split(_AT_A_TIME):
                begin = position - state.start
                theta = expected(slice(begin, begin + part.numel()))
                if not torch.equal(cast(theta.to(part.device), part.dtype), part):
                    return state.parameters.name_at(position)
                position += part.numel()
    return None


def _began_from(state: OuterState) -> Callable[[slice], Tensor]:
    """What the inner steps began from is the cast of this: θ, or where rounds overlap θ − β·v."""
    v, beta = state.ahead, state.settings.overlap
    if v is None or not beta:
        return state.anchor.__getitem__
    if v.starts is None:
        return lambda at: state.anchor[at] - beta * v.values[at]
    where = v.indices()

    def ahead(at: slice) -> Tensor:
        edges = torch.tensor([at.start, at.stop], device=where.device)
        first, last = torch.searchsorted(where, edges).tolist()
        theta = state.anchor[at].clone()
        theta[where[first:last] - at.start] -= beta * v.values[first:last]
        return theta

    return ahead


class ShownAnchor:
    """cast(θ) in the place of the weights, which are kept aside.

    Args:
        state: of this rank.
        show: writes cast(θ) into the weights. If it raises, they are given back.

    Attributes:
        weights: what the inner steps had made of them, by parameter.
    """

    @torch.no_grad()
    def __init__(self, state: OuterState, show: Callable[[], object]) -> None:
        self._state = state
        self.weights: list[Tensor] = [w.clone() for w in state.parameters.tensors]
        try:
            show()
        except BaseException:
            self._write()
            raise

    @torch.no_grad()
    def give_back(self) -> None:
        """The weights are again what they were, bit for bit."""
        if name := first_changed(self._state, self._state.anchor.__getitem__):
            _logger.warning("parameter %s was changed in eval mode, and train() discards that", name)
        self._write()

    def _write(self) -> None:
        parameters = self._state.parameters
        parameters.drop_gathered_copies()
        for w, kept in zip(parameters.tensors, self.weights, strict=True):
            w.copy_(kept)
