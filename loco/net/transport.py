"""Point-to-point messages among the members of one group, every byte counted.

One primitive, `swap`, carries all that the sites say to each other: it works alike on loco's own connections
and on NCCL, takes unequal sizes, and what it is handed is what goes on the wire, so the counts need no model
of a collective.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..coordination.authentication import SEAL_BYTES, MessageSeals
from ..coordination.heartbeats import Heartbeats, guarded
from ..errors import AuthenticationError, TransportError, WireError, first_line, seconds
from ..logs import Progress
from .mesh import Mesh, Parcel, Work
from .pending import PendingMessages

_logger = logging.getLogger(__name__)
CHUNK = 1 << 20  # elements of one message of a long tensor: 4 MiB
# What a peer can make this rank take in before it is known what it says: names and shapes of all parameters.
MOST_BLOB_BYTES = 1 << 28
_MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Transport:
    """Messages among the members of a group, as seen by one of them. Members are called 0 … size−1 here.

    Args:
        mesh: the links between them.
        ranks: the members', in the order of their numbers.
        rank: this member's number.
        liveness: who is alive; a member that is not ends a wait at once. None: nobody knows yet.
        timeout: seconds to wait for a message of one that is.
        patience: seconds to wait for one to come to a round.
        member: what a member is in errors, e.g. "site".
        names: what the members are called there, if not by their numbers.
        link: the name under which a member that gives this group up says so.
        seals: prove that messages are genuine; None: they are believed.
        left_may_return: as `Heartbeats.watching`: what is said here is not part of a round.
    """

    def __init__(
        self,
        mesh: Mesh,
        ranks: Sequence[int],
        rank: int,
        *,
        liveness: Heartbeats | None,
        timeout: float,
        patience: float,
        member: str,
        names: Sequence[str] = (),
        seals: MessageSeals | None = None,
        link: str = "",
        left_may_return: bool = False,
    ) -> None:
        self.mesh = mesh
        self.rank, self.size = rank, len(ranks)
        self.device = mesh.device
        self.liveness = liveness
        self.timeout, self.patience = timeout, patience
        self.link = link
        self.member, self._names = member, names
        self._seals, self._left_may_return = seals, left_may_return
        self._ranks = list(ranks)
        self.sent_bytes = 0
        self.received_bytes = 0

    def rooms(self, size: int) -> dict[int, Tensor]:
        """For a message of each peer."""
        peers = self.peers
        rooms = torch.empty(len(peers) * size, dtype=torch.uint8, device=self.device)
        return dict(zip(peers, rooms.split(size), strict=False))  # of nothing `split` makes one tensor

    @property
    def peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def swap(
        self,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Tensor],
        *,
        phase: str,
        limit: float | None = None,
    ) -> None:
        """Send `outgoing[peer]` and fill `incoming[peer]`, all at once; returns when both are done.

        Raises:
            TransportError, WireError: as `PendingMessages.wait`.
        """
        self.post(list(outgoing.items()), list(incoming.items()), phase=phase).wait(limit)

    def post(
        self,
        outgoing: Sequence[tuple[int, Tensor]],
        incoming: Sequence[tuple[int, Tensor]],
        *,
        phase: str,
        may_be_shorter: bool = False,
    ) -> PendingMessages:
        """Begin to send and to receive; what is sent must not change until `wait` of the result has returned.

        Tensors are contiguous uint8; empty messages are not sent. Several messages of one peer arrive in the
        order in which they were posted.

        Args:
            may_be_shorter: messages need not fill the room for them. Not where torch's groups carry them.

        Raises:
            TransportError: a peer is gone.
        """
        seals = self._seals
        sends = [Parcel(p, t, seals and seals.seal(t, p)) for p, t in outgoing if t.numel()]
        receives = [Parcel(p, t, seals and t.new_empty(SEAL_BYTES)) for p, t in incoming if t.numel()]
        numbers = [0 if seals is None else seals.expect(one.member) for one in receives]
        works: Sequence[Work] = []
        if sends or receives:
            try:
                works = self.mesh.begin(sends, receives)
            except (RuntimeError, ValueError) as error:
                raise TransportError(f"{phase}: {self.not_here(-1, None)} ({first_line(error)})") from error
        return PendingMessages(
            self, works, receives, sends, numbers, phase=phase, may_be_shorter=may_be_shorter
        )

    def swap_records(self, record: bytes, *, phase: str, limit: float | None = None) -> list[bytes]:
        """Every member's record, in order; all records have the same size."""
        mine = self.message(record)
        incoming = self.rooms(mine.numel())
        self.swap(dict.fromkeys(self.peers, mine), incoming, phase=phase, limit=limit)
        return [record if p == self.rank else to_bytes(incoming[p]) for p in range(self.size)]

    def swap_blobs(self, blob: bytes, *, phase: str, limit: float | None = None) -> list[bytes]:
        """Every member's bytes, in order; sizes may differ and travel first."""
        sizes = [
            int.from_bytes(size, "little")
            for size in self.swap_records(len(blob).to_bytes(8, "little"), phase=phase, limit=limit)
        ]
        for peer, size in enumerate(sizes):
            self._check_size(size, peer, MOST_BLOB_BYTES, phase=phase)
        incoming = {
            peer: torch.empty(sizes[peer], dtype=torch.uint8, device=self.device) for peer in self.peers
        }
        self.swap(dict.fromkeys(self.peers, self.message(blob)), incoming, phase=phase)
        return [blob if p == self.rank else to_bytes(incoming[p]) for p in range(self.size)]

    def send_blob(self, blob: bytes, peers: Sequence[int], *, phase: str) -> None:
        """Some bytes to these peers, who each `receive_blob`; their number travels first."""
        for data in (len(blob).to_bytes(8, "little"), blob):
            self.swap(dict.fromkeys(peers, self.message(data)), {}, phase=phase)

    def receive_blob(self, peer: int, *, phase: str, most: int | None = None) -> bytes:
        """What a peer sends by `send_blob`.

        Args:
            most: bytes that it may hold; by default what this machine's memory does.

        Raises:
            WireError: the peer announces more.
        """
        announced = torch.empty(8, dtype=torch.uint8, device=self.device)
        self.swap({}, {peer: announced}, phase=phase)
        size = int.from_bytes(to_bytes(announced), "little")
        self._check_size(size, peer, _MEMORY_BYTES if most is None else most, phase=phase)
        blob = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.swap({}, {peer: blob}, phase=phase)
        return to_bytes(blob)

    def _check_size(self, size: int, peer: int, most: int, *, phase: str) -> None:
        if size > most:
            raise WireError(
                f"{phase}: {self.called(peer)} announces {size:,} bytes; at most {most:,} are taken"
            )

    def gather(self, part: Tensor, *, phase: str) -> list[Tensor]:
        """Every member's part, in order; all parts have one size and type."""
        mine = part.to(self.device)
        parts = [mine if p == self.rank else torch.empty_like(mine) for p in range(self.size)]
        incoming = {p: as_bytes(parts[p]) for p in self.peers}
        self.swap(dict.fromkeys(self.peers, as_bytes(mine)), incoming, phase=phase)
        return [p.to(part.device) for p in parts]

    def broadcast(self, tensor: Tensor, *, phase: str) -> None:
        """Member 0's tensor to all, in place. Each member hands on a chunk while it receives the next one, so
        that none sends more than one copy."""
        self.swap_records(b"\0", phase=phase)  # NCCL wants all members in the first messages of a group
        chunks = tensor.split(CHUNK)
        with Progress(_logger, phase, tensor.nbytes) as progress:
            self._pass_on(chunks, progress, phase=phase)

    def _pass_on(self, chunks: Sequence[Tensor], progress: Progress, *, phase: str) -> None:
        for step in range(len(chunks) + self.size - 2):
            leaving, coming = step - self.rank, step - self.rank + 1
            outgoing: list[tuple[int, Tensor]] = []
            incoming: list[tuple[int, Tensor]] = []
            staged = None
            if self.rank + 1 < self.size and 0 <= leaving < len(chunks):
                outgoing = [(self.rank + 1, as_bytes(chunks[leaving].to(self.device)))]
            if self.rank > 0 and 0 <= coming < len(chunks):
                staged = torch.empty_like(chunks[coming], device=self.device)
                incoming = [(self.rank - 1, as_bytes(staged))]
            self.post(outgoing, incoming, phase=phase).wait(watching=self.peers)
            if staged is not None:
                chunks[coming].copy_(staged)
            moved = coming if staged is not None else leaving
            if outgoing or incoming:
                progress.add(chunks[moved].nbytes)

    @contextmanager
    def vigil(self, peers: Sequence[int], *, phase: str) -> Iterator[None]:
        """Wait for messages of `peers` inside it: the wait ends at once if one dies or leaves.

        Raises:
            TransportError: names who it is.
        """
        if self.liveness is None:
            yield
            return
        ranks = [self._ranks[peer] for peer in peers]
        with guarded(
            self.liveness,
            ranks,
            phase=phase,
            named=self._named,
            link=self.link,
            left_may_return=self._left_may_return,
            on_loss=self.mesh.interrupt,
        ):
            yield

    def _named(self, ranks: Sequence[int]) -> str:
        if not set(ranks) <= set(self._ranks):
            return listed("rank", ranks)
        return listed(self.member, [self._ranks.index(rank) for rank in ranks], self._names)

    def name_of(self, member: int) -> str:
        """Its name, or its number if it has none."""
        return self._names[member] if self._names else str(member)

    def called(self, *members: int) -> str:
        """E.g. "site 1", or "sites berlin, paris"; −1: "another site"."""
        return f"another {self.member}" if -1 in members else listed(self.member, members, self._names)

    def not_here(self, peer: int, limit: float | None) -> str:
        """What to say of a member (−1: nobody knows which) that closed its connection, or did not answer
        within `limit` seconds."""
        heard = ""
        if self.liveness is not None:
            ranks = [self._ranks[p] for p in (self.peers if peer < 0 else [peer])]
            loss = self.liveness.departed(ranks, self.link)
            if loss:  # it hung up for a reason of its own, which may be the loss of yet another member
                return self.liveness.describe(loss, self._named)
            if peer >= 0:
                heard = self.liveness.last_words(self._ranks[peer])
        who = self.called(peer)
        if not limit:
            return f"lost {who}; last heard of: {heard}" if heard else f"lost {who}"
        if heard:
            return f"no answer from {who} within {seconds(limit)}, which is alive; last heard of: {heard}"
        return f"no answer from {who} within {seconds(limit)}"

    def check_seal(self, parcel: Parcel, size: int, number: int, *, phase: str) -> None:
        """
        Args:
            size: bytes of it that came.
            number: which of its sender's messages it must be.

        Raises:
            AuthenticationError: it is not that message.
        """
        sender, data, seal = parcel
        if self._seals is None or seal is None or self._seals.is_genuine(data[:size], seal, sender, number):
            return
        raise AuthenticationError(
            f"{phase}: a message of {self.called(sender)} is not genuine: its key is another one, or the "
            f"message was forged or changed on its way"
        )

    def close(self) -> None:
        """Hang up, if the links are its own, so that peers that wait learn of it."""
        self.mesh.close()

    def message(self, data: bytes) -> Tensor:
        """Bytes as a tensor that `swap` takes."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous 1-D tensor's memory as uint8, without a copy."""
    return tensor.view(torch.uint8)


def to_bytes(tensor: Tensor) -> bytes:
    return (tensor if tensor.is_cpu else tensor.cpu()).numpy().tobytes()


def listed(member: str, which: Iterable[int], names: Sequence[str] = ()) -> str:
    """E.g. "sites 1, 2", or by their names."""
    called = [names[k] if k < len(names) else str(k) for k in sorted(which)]
    first, _, rest = member.partition(" ")  # "rank of this site"
    return f"{first}{'s' if len(called) > 1 else ''} {rest}".rstrip() + f" {', '.join(called)}"
