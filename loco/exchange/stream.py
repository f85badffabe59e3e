"""Frames on their way: sent and received in ticks, while this rank codes what comes next."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from loco.kernels.recycle import recycled

from ..errors import WireError
from ..net.transport import Transport, to_bytes
from ..wire.framing import Frame
from ..wire.records import RECORD_BYTES, FrameHeader
from ..wire.refusal import unreadable

# Ticks that fly at once, so that neither a slow peer nor the network's latency leaves the link idle; and so
# how many ticks a header that travels alone is ahead of its body.
AHEAD = 2

Messages = list[tuple[int, Tensor]]
Check = Callable[[FrameHeader, int, int], None]  # of a header, the site it came from and its frame's number
Room = Callable[[int, int], Tensor]  # for the body of a site's frame with this number
Arrived = dict[int, tuple[FrameHeader, Tensor]]  # frames by peer


class Stream:
    """`frames` frames to and from every peer, in ticks. At most AHEAD ticks may fly.

    Where a message may be shorter than the room for it, a frame is one message, with its header in front.
    Otherwise both ends must know the size of a body before it travels: tick t carries the headers of frames t
    and the bodies of frames t − `lead`.

    Args:
        across: the link to the peers.
        frames: how many each sends to each.
        check: raises a WireError for a header that is not the expected one.
        phase: what errors call it.
        most: makes room for so many frames, whichever of the vector's they are.
        room: where each body is received, if all sizes are known beforehand: then header and body are two
            messages of one tick.
    """

    def __init__(
        self,
        across: Transport,
        frames: int,
        check: Check,
        *,
        phase: str,
        most: Callable[[int], Sequence[Tensor]],
        room: Room | None = None,
    ) -> None:
        self.across = across
        self.frames = frames
        self._in_one_piece = room is None and across.takes_less
        self.lead = 0 if room is not None or self._in_one_piece else AHEAD
        self.ticks = frames + self.lead
        self._check = check
        self._most = most
        self._room = room
        self._phase = phase
        self._posted = 0  # ticks
        self._leaving: dict[int, Mapping[int, Frame]] = {}  # by number: their headers have been sent
        self._expected: dict[int, dict[int, FrameHeader]] = {}  # by number
        self._flying: deque[tuple[int, dict[int, Tensor], dict[int, Tensor]]] = deque()

    def messages(self, frames: Mapping[int, Frame]) -> tuple[Messages, Messages]:
        """What to send in the next tick, and where to receive. `frames`: the next one for each peer."""
        tick = self._posted
        self._posted += 1
        headers = self._rooms_for_headers() if tick < self.frames else {}
        if self._in_one_piece:
            self._flying.append((tick, {}, headers))  # the bodies are in the same rooms
            return [(p, frame.in_one_piece()) for p, frame in frames.items()], list(headers.items())
        self._leaving[tick] = frames
        leaving = self._leaving.pop(tick - self.lead, {})
        sent = [(peer, frame.body) for peer, frame in leaving.items()]
        announced = [(p, self.across.message(frame.header.pack())) for p, frame in frames.items()]
        if self._room is not None:
            bodies = {peer: self._room(peer, tick) for peer in headers}
            self._flying.append((tick, bodies, headers))
            return announced + sent, [*headers.items(), *bodies.items()]
        bodies = {
            peer: recycled(header.body_bytes, torch.uint8, self.across.device)
            for peer, header in self._expected.get(tick - self.lead, {}).items()
        }
        self._flying.append((tick, bodies, headers))
        return sent + announced, [*bodies.items(), *headers.items()]

    def arrived(self) -> Arrived:
        """The frames that the first tick still flying brought, now that it has come.

        Raises:
            WireError: a peer announces a frame that can't be one. The link is of no use then: nobody knows
                how many bytes come next.
        """
        tick, bodies, headers = self._flying.popleft()
        expected = self._expected.setdefault(tick, {})
        for peer, room in headers.items():
            try:
                header = FrameHeader.unpack(to_bytes(room[:RECORD_BYTES]))
                self._check(header, peer, tick)
            except WireError as error:
                raise unreadable(self._phase, peer, error) from error
            expected[peer] = header
            inside = header.body_bytes if self._in_one_piece else 0
            self.across.count_as(RECORD_BYTES + inside, room)
            if self._in_one_piece:
                bodies[peer] = room[RECORD_BYTES : RECORD_BYTES + inside]
        announced = self._expected.pop(tick - self.lead, {})
        return {peer: (announced[peer], body) for peer, body in bodies.items()}

    def _rooms_for_headers(self) -> dict[int, Tensor]:
        """And for whole frames, which a peer sends that takes the exchange for another one."""
        if not self.across.takes_less:
            return self.across.rooms(RECORD_BYTES)
        peers = self.across.peers
        return dict(zip(peers, self._most(len(peers)), strict=True))
