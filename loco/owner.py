"""The owner-reduce exchange: each site sums a slice for all, so that its cost stays as sites are added."""

from torch import Tensor

from loco import kernels
from loco.kernels import Entries

from .errors import NonFiniteError
from .frames import Frame, Frames, slices_of
from .stream import Stream
from .transfer import Transfer
from .wire import Header, Kind


def owner_reduce(work: Transfer, own: Entries, numel: int) -> list[Entries]:
    """Sends (R−1)/R payloads to the slices' owners, and (R−1)/R of the sums. -> the sums

    The sums are in site order, so they are those of gathering, bit for bit. Frame t of the entries is summed
    while frame t + 1 travels, and its sums follow two ticks later.
    """
    if not numel or work.across.size == 1:
        return [own]
    across, framing = work.across, work.framing
    slices = slices_of(numel, across.size)
    mine = slices[across.rank]
    frames = Frames.of(slices[0].stop)
    count = frames.count

    def check_entries(header: Header, site: int, number: int) -> None:
        framing.check(header, site, frames.span(mine, number), number, Kind.SLICE)

    def check_sums(header: Header, site: int, number: int) -> None:
        framing.check(header, site, frames.span(slices[site], number), number, Kind.SUMS)

    def seal(number: int) -> dict[int, Frame]:
        spans = {peer: frames.span(slices[peer], number) for peer in across.peers}
        return {p: work.seal(lambda at=at: own.cut(at), at, number, Kind.SLICE) for p, at in spans.items()}

    def add_up(number: int, arrived: dict[int, tuple[Header, Tensor]]) -> dict[int, Frame]:
        at = frames.span(mine, number)
        parts = {site: work.open(site, header, body, at) for site, (header, body) in arrived.items()}

        def total() -> Entries:
            parts[across.rank] = framing.as_received(own.cut(at), at)
            in_order = [part for _, part in sorted(parts.items()) if part is not None]
            sums = kernels.add_up(in_order, at.stop - at.start)
            if not bool(sums.values.isfinite().all()):
                raise NonFiniteError(f"{work.phase('sums')}: the sites' updates add up to an infinite one")
            found[across.rank].append(framing.as_received(sums, at))
            return sums

        frame = work.seal(total, at, number, Kind.SUMS)
        return dict.fromkeys(across.peers, frame)

    entries = Stream(across, count, check_entries, phase=work.phase("entries"))
    sums = Stream(across, count, check_sums, phase=work.phase("sums"))
    found: list[list[Entries]] = [[] for _ in slices]
    to_add: dict[int, tuple[Header, Tensor]] = {}
    to_read: dict[int, tuple[Header, Tensor]] = {}
    ready = seal(0)
    ready_sums: dict[int, Frame] = {}
    behind = 3  # ticks from the header of a frame of entries to that of its sums
    for tick in range(count + behind + 2):
        streams = []
        if tick < entries.ticks:
            streams.append(entries.messages(ready))
        if behind <= tick < behind + sums.ticks:
            streams.append(sums.messages(ready_sums))
        posted = work.post(streams, "entries and sums")
        ready = seal(tick + 1) if tick + 1 < count else {}
        ready_sums = add_up(tick - 2, to_add) if 0 <= tick - 2 < count else {}
        for site, (header, body) in to_read.items():
            part = work.open(site, header, body, frames.span(slices[site], tick - behind - 2))
            if part is not None:
                found[site].append(part)
        work.wait(posted)
        to_add = entries.arrived() if tick < entries.ticks else {}
        to_read = sums.arrived() if behind <= tick < behind + sums.ticks else {}

    joined = work.attempt(lambda: [Entries.join([part for parts in found for part in parts])])
    return joined or []
