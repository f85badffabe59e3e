"""Where two overlapped rounds meet: the one that has come is applied, the next one is sent off.

    1. m, θ = the outer step of the round that has come; what it returned goes into e
    2. Δ = float(ŵ) − float(w)          ŵ: what w was set to at the boundary before
    3. s = Δ + e, which is gated as ever against the new θ; v is sent
    4. e = s − v
    5. ŵ = w = cast(θ − β·v)            what is on its way stays in the weights of its site

Only v is kept until the next boundary: from it and θ, which changes at boundaries alone, ŵ is computed again.

The passes over all elements are the ops of rounds that wait, so they have their bits on every device. Where w
began from cast(θ), as it did wherever nothing was sent, Δ is theirs too. The elements that were sent are done
by themselves before: with e = s and w = cast(θ), for which the passes find Δ = 0.
"""

import math
from collections.abc import Sequence

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
            _collect_sent(state)
            norm = _pass(state, None, [], _STILL)
            return _send_off(state, norm)[0]
    with come.applying() as step:
        _take_back_returned(state, come)
        _collect_sent(state)
        norm = _pass(state, state.momentum, come.contributions, step)
        encoded, come.residual_norm = _send_off(state, norm)
        return encoded


@torch.no_grad()
def land(state: OuterState, come: Round) -> None:
    """Apply a round that has come before any inner step was made: w = cast(θ)."""
    with come.applying() as step:
        _take_back_returned(state, come)
        _collect_sent(state)
        come.residual_norm = _pass(state, state.momentum, come.contributions, step)
        state.ahead = None


@torch.no_grad()
def take_back(state: OuterState, entries: Entries) -> None:
    """e = e + v, where v has not been sent after all."""
    assert state.residual is not None
    at = slice(None) if entries.starts is None else entries.indices()
    state.residual[at] += entries.values


def first_unusable(state: OuterState) -> int:
    """The first position of this rank's part whose weight is infinite or NaN; −1 if there is none."""
    position = 0
    with state.parameters.pieces(state.start, state.stop) as pieces:
        for weights in pieces:
            if not all_finite(weights):
                return position + int(weights.isfinite().logical_not().nonzero()[0])
            position += weights.numel()
    return -1


def _take_back_returned(state: OuterState, come: Round) -> None:
    if come.kept is not None:
        take_back(state, come.kept)
    if come.view.site in come.left_out:
        assert state.ahead is not None
        take_back(state, state.ahead)


def _pass(
    state: OuterState, momentum: Tensor | None, contributions: Sequence[Entries], step: OuterStep
) -> float:
    """1 to 3: e = Δ + e; m, θ; w = cast(θ) -> the norm of e."""
    nothing = Entries.none(state.numel, state.device)
    with state.parameters.pieces(state.start, state.stop, write=True) as weights:
        outer = state.anchor, momentum, weights, state.residual
        return kernels.apply(*outer, nothing, contributions, step)


def _collect_sent(state: OuterState) -> None:
    """2, 3. Of the elements that were sent e = s and w = cast(θ)."""
    v, residual, beta = state.ahead, state.residual, state.settings.overlap
    assert residual is not None
    assert beta is not None
    if v is not None:
        with state.parameters.pieces(state.start, state.stop, write=True) as weights:
            kernels.collect_sent(state.anchor, weights, residual, v, beta)


def _send_off(state: OuterState, norm: float) -> tuple[Encoded, float]:
    """3 to 5, where e = s and w = cast(θ), so that Δ is 0 -> and the norm of the new e.

    Args:
        norm: of s.
    """
    residual, beta = state.residual, state.settings.overlap
    assert residual is not None
    assert beta is not None
    with state.parameters.pieces(state.start, state.stop, write=True) as weights:
        encoded = kernels.encode(state.anchor, weights, residual, state.gate)
        if encoded.first_nonfinite >= 0:
            name = state.parameters.name_at(state.start + encoded.first_nonfinite)
            raise NonFiniteError(
                f"FP32 has no room for how far parameter {name} has moved: load the last checkpoint"
            )
        state.ahead = encoded.entries
        less = kernels.send_off(state.anchor, weights, residual, encoded.entries, beta)
    return encoded, math.sqrt(max(norm * norm + less, 0.0))
