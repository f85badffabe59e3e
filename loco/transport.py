"""Point-to-point messages among the members of one process group, every byte counted.

One primitive, `swap`, carries all that the sites say to each other: it works alike on gloo and NCCL, takes
unequal sizes, and what it is handed is what goes on the wire, so the counts need no model of a collective.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import TransportError


class Transport:
    """The members of `group` as seen by this rank.

    Args:
        group: the process group; its members are called 0 … size−1 here.
        device: where the caller's tensors live. Messages must be on `self.device`, which is the same,
            or the CPU where the group can only send CPU memory (gloo).
        timeout: seconds to wait for a message.
        member: what a member is called in errors, e.g. "site".
    """

    def __init__(
        self, group: dist.ProcessGroup, *, device: torch.device, timeout: float, member: str
    ) -> None:
        self.group: dist.ProcessGroup | None = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = _wire_device(group, device)
        self.timeout = timeout
        self.member = member
        self.sent_bytes = 0
        self.received_bytes = 0

    @property
    def peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], *, phase: str) -> None:
        """Send `outgoing[peer]` and fill `incoming[peer]`, all at once; returns when both are done.

        Raises:
            TransportError: as `post`.
        """
        self.post(list(outgoing.items()), list(incoming.items()), phase=phase).wait()

    def post(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]], *, phase: str
    ) -> "Posted":
        """Begin to send and to receive; what is sent must not change until `Posted.wait` has returned.

        Tensors are contiguous uint8; sizes are known to both ends, and empty messages are not sent. Several
        messages of one peer arrive in the order in which they were posted.

        Raises:
            TransportError: a peer is gone or silent; names it, the phase and the timeout.
        """
        sends = [(p, t) for p, t in outgoing if t.numel()]
        receives = [(p, t) for p, t in incoming if t.numel()]
        works: list[dist.Work] = []
        assert self.group is not None  # which for torch would be the default group
        if sends or receives:
            try:
                works = dist.batch_isend_irecv(
                    [dist.P2POp(dist.irecv, t, group=self.group, group_peer=p) for p, t in receives]
                    + [dist.P2POp(dist.isend, t, group=self.group, group_peer=p) for p, t in sends]
                )
            except (RuntimeError, ValueError) as error:
                raise TransportError(f"{phase}: lost another {self.member} ({_first_line(error)})") from error
        sent, received = sum(t.numel() for _, t in sends), sum(t.numel() for _, t in receives)
        # gloo returns one work per message, NCCL one for the whole batch.
        order = [p for p, _ in receives] + [p for p, _ in sends]
        return Posted(self, works, order, sent, received, phase)

    def swap_records(self, record: bytes, *, phase: str) -> list[bytes]:
        """Every member's record, in order; all records have the same size."""
        mine = self.message(record)
        incoming = {peer: torch.empty_like(mine) for peer in self.peers}
        self.swap(dict.fromkeys(self.peers, mine), incoming, phase=phase)
        return [record if p == self.rank else to_bytes(incoming[p]) for p in range(self.size)]

    def swap_blobs(self, blob: bytes, *, phase: str) -> list[bytes]:
        """Every member's bytes, in order; sizes may differ and travel first."""
        sizes = [
            int.from_bytes(size, "little")
            for size in self.swap_records(len(blob).to_bytes(8, "little"), phase=phase)
        ]
        incoming = {
            peer: torch.empty(sizes[peer], dtype=torch.uint8, device=self.device) for peer in self.peers
        }
        self.swap(dict.fromkeys(self.peers, self.message(blob)), incoming, phase=phase)
        return [blob if p == self.rank else to_bytes(incoming[p]) for p in range(self.size)]

    def gather(self, part: Tensor, *, phase: str) -> list[Tensor]:
        """Every member's part, in order; all parts have one size and type."""
        mine = part.to(self.device)
        parts = [mine if p == self.rank else torch.empty_like(mine) for p in range(self.size)]
        incoming = {p: as_bytes(parts[p]) for p in self.peers}
        self.swap(dict.fromkeys(self.peers, as_bytes(mine)), incoming, phase=phase)
        return [p.to(part.device) for p in parts]

    def broadcast(self, tensor: Tensor, *, phase: str) -> None:
        """Member 0's tensor to all, in place. Not counted: it belongs to no round."""
        staged = tensor.to(self.device)
        try:
            work = dist.broadcast(staged, group=self.group, group_src=0, async_op=True)
            if work is not None:
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise TransportError(
                f"{phase}: the exchange with the other {self.member}s failed, or took more than "
                f"{self.timeout:g} s ({_first_line(error)})"
            ) from error
        tensor.copy_(staged)

    def close(self) -> None:
        """Hang up, so that peers who wait learn of it. gloo does so when nobody holds the group any more."""
        dist.destroy_process_group(self.group)
        self.group = None

    def message(self, data: bytes) -> Tensor:
        """Bytes as a tensor that `swap` takes."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)


class Posted:
    """Messages on their way."""

    def __init__(
        self,
        transport: Transport,
        works: list[dist.Work],
        order: list[int],
        sent: int,
        received: int,
        phase: str,
    ) -> None:
        self._transport = transport
        self._works = works
        self._order = order
        self._phase = phase
        self.sent, self.received = sent, received  # bytes

    def wait(self) -> None:
        """
        Raises:
            TransportError: as `Transport.post`. The timeout counts from here.
        """
        transport, peer = self._transport, -1
        deadline = time.monotonic() + transport.timeout
        try:
            for k, work in enumerate(self._works):
                peer = self._order[k] if len(self._works) == len(self._order) else -1
                left = max(deadline - time.monotonic(), 0.001)
                work.wait(timedelta(seconds=left))
        except (RuntimeError, ValueError) as error:
            who = f"{transport.member} {peer}" if peer >= 0 else f"another {transport.member}"
            # torch cuts timeouts to whole milliseconds, so a wait can end a little before the deadline.
            silent = time.monotonic() >= deadline - 0.01
            what = f"no answer from {who} within {transport.timeout:g} s" if silent else f"lost {who}"
            raise TransportError(f"{self._phase}: {what} ({_first_line(error)})") from error
        transport.sent_bytes += self.sent
        transport.received_bytes += self.received


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous 1-D tensor's memory as uint8, without a copy."""
    return tensor.view(torch.uint8)


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def any_device(group: dist.ProcessGroup) -> torch.device:
    """Some device whose memory the group can send."""
    return torch.device(next(iter(_backends(group))))


def _wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where messages must lie for this group to send them."""
    backends = _backends(group)
    if device.type in backends and (device.type == "cpu" or backends[device.type] != "gloo"):
        return device
    # gloo sends CPU memory only, so a GPU's messages are staged through the host.
    if "cpu" in backends:
        return torch.device("cpu")
    raise ValueError(
        f"the process group's backend ({dist.get_backend_config(group)}) can't send {device.type} "
        f"memory: call init_process_group with backend='cpu:gloo,cuda:nccl'"
    )


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend by device type, from e.g. "cpu:gloo,cuda:nccl"."""
    pairs = str(dist.get_backend_config(group)).split(",")
    return {device: backend for device, _, backend in (pair.partition(":") for pair in pairs)}


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
