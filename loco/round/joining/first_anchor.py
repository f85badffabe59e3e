"""Where θ begins: with site 0's weights, at construction and when weights from outside are adopted."""

from typing import Any

from ...coordination.rendezvous import NeededError
from ...errors import LocoError, PeerError
from ...members.view import SiteTopology, View
from ..inside_site import share_anchor
from ..outer.outer_state import OuterState
from ..outer.step_length import StepLength
from .handshake import check_first_anchor, first_nonfinite


def share_first_anchor(state: OuterState, view: View | None) -> None:
    """Give site 0's θ to all sites of a view; w = cast(θ). All ranks of the topology prove that they have it.

    Args:
        view: None: θ stays what it is.

    Raises:
        ValueError: on all ranks: θ is not finite.
        ReplicaError: on all ranks: a site has another θ.
        TransportError: a link is lost.
    """
    if view is not None:
        view.across.broadcast(state.anchor, phase="first anchor")
    state.write_weights()
    if view is not None:
        share_anchor(state, view)
    check_first_anchor(state.topology.all_ranks(), state)


def start_again(state: OuterState) -> None:
    """θ = this rank's own weights; nothing is withheld, and nothing is in motion."""
    state.read_weights()
    for tensor in (state.momentum, state.residual):
        if tensor is not None:
            tensor.zero_()
    if state.step_length is not None:
        state.step_length = StepLength.of(state.numel)
    state.anchor_incomplete = False


def agree_to_adopt(state: OuterState, *, others_may_be_ahead: bool, round_in_doubt: bool) -> None:
    """Return on all ranks once all have come, and site 0's weights can be adopted; or raise on all.

    Args:
        others_may_be_ahead: sites come and go.
        round_in_doubt: this rank does not know yet what became of its latest round.

    Raises:
        ValueError, LocoError: this rank can't.
        PeerError: another rank can't.
        TransportError: a rank is dead, stopped or cut off, or did not come.
        CheckpointError: ranks came for something else.
    """
    if others_may_be_ahead:
        raise ValueError(
            "sites that come and go take θ from each other, so that none can set it for all: load the "
            "weights on every site before you build the optimizer, and start the run anew"
        )
    failure: Exception | None = None
    if round_in_doubt:
        failure = LocoError(
            f"round {state.rounds_done + 1} was interrupted: call settle() on every rank, load the weights "
            f"again, and then call adopt_weights()"
        )
    elif state.topology.site == 0:
        failure = _non_finite(state)
    phase = f"adopting weights after round {state.rounds_done}"
    told = _swap(state.topology, {"failure": None if failure is None else str(failure)}, phase)
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(told):
        if theirs["failure"] is not None:
            who = state.topology.rendezvous.called(rank)
            raise PeerError(f"{phase}: {who} can't: {theirs['failure']}. No state has changed")


def _swap(topology: SiteTopology, note: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    while True:
        try:
            return topology.rendezvous.exchange_notes(note, phase)
        except NeededError:
            topology.rendezvous.reconnect()


def _non_finite(state: OuterState) -> ValueError | None:
    position = state.start
    with state.parameters.pieces(state.start, state.stop) as pieces:
        for weights in pieces:
            bad = first_nonfinite(weights)
            if bad >= 0:
                name = state.parameters.name_at(position + bad)
                return ValueError(
                    f"parameter {name} is infinite or NaN on the first site: it can't be adopted"
                )
            position += weights.numel()
    return None
