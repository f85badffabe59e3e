"""Where two overlapped rounds meet: the one that has come is applied, the next one is sent off.

    1. m, θ = the outer step of the round that has come; what it returned goes into e
    2. Δ = float(ŵ) − float(w)          ŵ: what w was set to at the boundary before
    3. s = Δ + e, which is gated as ever against the new θ; v is sent
    4. e = s − v
    5. ŵ = w = cast(θ − β·v)            what is on its way stays in the weights of its site

Only v is kept until the next boundary: from it and θ, which changes at boundaries alone, ŵ is computed again.
Each step is one of the ops of rounds that wait, so it has their bits on every device.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from loco import kernels
from loco.kernels import Encoded, Entries, OuterStep, all_finite

from ...errors import NonFiniteError
from ..outer_state import OuterState
from ..round import Round

_STILL = OuterStep(num_sites=1, lr=0.0, momentum=0.0, nesterov=False)


@torch.no_grad()
def cross(state: OuterState, come: Round | None) -> Encoded:
    """A boundary -> what the next round sends, which is in `state.ahead`, too.

    Args:
        come: a committed round; None: none has come, as at the first boundary, or after one that failed.

    Raises:
        NonFiniteError: an s is infinite. The state is of no use any more.
    """
    if come is None:
        with state.rewriting():
            _collect(state)
            state.write_weights()
            return _send_off(state)
    with come.applying() as step:
        _take_back_returned(state, come)
        _collect(state)
        _step(state, come, step)
        return _send_off(state)


@torch.no_grad()
def land(state: OuterState, come: Round) -> None:
    """Apply a round that has come before any inner step was made: w = cast(θ)."""
    with come.applying() as step:
        _take_back_returned(state, come)
        _step(state, come, step)
        state.ahead = None


@torch.no_grad()
def take_back(state: OuterState, entries: Entries) -> None:
    """e = e + v, where v has not been sent after all."""
    assert state.residual is not None
    state.residual[_positions(entries)] += entries.values


def first_unusable(state: OuterState) -> int:
    """The first position of this rank's part whose weight is infinite or NaN; −1 if there is none."""
    position = 0
    with state.parameters.pieces(state.start, state.stop) as pieces:
        for weights in pieces:
            if not all_finite(weights):
                return position + int(weights.isfinite().logical_not().nonzero()[0])
            position += weights.numel()
    return -1


@contextmanager
def base(state: OuterState) -> Iterator[Tensor]:
    """θ − β·v in the place of θ, of which ŵ is the cast. Not while a round is in flight, which reads θ."""
    v, anchor = state.ahead, state.anchor
    if v is None or not state.settings.overlap:
        yield anchor
        return
    at = _positions(v)
    theta = anchor[at].clone()
    anchor[at] = theta - state.settings.overlap * v.values
    try:
        yield anchor
    finally:
        anchor[at] = theta


def _take_back_returned(state: OuterState, come: Round) -> None:
    if come.kept is not None:
        take_back(state, come.kept)
    if come.view.site in come.left_out:
        assert state.ahead is not None
        take_back(state, state.ahead)


def _step(state: OuterState, come: Round, step: OuterStep) -> None:
    """1. m, θ, and w = cast(θ)."""
    nothing = Entries.none(state.numel, state.device)
    with state.parameters.pieces(state.start, state.stop, write=True) as weights:
        kernels.apply(state.anchor, state.momentum, weights, None, nothing, come.contributions, step)


def _collect(state: OuterState) -> None:
    """2, 3. e = Δ + e, and w = ŵ."""
    nothing = Entries.none(state.numel, state.device)
    with base(state) as anchor, state.parameters.pieces(state.start, state.stop, write=True) as weights:
        kernels.apply(anchor, None, weights, state.residual, nothing, [], _STILL)


def _send_off(state: OuterState) -> Encoded:
    """3 to 5, where e = s and w = cast(θ), so that Δ is 0."""
    assert state.residual is not None
    with state.parameters.pieces(state.start, state.stop) as weights:
        encoded = kernels.encode(state.anchor, weights, state.residual, state.gate)
    if encoded.first_nonfinite >= 0:
        name = state.parameters.name_at(state.start + encoded.first_nonfinite)
        raise NonFiniteError(
            f"FP32 has no room for how far parameter {name} has moved: load the last checkpoint"
        )
    v = state.ahead = encoded.entries
    state.residual[_positions(v)] -= v.values
    with base(state):
        state.write_weights()
    return encoded


def _positions(entries: Entries) -> Tensor | slice:
    return slice(None) if entries.starts is None else entries.indices()
