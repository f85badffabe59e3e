"""The weights beside θ: whether they are still its cast, and θ shown in their place for an evaluation."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from loco import kernels
from loco.kernels import Entries

from .outer_state import OuterState

_logger = logging.getLogger(__name__)


def require_cast_of_anchor(state: OuterState) -> None:
    """
    Raises:
        ValueError: a weight of this rank's slice is not cast(θ) or, where rounds overlap, cast(θ − β·v).
    """
    if name := first_changed(state, None if state.ahead is None else state.ahead.entries):
        since = f"round {state.rounds_done}" if state.rounds_done else "the optimizer was built"
        raise ValueError(
            f"parameter {name} was changed from outside since {since}, so it is no longer the cast of θ, "
            f"which all sites hold: load the weights before you build the optimizer, or call "
            f"optimizer.adopt_weights() on every rank once they are loaded"
        )


@torch.no_grad()
def first_changed(state: OuterState, sent: Entries | None = None) -> str | None:
    """The first parameter of this rank's slice whose weights are not cast(θ), in values; None if all are.

    Args:
        sent: what the weights run ahead of θ by.
    """
    with state.parameters.pieces(state.start, state.stop) as weights:
        position = kernels.first_changed(state.anchor, weights, sent, state.ahead_by)
    return None if position < 0 else state.name_at(position)


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
        if name := first_changed(self._state):
            _logger.warning("parameter %s was changed in eval mode, and train() discards that", name)
        self._write()

    def _write(self) -> None:
        parameters = self._state.parameters
        parameters.drop_gathered_copies()
        for w, kept in zip(parameters.tensors, self.weights, strict=True):
            w.copy_(kept)
