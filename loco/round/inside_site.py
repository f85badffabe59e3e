"""What the ranks of one site tell each other: that they hold one model, and each its slice of a new θ."""

import math
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from loco import kernels

from ..members.view import View
from ..net.transport import Transport
from ..parameters.flat_parameters import FlatParameters
from ..parameters.part import Copies, Part
from ..wire.records import Status
from ..wire.refusal import Problem
from .outer.outer_state import OuterState
from .outer.step_length import Agreement

GATHER_ELEMENTS = 1 << 20  # of the anchor at a time: 4 MiB from each rank
_DIGEST, _NUMBERS, _AGREEMENT = 8, struct.Struct("<d f"), struct.Struct("<6d")


class Compared(NamedTuple):
    """
    norm: of what the ranks of this site would send.
    problem: what speaks against the round.
    agreement: of the round before with those before it, where the outer step finds its length.
    """

    norm: float
    problem: Problem | None
    agreement: Agreement


def compare(
    inside: Transport,
    state: OuterState,
    norm: float,
    weight: float,
    round: int,
    *,
    copies: Callable[[], bytes] | None,
) -> Compared:
    """The ranks of a site exchange digests of what several of them hold alike: of whole parameters all of it,
    of sharded ones the replicas.

    Args:
        norm: the share of this rank in what the site would send, see `Part.norm`.
        weight: c, of the site, as this rank was told; 0 if it could not encode.
        copies: digests of what others hold, too. None: this rank could not encode, so it votes for its own
            reason, and has nothing to compare.
    """
    agreement = Agreement() if state.step_length is None else state.step_length.agreement
    if inside.size == 1:
        return Compared(norm, None, agreement)
    part, failure, digests = state.part, None, bytes(_DIGEST * len(state.part.copies))
    if copies is not None:
        try:
            digests = copies()
        except Exception as error:
            failure = Problem(Status.FAILED, seen=error)
    phase = f"round {round}, weights inside the site"
    mine = digests + _NUMBERS.pack(norm, weight)
    if state.step_length is not None:
        mine += _AGREEMENT.pack(*agreement)
    told = inside.swap_records(mine, phase=phase, limit=inside.patience)
    norms, weights = zip(*(_NUMBERS.unpack_from(record, len(digests)) for record in told), strict=True)
    if state.step_length is not None:
        at = len(digests) + _NUMBERS.size
        agreement = Agreement.joined([Agreement(*_AGREEMENT.unpack_from(record, at)) for record in told])
    if failure is None and differing_copies(told, part):
        failure = Problem(Status.SITE_DRIFT)
    if failure is None and len(set(weights) - {0.0}) > 1:
        failure = Problem(Status.FAILED, seen=_several(weights))
    return Compared(math.hypot(*norms), failure, agreement)


def _several(weights: Sequence[float]) -> ValueError:
    return ValueError(
        f"the ranks of this site set its weight to {', '.join(f'{one:g}' for one in weights)}: set "
        f"optimizer.weight to the same number on all of them, such as the sum of what each has counted"
    )


def digests_of_copies(parameters: FlatParameters, part: Part) -> bytes:
    """Of the weights that other ranks of this site hold too, in the order of `part.copies`; zeros for those
    that this rank does not hold."""
    return b"".join(
        kernels.digest_of_all(parameters.of(copies.params)) if part.rank in copies.ranks else bytes(_DIGEST)
        for copies in part.copies
    )


def differing_copies(told: Sequence[bytes], part: Part) -> Copies | None:
    """The first ones that should be equal and are not.

    Args:
        told: by rank of the site, what begins with its `digests_of_copies`; all zeros if it could not compute
            them.
    """
    for k, copies in enumerate(part.copies):
        found = {told[rank][k * _DIGEST : (k + 1) * _DIGEST] for rank in copies.ranks}
        if len(found - {bytes(_DIGEST)}) > 1:
            return copies
    return None


def await_site(inside: Transport, *, phase: str) -> None:
    """Return once all ranks of this site have come this far."""
    if inside.size > 1:
        inside.swap_records(b"\1", phase=phase, limit=inside.patience)


def share_anchor(state: OuterState, view: View, *, write: bool = True, ahead: bool = True) -> None:
    """Where the ranks of a site each have the new θ of a slice, all need its cast, w = cast(θ).

    Args:
        write: False only sends, because the weights of this rank have moved on.
        ahead: where rounds overlap, cast(θ − β·v), from which the inner steps begin.
    """
    inside, parameters, slices = view.inside, state.parameters, state.part.slices
    if len(slices) == 1:
        return
    phase = f"round {state.rounds_done}, anchor inside the site"
    width = slices[0].stop  # of the longest
    for low, high in pairwise([*range(0, width, GATHER_ELEMENTS), width]):
        # The last slices may be shorter, or empty: what they lack is sent as zeros, and nobody looks at it.
        part = state.anchor.new_zeros(high - low)
        mine = (state.began_from if ahead else state.anchor.__getitem__)(slice(low, min(high, state.numel)))
        part[: mine.numel()] = mine
        for rank, values in enumerate(inside.gather(part, phase=phase)):
            first, last = slices[rank].start + low, min(slices[rank].start + high, slices[rank].stop)
            if not write or rank == inside.rank or first >= last:
                continue
            with parameters.pieces(first, last, write=True) as weights:
                kernels.write_weights(values[: last - first], weights)
    state.lacks_slices = state.lacks_slices and not write
