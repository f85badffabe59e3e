"""Frames on their way: sent and received in ticks, while this rank codes what comes next."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from .errors import WireError
from .frames import Frame
from .transport import Transport
from .wire import HEADER_BYTES, Header

Messages = list[tuple[int, Tensor]]
Check = Callable[[Header, int, int], None]  # of a header, the site it came from and its frame's number


class Stream:
    """`frames` frames to and from every peer. Tick t carries the bodies of frames t − 1 and the headers of
    frames t, so that both ends know the size of a body before it travels.

    Args:
        across: the link to the peers.
        frames: how many each sends to each.
        check: raises a WireError for a header that is not the expected one.
        phase: what errors call it.
    """

    def __init__(self, across: Transport, frames: int, check: Check, *, phase: str) -> None:
        self.across = across
        self.frames = frames
        self.ticks = frames + 1
        self._check = check
        self._phase = phase
        self._tick = 0
        self._leaving: Mapping[int, Frame] = {}
        self._expected: dict[int, Header] = {}
        self._headers: dict[int, Tensor] = {}
        self._bodies: dict[int, Tensor] = {}

    @property
    def peers(self) -> Collection[int]:
        return self.across.peers

    def messages(self, frames: Mapping[int, Frame]) -> tuple[Messages, Messages]:
        """What to send in this tick, and where to receive. `frames`: the next one for each peer."""
        device = self.across.device
        outgoing = [(peer, frame.body) for peer, frame in self._leaving.items()]
        outgoing += [(p, self.across.message(frame.header.pack())) for p, frame in frames.items()]
        self._bodies = {
            peer: torch.empty(header.body_bytes, dtype=torch.uint8, device=device)
            for peer, header in self._expected.items()
        }
        self._headers = {}
        if self._tick < self.frames:
            self._headers = {
                p: torch.empty(HEADER_BYTES, dtype=torch.uint8, device=device) for p in self.peers
            }
        self._leaving = frames
        return outgoing, [*self._bodies.items(), *self._headers.items()]

    def arrived(self) -> dict[int, tuple[Header, Tensor]]:
        """The frames that this tick completed, by peer.

        Raises:
            WireError: a peer announces a frame that can't be one. The link is of no use then: nobody knows
                how many bytes come next.
        """
        done = {peer: (self._expected[peer], body) for peer, body in self._bodies.items()}
        self._expected = {}
        for peer, raw in self._headers.items():
            try:
                header = Header.unpack(raw.cpu().numpy().tobytes())
                self._check(header, peer, self._tick)
            except WireError as error:
                raise WireError(
                    f"{self._phase}: the message of site {peer} can't be read: {error}"
                ) from error
            self._expected[peer] = header
        self._tick += 1
        return done
