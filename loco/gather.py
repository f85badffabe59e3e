"""The gather exchange: every site's entries to all sites."""

from torch import Tensor

from loco.kernels import Entries

from .frames import Frame, Frames
from .stream import Stream
from .transfer import Transfer
from .wire import Header, Kind


def gather(work: Transfer, own: Entries, numel: int) -> list[Entries]:
    """Sends R−1 payloads. -> the entries of each site, in site order

    While frame t travels, frame t + 1 is coded and frame t − 1 read.
    """
    if not numel or work.across.size == 1:
        return [own]
    everything, frames = slice(0, numel), Frames.of(numel)
    count = frames.count
    peers = work.across.peers

    def check(header: Header, site: int, number: int) -> None:
        work.framing.check(header, site, frames.span(everything, number), number, Kind.ENTRIES)

    def seal(number: int) -> dict[int, Frame]:
        at = frames.span(everything, number)
        frame = work.seal(lambda: own.cut(at), at, number, Kind.ENTRIES)
        return dict.fromkeys(peers, frame)

    stream = Stream(work.across, count, check, phase=work.phase("entries"))
    found: dict[int, list[Entries]] = {site: [] for site in peers}
    arrived: dict[int, tuple[Header, Tensor]] = {}
    ready = seal(0)
    for tick in range(stream.ticks + 1):
        posted = work.post([stream.messages(ready)] if tick < stream.ticks else [], "entries")
        ready = seal(tick + 1) if tick + 1 < count else {}
        for site, (header, body) in arrived.items():
            entries = work.open(site, header, body, frames.span(everything, tick - 2))
            if entries is not None:
                found[site].append(entries)
        work.wait(posted)
        arrived = stream.arrived() if tick < stream.ticks else {}

    def join() -> list[Entries]:
        joined = {site: Entries.join(found.pop(site)) for site in peers} | {work.across.rank: own}
        return [joined[site] for site in range(work.across.size)]

    return work.attempt(join) or []
