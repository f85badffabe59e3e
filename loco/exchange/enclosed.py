"""Few entries: each site's come with its announcement, so that nothing is left to exchange."""

from collections.abc import Mapping

from torch import Tensor

from loco.kernels import Entries

from ..errors import WireError
from ..net.transport import to_bytes
from ..wire.framing import Frames, Framing
from ..wire.records import RECORD_BYTES, FrameHeader, Kind, Status
from ..wire.refusal import Problem, unreadable
from .transfer import Transfer


def enclose(framing: Framing, entries: Entries) -> Tensor | None:
    """The frame of all entries, in one piece. None: that would take more than one."""
    numel = framing.known.numel
    if Frames.of(numel).count != 1:
        return None
    return framing.seal(entries, slice(0, numel), 0, Kind.ENTRIES).in_one_piece()


def open_enclosed(work: Transfer, own: Entries, numel: int, frames: Mapping[int, Tensor]) -> list[Entries]:
    """-> what gathering would have brought

    Args:
        frames: of the sites that are not left out; header and body in one piece.
    """
    everything = slice(0, numel)

    def read(site: int, frame: Tensor) -> Entries | None:
        try:
            header = FrameHeader.unpack(to_bytes(frame[:RECORD_BYTES]))
            work.framing.check(header, site, everything, 0, Kind.ENTRIES)
            if RECORD_BYTES + header.body_bytes != frame.numel():
                raise WireError(f"a body of {frame.numel() - RECORD_BYTES} bytes, not {header.body_bytes}")
        except WireError as error:
            seen = unreadable(work.phase("entries"), work.across.called(site), error)
            work.problem = work.problem or Problem(Status.UNREADABLE, site, seen)
            return None
        return work.open(site, header, frame[RECORD_BYTES:], everything)

    opened = {site: read(site, frame) for site, frame in frames.items()}

    def join() -> list[Entries]:
        found = opened | {work.across.rank: own}
        nothing = Entries.none(numel, own.values.device)
        everyones = [found.get(site) or nothing for site in range(work.across.size)]
        return work.gathered(everyones, numel)

    return work.attempt(join) or []
