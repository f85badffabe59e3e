"""The gather exchange: every site's entries to all sites."""

from collections import deque

from loco.kernels import Entries

from ..net.pending import PendingMessages
from ..wire.framing import Frame, Frames
from ..wire.records import FrameHeader, Kind
from .stream import AHEAD, Arrived, FrameStream
from .transfer import Transfer


def gather(work: Transfer, own: Entries, numel: int) -> list[Entries]:
    """Sends R−1 payloads. -> the entries of each site, in site order, or their sums

    While frames travel, the next one is coded and the last ones are read.
    """
    if not numel or work.across.size == 1:
        return work.attempt(lambda: work.gathered([own], numel)) or []
    everything, frames = slice(0, numel), Frames.of(numel)
    peers = work.across.peers

    def check(header: FrameHeader, site: int, number: int) -> None:
        work.framing.check(header, site, frames.span(everything, number), number, Kind.ENTRIES)

    def seal(number: int) -> dict[int, Frame]:
        at = frames.span(everything, number)
        frame = work.seal(lambda: own.part(at), at, number, Kind.ENTRIES)
        return dict.fromkeys(peers, frame)

    stream = FrameStream(work.across, check, phase=work.phase("entries"), most=work.framing.most_rooms)
    found: dict[int, list[Entries]] = {site: [] for site in peers}
    flying: deque[PendingMessages] = deque()
    arrived: Arrived = {}
    ready = seal(0)
    for tick in range(frames.count + AHEAD):
        if tick < frames.count:
            flying.append(work.post(stream.messages(ready), "entries"))
        ready = seal(tick + 1) if tick + 1 < frames.count else {}
        for site, (header, body) in arrived.items():
            entries = work.open(site, header, body, frames.span(everything, header.number))
            if entries is not None:
                found[site].append(entries)
        arrived = {}
        if flying and tick >= AHEAD - 1:
            work.wait(flying.popleft())
            arrived = stream.arrived()

    def join() -> list[Entries]:
        joined = {site: Entries.join(found.pop(site)) for site in peers} | {work.across.rank: own}
        return work.gathered([joined[site] for site in range(work.across.size)], numel)

    return work.attempt(join) or []
