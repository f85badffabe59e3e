"""Where two overlapped rounds meet: the one that has come is applied, the next one is sent off.

    1. m, θ = the outer step of the round that has come; what it returned goes into e
    2. Δ = c·(float(ŵ) − float(w))      ŵ: what w was set to at the boundary before
    3. s = Δ + e, which is gated as ever against the new θ; v is sent
    4. e = s − v
    5. ŵ = w = cast(θ − β·v)            what is on its way stays in the weights of its site

Only v is kept until the next boundary: from it and θ, which changes at boundaries alone, ŵ is computed again.
"""

import torch

from loco import kernels
from loco.kernels import Entries, OuterStep

from ..outer.outer_state import OuterState
from ..round import Round


@torch.no_grad()
def cross(state: OuterState, come: Round | None) -> None:
    """A boundary. What the next round sends is `state.ahead`.

    A weight that is infinite or NaN begins from θ again, as if the inner steps had left it alone. All sites
    refuse the round to which this one comes so, and say which weight it was.

    Args:
        come: a committed round; None: none has come, as at the first boundary, or after one that failed.
    """
    if come is None:
        with state.rewriting():
            still = OuterStep(divisor=1, factor=state.weight, lr=0.0, momentum=0.0, nesterov=False)
            _pass(state, None, still, sends=True)
            state.on_its_way = state.rounds_done + 1
            state.lacks_slices = len(state.part.slices) > 1
        return
    with come.applying(state.weight) as step:
        come.residual_norm = _pass(state, come, step, sends=True)
        state.on_its_way = come.number + 1


@torch.no_grad()
def land(state: OuterState, come: Round) -> None:
    """Apply a round that has come before any inner step was made: w = cast(θ)."""
    with come.applying(state.weight) as step:
        come.residual_norm = _pass(state, come, step, sends=False)
        state.ahead, state.on_its_way = None, 0


@torch.no_grad()
def take_back(state: OuterState) -> None:
    """The round in flight failed: v goes with the next one."""
    assert state.ahead is not None
    assert state.residual is not None
    with state.rewriting():
        state.ahead.entries.add_to(state.residual)
        state.on_its_way = 0


def _pass(state: OuterState, come: Round | None, step: OuterStep, *, sends: bool) -> float:
    """-> the norm of e."""
    residual, beta = state.residual, state.beta
    assert residual is not None
    sent = None if state.ahead is None else state.ahead.entries
    momentum, contributions = None, ()
    returned: list[Entries] = []
    if come is not None:
        momentum, contributions = state.momentum, come.contributions
        unused = sent if come.view.site in come.left_out else None
        returned = [entries for entries in (come.kept, unused) if entries is not None]
    with state.parameters.pieces(state.start, state.stop, write=True) as weights:
        outer = state.anchor, momentum, weights, residual
        outer += sent, contributions, step, state.gate, beta
        before = {"returned": returned, "beta_before": state.ahead_by}
        state.ahead, norm = kernels.cross(*outer, **before, sends=sends)
        state.ahead_by = beta
    return norm
