"""One site gives another θ and m, over the links between them, and the other proves that it holds them."""

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...errors import TransportError, WireError
from ...logs import Progress
from ...members.view import Handover, View
from ...net.transport import CHUNK, Transport, as_bytes
from ...report import SiteTotals, SyncReport
from ..inside_site import await_site, share_anchor
from ..outer.outer_state import OuterState
from ..outer.state import digest_of
from ..outer.step_length import StepLength
from ..overlap.boundary import take_back

_logger = logging.getLogger(__name__)
MOST_HEAD_BYTES = 1 << 20  # of a few numbers, and a name and a number for every site


@dataclass(frozen=True, kw_only=True)
class Head:
    """What θ and m are of.

    round: rounds done.
    digests: of θ and of m.
    took_part: the last round that each site took part in, by name.
    step_length: of the outer step, if it finds it itself, without g and p.
    """

    round: int
    digests: list[str]
    took_part: dict[str, int] = field(default_factory=dict)
    step_length: dict[str, Any] | None = None


def give(link: Transport, peer: int, head: Head, tensors: list[Tensor]) -> None:
    """
    Raises:
        TransportError: the peer is gone.
    """
    phase = f"giving round {head.round} to {link.called(peer)}"
    link.send_blob(json.dumps(asdict(head)).encode(), [peer], phase=phase)
    with Progress(_logger, phase, sum(tensor.nbytes for tensor in tensors)) as progress:
        for part in _chunks(tensors):
            link.swap({peer: as_bytes(part.to(link.device))}, {}, phase=phase)
            progress.add(part.nbytes)


def take_head(link: Transport, peer: int) -> Head:
    """
    Raises:
        TransportError: the peer is gone.
        WireError: what it sent is no head.
    """
    phase = f"taking θ from {link.called(peer)}"
    blob = link.receive_blob(peer, phase=phase, most=MOST_HEAD_BYTES)
    try:
        head = Head(**json.loads(blob))
        whole = type(head.round) is int and head.round >= 0
        whole = whole and isinstance(head.digests, list) and isinstance(head.took_part, dict)
        whole = whole and all(isinstance(digest, str) for digest in head.digests)
        whole = whole and isinstance(head.step_length, dict | None)
        whole = whole and all(type(last) is int for last in head.took_part.values())
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"{phase}: it does not say what it gives ({error})") from error
    if not whole:
        raise WireError(f"{phase}: it does not say what it gives ({blob[:80]!r})")
    return head


def take(link: Transport, peer: int, head: Head, tensors: list[Tensor]) -> None:
    """Overwrite the tensors with what the peer gives. If it raises they hold a part of it.

    Raises:
        TransportError: the peer is gone, or what came is not what it gave.
    """
    phase = f"taking round {head.round} from {link.called(peer)}"
    with Progress(_logger, phase, sum(tensor.nbytes for tensor in tensors)) as progress:
        for part in _chunks(tensors):
            staged = torch.empty_like(part, device=link.device)
            link.swap({}, {peer: as_bytes(staged)}, phase=phase)
            part.copy_(staged)
            progress.add(part.nbytes)
    digests = [digest_of(tensor) for tensor in tensors]
    if digests != head.digests:
        raise TransportError(f"{phase}: what came has the digests {digests}, not {head.digests}")


def _chunks(tensors: list[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield from tensor.split(CHUNK)


def hand_over_state(state: OuterState, handover: Handover) -> None:
    """Give θ and m to the members that this site is to serve.

    Raises:
        TransportError: a link broke.
    """
    if not handover.receivers:
        return
    digests = [digest_of(tensor) for tensor in state.shared]
    length = None if state.step_length is None else state.step_length.state() | {"before": None}
    head = Head(round=state.rounds_done, digests=digests, took_part=state.took_part, step_length=length)
    handover.announce()
    for receiver in handover.receivers:
        give(handover.link, receiver, head, state.shared)
        _logger.warning("gave round %d to %s", state.rounds_done, handover.name_of(receiver))


def adopt_state(state: OuterState, view: View) -> SyncReport:
    """Take θ and m from the member that holds them, once its round is done. Each rank of a site takes its own
    part, and none has adopted the round before all have theirs.

    This site's residual, with what it had on its way, is kept only if the last round it took part in is the
    one it remembers: otherwise a part of it may have been sent since.

    Raises:
        TransportError: a link broke; `state.anchor_incomplete` says whether θ is of any use.
    """
    began, handover, inside = time.perf_counter(), view.handover, view.inside
    assert handover is not None
    assert handover.source is not None
    source, link = handover.source, handover.link
    handover.await_source()
    head = take_head(link, source)
    _step_length(state, head)  # what is no length is refused before anything is overwritten
    state.anchor_incomplete, sent_inside = True, inside.sent_bytes
    take(link, source, head, state.shared)
    await_site(inside, phase=f"taking round {head.round}, on all ranks of this site")
    state.write_weights()
    share_anchor(state, view, ahead=False)
    if state.on_its_way:
        take_back(state)
    with state.rewriting():
        state.ahead, state.step_length = None, _step_length(state, head)
        dropped = _drop_residual_if_outdated(state, head)
        state.rounds_done, state.took_part = head.round, dict(head.took_part)
    # Last: what Ctrl-C cuts off before it is done once more.
    state.anchor_incomplete = False
    _logger.warning("took round %d from %s", head.round, handover.name_of(source))
    if dropped:
        _logger.warning("%s", dropped)
    return SyncReport(
        round=state.rounds_done,
        numel=state.numel,
        entries=0,
        density=0.0,
        wire="float32",
        exchange="rejoin",
        payload_bytes=0,
        sent_bytes=link.sent_bytes,
        received_bytes=link.received_bytes,
        site_bytes=inside.sent_bytes - sent_inside,
        dense_bytes=0,
        update_norms=(),
        left_out=(),
        outer_lr=state.outer_lr,
        residual_norm=0.0 if state.residual is None else float(state.residual.double().norm()),
        seconds={"rejoin": time.perf_counter() - began},
        waited=0.0,
        # Each rank sends equally little.
        site=SiteTotals(
            numel=state.numel * inside.size,
            entries=0,
            sent_bytes=link.sent_bytes * inside.size,
            dense_bytes=0,
        ),
    )


def _step_length(state: OuterState, head: Head) -> StepLength | None:
    """As the peer has it, with l as it is here.

    Raises:
        WireError: it does not say.
    """
    if state.step_length is None:
        return None
    told = head.step_length or {}
    try:
        return StepLength.from_state(told | {"before": state.step_length.before}, state.numel)
    except ValueError as error:
        raise WireError(f"taking round {head.round}: {error}") from error


def _drop_residual_if_outdated(state: OuterState, head: Head) -> str:
    """-> what was dropped, and why; "" if nothing was."""
    name = state.topology.seat().get("name", "")
    last = head.took_part.get(name, 0)
    if state.residual is None or last == state.took_part.get(name, 0):
        return ""
    norm = float(state.residual.double().norm())
    state.residual.zero_()
    if not norm:
        return ""
    return (
        f"this site's residual of round {state.rounds_done} (norm {norm:.3g}) is dropped: the last round "
        f"it took part in is {last}, and a part of it may have been sent"
    )
