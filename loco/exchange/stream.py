"""Frames on their way: sent and received in ticks, while this rank codes what comes next."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ..errors import WireError
from ..net.transport import Transport, to_bytes
from ..wire.framing import Frame
from ..wire.records import RECORD_BYTES, FrameHeader
from ..wire.refusal import unreadable

AHEAD = (
    2  # ticks that fly at once, so that neither a slow peer nor the network's latency leaves the link idle
)

Messages = list[tuple[int, Tensor]]
Check = Callable[[FrameHeader, int, int], None]  # of a header, the site it came from and its frame's number
Room = Callable[[int, int], Tensor]  # for the body of a site's frame with this number
Arrived = dict[int, tuple[FrameHeader, Tensor]]  # frames by peer


class FrameStream:
    """One frame to and from every peer in each tick. At most AHEAD ticks may fly.

    A frame is one message, with its header in front.

    Args:
        across: the link to the peers.
        check: raises a WireError for a header that is not the expected one.
        phase: what errors call it.
        most: makes room for so many frames, whichever of the vector's they are.
        room: where each body is received, if all sizes are known beforehand: then header and body are two
            messages.
    """

    def __init__(
        self,
        across: Transport,
        check: Check,
        *,
        phase: str,
        most: Callable[[int], Sequence[Tensor]],
        room: Room | None = None,
    ) -> None:
        self._across = across
        self._check = check
        self._most = most
        self._room = room
        self._phase = phase
        self._posted = 0  # ticks
        self._flying: deque[tuple[int, dict[int, Tensor], dict[int, Tensor]]] = deque()

    def messages(self, frames: Mapping[int, Frame]) -> tuple[Messages, Messages]:
        """What to send in the next tick, and where to receive. `frames`: the next one for each peer."""
        tick, peers = self._posted, self._across.peers
        self._posted += 1
        # A peer that takes the exchange for another one sends whole frames, and is refused by their headers.
        wholes = dict(zip(peers, self._most(len(peers)), strict=True))
        if self._room is None:
            self._flying.append((tick, wholes, {}))
            return [(p, frame.in_one_piece()) for p, frame in frames.items()], list(wholes.items())
        bodies = {peer: self._room(peer, tick) for peer in peers}
        self._flying.append((tick, wholes, bodies))
        headers = [(p, self._across.message(frame.header.pack())) for p, frame in frames.items()]
        sent = headers + [(p, frame.body) for p, frame in frames.items()]
        return sent, [*wholes.items(), *bodies.items()]

    def arrived(self) -> Arrived:
        """The frames that the first tick still flying brought, now that it has come.

        Raises:
            WireError: a peer announces a frame that can't be one. The link is of no use then: nobody knows
                how many bytes come next.
        """
        tick, wholes, bodies = self._flying.popleft()
        arrived: Arrived = {}
        for peer, whole in wholes.items():
            try:
                header = FrameHeader.unpack(to_bytes(whole[:RECORD_BYTES]))
                self._check(header, peer, tick)
            except WireError as error:
                raise unreadable(self._phase, self._across.called(peer), error) from error
            inside = whole[RECORD_BYTES : RECORD_BYTES + header.body_bytes]
            arrived[peer] = header, bodies.get(peer, inside)
        return arrived
