"""The owner-reduce exchange: each site sums a slice for all, so that its cost stays as sites are added."""

from collections import deque

from torch import Tensor

from loco.kernels import Entries

from ..net.pending import PendingMessages
from ..net.transport import as_bytes
from ..wire.framing import Frame, Frames, slices_of
from ..wire.records import FrameHeader, Kind
from .stream import AHEAD, Arrived, Check, FrameStream, Room
from .transfer import Transfer


def owner_reduce(work: Transfer, own: Entries, numel: int) -> list[Entries]:
    """Sends (R−1)/R payloads to the slices' owners, and (R−1)/R of the sums. -> the sums

    The sums are in site order, so they are those of gathering, bit for bit. While frames travel, the next one
    is coded, the last ones that came are summed, and sums that came are read.
    """
    if not numel or work.across.size == 1:
        return work.attempt(lambda: work.gathered([own], numel)) or []
    across, framing = work.across, work.framing
    slices = slices_of(numel, across.size)
    mine = slices[across.rank]
    frames = Frames.of(slices[0].stop)

    def check_entries(header: FrameHeader, site: int, number: int) -> None:
        framing.check(header, site, frames.span(mine, number), number, Kind.SLICE)

    def check_sums(header: FrameHeader, site: int, number: int) -> None:
        framing.check(header, site, frames.span(slices[site], number), number, Kind.SUMS)

    def seal(number: int) -> dict[int, Frame]:
        spans = {peer: frames.span(slices[peer], number) for peer in across.peers}
        return {p: work.seal(lambda at=at: own.part(at), at, number, Kind.SLICE) for p, at in spans.items()}

    def add_up(number: int, arrived: Arrived) -> dict[int, Frame]:
        at = frames.span(mine, number)
        parts = {site: work.open(site, header, body, at) for site, (header, body) in arrived.items()}

        def total() -> Entries:
            parts[across.rank] = framing.as_received(own.cut(at), at)
            in_order = [part for _, part in sorted(parts.items()) if part is not None]
            sums, kept = work.total(in_order, at)
            found[across.rank].append(framing.as_received(sums, at))
            if kept is not None:
                stay.append(kept)
            return sums

        frame = work.seal(total, at, number, Kind.SUMS)
        return dict.fromkeys(across.peers, frame)

    def room_for_entries(site: int, number: int) -> Tensor:
        return framing.room(frames.span(mine, number))

    def room_for_sums(site: int, number: int) -> Tensor:
        at = frames.span(slices[site], number)
        return framing.room(at) if work.sums is None else as_bytes(work.sums[at])

    rooms = (room_for_entries, room_for_sums) if framing.sizes_are_known else (None, None)

    def stream(what: str, check: Check, room: Room | None) -> FrameStream:
        return FrameStream(across, check, phase=work.phase(what), most=framing.most_rooms, room=room)

    entries = stream("entries", check_entries, rooms[0])
    sums = stream("sums", check_sums, rooms[1])
    found: list[list[Entries]] = [[] for _ in slices]
    stay: list[Entries] = []  # sums of this site's slice that it keeps
    flying: deque[dict[FrameStream, PendingMessages]] = deque()  # by tick
    arrived: dict[FrameStream, Arrived] = {}
    ready = seal(0)
    # The sums of a frame leave AHEAD ticks after it.
    for tick in range(frames.count + 2 * AHEAD):
        posted: dict[FrameStream, PendingMessages] = {}
        if tick < frames.count:
            posted[entries] = work.post(entries.messages(ready), "entries")
        if 0 <= (number := tick - AHEAD) < frames.count:
            posted[sums] = work.post(sums.messages(add_up(number, arrived[entries])), "sums")
        flying.append(posted)
        ready = seal(tick + 1) if tick + 1 < frames.count else {}
        for site, (header, body) in arrived.get(sums, {}).items():
            part = work.open(site, header, body, frames.span(slices[site], header.number))
            if part is not None:
                found[site].append(part)
        arrived = {}
        if tick >= AHEAD - 1:
            for done, messages in flying.popleft().items():
                work.wait(messages)
                arrived[done] = done.arrived()

    def join() -> list[Entries]:
        if stay:
            work.keep(stay, numel)
        if work.sums is not None:  # where they have been received
            return [Entries.whole(work.sums)]
        return [Entries.join([part for parts in found for part in parts])]

    return work.attempt(join) or []
