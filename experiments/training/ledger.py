"""What the kernel says this process sent: the sum over its TCP sockets.

A count that no library's bookkeeping can flatter. It needs no privileges (`TCP_INFO`, Linux 4.19 and
newer); elsewhere it is not available, and whoever asks is told so by `None`. It sees gloo's traffic, all
of which is TCP, but not what NCCL moves over NVLink, shared memory or InfiniBand.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

# struct tcp_info of linux/tcp.h: fields keep their place, new ones come at the end.
_BYTES_RECEIVED = 128  # u64
_BYTES_UNSENT = 144  # u32: handed over, still in the socket's queue
_BYTES_SENT = 200  # u64, what TCP repeated counted again
_BYTES_RETRANSMITTED = 208  # u64


@dataclass(frozen=True)
class TcpBytes:
    sent: int  # once each
    received: int
    repeated: int = 0  # sent again, for want of an answer in time

    def __sub__(self, earlier: TcpBytes) -> TcpBytes:
        return TcpBytes(*(a - b for a, b in zip(vars(self).values(), vars(earlier).values(), strict=True)))

    def __add__(self, other: TcpBytes) -> TcpBytes:
        return TcpBytes(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def tcp_bytes() -> TcpBytes | None:
    """Bytes of all TCP sockets that are open now, since each was opened; None where the OS can't say."""
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir() or not hasattr(socket, "TCP_INFO"):
        return None
    total = TcpBytes(0, 0)
    for link in descriptors.iterdir():
        try:
            if not os.readlink(link).startswith("socket:"):
                continue
            # A duplicate of the descriptor: closing it leaves the connection alone.
            duplicate = socket.socket(fileno=os.dup(int(link.name)))
        except OSError:  # closed since the folder was listed
            continue
        with duplicate:
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if duplicate.type != socket.SOCK_STREAM:
                continue
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) < _BYTES_RETRANSMITTED + 8:
            return None  # a kernel that does not count
        (sent,) = struct.unpack_from("=Q", info, _BYTES_SENT)
        (repeated,) = struct.unpack_from("=Q", info, _BYTES_RETRANSMITTED)
        (unsent,) = struct.unpack_from("=I", info, _BYTES_UNSENT)
        (received,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED)
        total += TcpBytes(sent - repeated + unsent, received, repeated)
    return total


def ring_all_reduce_bytes(numel: int, ranks: int, *, element_bytes: int = 4) -> int:
    """What each rank of a ring sends to all-reduce `numel` elements, headers not included."""
    return round(2 * (ranks - 1) / ranks * element_bytes * numel)
