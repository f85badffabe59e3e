"""What every site tells all others before a round's entries travel: sizes, θ's digest, its update's norm; or
why it refuses the round.

All ranks that exchange entries with each other hear the same, so none of them sends any if one refuses.
Few entries follow their announcement in the same message: then no exchange is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from loco.kernels import Encoded

from ..errors import ReplicaError, WireError
from ..exchange.enclosed import enclose
from ..exchange.tuning import ExchangeTuner, is_worth_enclosing
from ..members.view import View
from ..net.transport import Transport, to_bytes
from ..wire.framing import Framing
from ..wire.records import KIND_AT, RECORD_BYTES, Announcement, Kind, Status, Vote, fp32_bits, fp32_of
from ..wire.refusal import Problem, unreadable

RECORD_ROOM = 1 << 14  # bytes


class Opening(NamedTuple):
    """What a site says first. `frame`: of all its entries, if they are few."""

    record: Announcement | Vote
    frame: Tensor | None = None
    framing: Framing | None = None


class Said(NamedTuple):
    """By all sites. `enclosed`: the frames that followed, by site."""

    records: list[Announcement | Vote]
    enclosed: dict[int, Tensor]


def opening(
    view: View,
    encoded: Encoded,
    framing: Framing,
    tuner: ExchangeTuner,
    norm: float,
    *,
    mark: int,
    may_enclose: bool,
) -> Opening:
    """
    Args:
        mark: of what all sites must hold alike beside θ.
    """
    entries, numel, codec = encoded.entries, framing.known.numel, framing.codec
    if entries.starts is None:
        payload = sums = codec.most_bytes(numel, numel)
    else:
        payload, sums = tuner.announced(codec, entries.values.numel(), numel)
    record = Announcement(
        site=framing.site,
        round=framing.round,
        norm_bits=fp32_bits(norm),
        weight_bits=fp32_bits(encoded.factor),
        sums_bits=fp32_bits(sums),
        codec=codec.id,
        codec_time_ratio=tuner.codec_time_ratio(framing.round),
        numel=numel,
        entries=entries.values.numel(),
        payload_bytes=payload,
        digest=encoded.digest ^ mark,
    )
    most = most_enclosed(view)
    if may_enclose and payload <= most and is_worth_enclosing(record, view.num_sites):
        frame = enclose(framing, entries)
        if frame is not None and frame.numel() <= most:
            return Opening(replace(record, enclosed_bytes=frame.numel()), frame, framing)
    return Opening(record)


def most_enclosed(view: View) -> int:
    """Bytes of a frame that may follow its announcement: all peers together are sent at most RECORD_ROOM."""
    across = view.across
    if not across.peers:
        return 0
    return max(0, RECORD_ROOM // len(across.peers) - RECORD_BYTES)


def announce(view: View, mine: Announcement | Vote, frame: Tensor | None = None) -> Said:
    """
    Args:
        frame: follows this site's announcement, if that says so.

    Raises:
        TransportError: a link is lost.
        WireError: what a site says can't be read. It is heard by this rank alone, so its links are of no use
            any more.
    """
    across = view.across
    phase = f"round {mine.round}, announcement"
    message = across.message(mine.pack())
    if frame is not None and isinstance(mine, Announcement) and mine.enclosed_bytes:
        message = torch.cat([message, frame])
    incoming = across.rooms(RECORD_ROOM)
    sent = [(peer, message) for peer in across.peers]
    across.post(sent, list(incoming.items()), phase=phase, may_be_shorter=True).wait(across.patience)
    said = Said([], {})
    for site in range(across.size):
        room = incoming.get(site, message)
        try:
            theirs = _read(to_bytes(room[:RECORD_BYTES]))
            _check(theirs, mine, site, most_enclosed(view))
        except WireError as error:
            raise unreadable(f"round {mine.round}", across.called(site), error) from error
        said.records.append(theirs)
        enclosed = theirs.enclosed_bytes if isinstance(theirs, Announcement) else 0
        if site in incoming and enclosed:
            said.enclosed[site] = room[RECORD_BYTES : RECORD_BYTES + enclosed]
    return said


def _read(raw: bytes) -> Announcement | Vote:
    return Vote.unpack(raw) if raw[KIND_AT] == Kind.VOTE else Announcement.unpack(raw)


def _check(theirs: Announcement | Vote, mine: Announcement | Vote, site: int, most: int) -> None:
    """Refuse what is not that site's. Rounds and digests are compared once all are known."""
    if theirs.site != site:
        raise WireError(f"an announcement of site {theirs.site} on the link of site {site}")
    if isinstance(theirs, Vote):
        if theirs.status == Status.OK:
            raise WireError("a vote for a round that has not been announced")
        return
    if isinstance(mine, Announcement) and theirs.numel != mine.numel:
        raise WireError(f"a vector of {theirs.numel} elements, not {mine.numel}")
    if not 0 < fp32_of(theirs.weight_bits) < float("inf"):
        raise WireError(f"a weight of {fp32_of(theirs.weight_bits)}")
    if theirs.entries > theirs.numel:
        raise WireError(f"{theirs.entries} entries of {theirs.numel} elements")
    if theirs.enclosed_bytes > most:
        raise WireError(f"{theirs.enclosed_bytes} bytes that are said to follow, where at most {most} do")


def replica_problem(across: Transport, said: Sequence[Announcement | Vote]) -> Problem | None:
    """Every site is in the same round and holds the same θ, or the sites that differ are named.

    A site that refuses the round announces no digest.
    """
    by_round = {one.site: one.round for one in said}
    if (other := _who_differs(by_round)) is not None:
        rounds = ", ".join(f"{across.called(site)} in round {round}" for site, round in by_round.items())
        seen = ReplicaError(
            f"the sites are in different rounds ({rounds}): resume all from the same checkpoint"
        )
        return Problem(Status.REPLICA, other, seen)
    by_digest = {one.site: one.digest for one in said if isinstance(one, Announcement)}
    if (other := _who_differs(by_digest)) is not None:
        held = ", ".join(f"{across.called(site)} holds {digest:016x}" for site, digest in by_digest.items())
        seen = ReplicaError(
            f"round {said[0].round}: the sites' anchors differ ({held}): resume all from the same checkpoint"
        )
        return Problem(Status.REPLICA, other, seen)
    return None


def _who_differs(by_site: Mapping[int, int]) -> int | None:
    """The first site that holds another number than the first of all, if there is one."""
    first = next(iter(by_site.values()), 0)
    return next((site for site, held in by_site.items() if held != first), None)


def outliers(announced: Sequence[Announcement], factor: float | None) -> tuple[int, ...]:
    """The sites that are left out of a round, the same on all: their update's norm, over their weight, is
    more than `factor` times the median of the others'.

    Args:
        announced: by all sites.
        factor: None leaves nobody out.
    """
    if factor is None:
        return ()
    norms = [fp32_of(one.norm_bits) / fp32_of(one.weight_bits) for one in announced]
    found = []
    for site, norm in enumerate(norms):
        usual = median(others) if (others := [*norms[:site], *norms[site + 1 :]]) else norm
        if not isfinite(norm) or norm > factor * usual > 0:
            found.append(site)
    return tuple(found)
