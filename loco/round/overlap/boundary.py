"""Where two overlapped rounds meet: the one that has come is applied, the next one is sent off.

    1. m, θ = the outer step of the round that has come; what it returned goes into e
    2. Δ = float(ŵ) − float(w)          ŵ: what w was set to at the boundary before
    3. s = Δ + e, which is gated as ever against the new θ; v is sent
    4. e = s − v
    5. ŵ = w = cast(θ − β·v)            what is on its way stays in the weights of its site

Only v is kept until the next boundary: from it and θ, which changes at boundaries alone, ŵ is computed again.
"""

import torch

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
            return _pass(state, None, _STILL, sends=True)[0]
    with come.applying() as step:
        encoded, come.residual_norm = _pass(state, come, step, sends=True)
        return encoded


@torch.no_grad()
def land(state: OuterState, come: Round) -> None:
    """Apply a round that has come before any inner step was made: w = cast(θ)."""
    with come.applying() as step:
        come.residual_norm = _pass(state, come, step, sends=False)[1]
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


def _pass(state: OuterState, come: Round | None, step: OuterStep, *, sends: bool) -> tuple[Encoded, float]:
    """-> what is sent, and the norm of e."""
    residual, beta = state.residual, state.settings.overlap
    assert residual is not None
    assert beta is not None
    momentum, contributions, step = None, (), _STILL
    if come is not None:
        momentum, contributions, step = (
            state.momentum,
            come.contributions,
            state.step_over(come.view.num_sites),
        )
        for returned in _returned(state, come):
            take_back(state, returned)
    with state.parameters.pieces(state.start, state.stop, write=True) as weights:
        outer = state.anchor, momentum, weights, residual
        encoded, norm = kernels.cross(*outer, state.ahead, contributions, step, state.gate, beta, sends=sends)
    if encoded.first_nonfinite >= 0:
        name = state.parameters.name_at(state.start + encoded.first_nonfinite)
        raise NonFiniteError(
            f"FP32 has no room for how far parameter {name} has moved: load the last checkpoint"
        )
    state.ahead = encoded.entries
    return encoded, norm


def _returned(state: OuterState, come: Round) -> list[Entries]:
    """What this rank has sent and the round has not used."""
    left_out = come.view.site in come.left_out
    return [entries for entries in (come.kept, state.ahead if left_out else None) if entries is not None]
