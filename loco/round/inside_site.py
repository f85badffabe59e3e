"""What the ranks of one site tell each other: that they hold one model, and each its slice of a new θ."""

import math
import struct
from itertools import pairwise

from loco import kernels

from ..members.view import View
from ..net.transport import Transport
from ..wire.records import Status
from ..wire.refusal import Problem
from .outer_state import OuterState
from .parameters import FlatParameters

GATHER_ELEMENTS = 1 << 20  # of the anchor at a time: 4 MiB from each rank


def compare(
    inside: Transport, parameters: FlatParameters, norm: float, round: int, *, encoded: bool
) -> tuple[float, Problem | None]:
    """The ranks of a site exchange slices of what must be one and the same model.

    Args:
        norm: of what this rank would send.
        encoded: a rank that could not encode votes for its own reason, and has no digest to compare.

    Returns:
        The norm of what they all would send, and what speaks against the round.
    """
    if inside.size == 1:
        return norm, None
    failure, digest = None, bytes(8)
    if encoded:
        try:
            with parameters.pieces(0, parameters.numel) as weights:
                digest = kernels.digest_of_all(weights)
        except Exception as error:
            failure = Problem(Status.FAILED, seen=error)
    record = struct.pack("<8sd", digest, norm)
    phase = f"round {round}, weights inside the site"
    told = inside.swap_records(record, phase=phase, limit=inside.patience)
    found = [struct.unpack("<8sd", theirs) for theirs in told]
    known = {digest for digest, _ in found if digest != bytes(8)}
    norm = math.hypot(*(part for _, part in found))
    return norm, failure or (Problem(Status.SITE_DRIFT) if len(known) > 1 else None)


def share_anchor(state: OuterState, view: View, *, write: bool = True) -> None:
    """Each rank of a site has the new θ of its slice; all need its cast, w = cast(θ).

    Args:
        write: False only sends, because the weights of this rank have moved on.
    """
    inside, parameters, width = view.inside, state.parameters, state.width
    if inside.size == 1:
        return
    phase = f"round {state.rounds_done}, anchor inside the site"
    for low, high in pairwise([*range(0, width, GATHER_ELEMENTS), width]):
        # The last slices may be shorter, or empty: what they lack is sent as zeros, and nobody looks at it.
        part = state.anchor.new_zeros(high - low)
        mine = state.anchor[low:high]
        part[: mine.numel()] = mine
        for rank, values in enumerate(inside.gather(part, phase=phase)):
            first = rank * width + low
            last = min(first + high - low, (rank + 1) * width, parameters.numel)
            if not write or rank == inside.rank or first >= last:
                continue
            with parameters.pieces(first, last, write=True) as weights:
                kernels.write_weights(values[: last - first], weights)
