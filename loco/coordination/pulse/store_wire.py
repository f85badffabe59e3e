"""Requests of torch's TCPStore, encoded here so that a C thread can send them without torch.

The format is torch's own and may change, so its users first check that the store understands it.
"""

import secrets
import select
import socket
import struct

from ...errors import seconds

_VALIDATE, _SET, _PING = 0, 1, 13  # torch's QueryType
_MAGIC = 0x3C85F7CE
_IDLE = 20  # seconds, after which the system keeps a silent connection known to the routers on its way


def validate() -> bytes:
    """The first request of a connection."""
    return struct.pack("<BI", _VALIDATE, _MAGIC)


def ping(nonce: bytes) -> bytes:
    """A request that the store answers by `nonce`, four bytes."""
    return bytes([_PING]) + nonce


def connected(host: str, port: int, limit: float) -> socket.socket:
    """A connection to the store on which requests can be sent; it never blocks.

    Raises:
        OSError: nobody answers there as the store does.
    """
    end = socket.create_connection((host, port), limit)
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", _IDLE), ("TCP_KEEPINTVL", _IDLE)):
            if hasattr(socket, name):  # not on every system
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        # What was not sent when it is closed must not arrive later.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.sendall(validate())
        drain(end, limit)
    except BaseException:
        end.close()
        raise
    return end


def set_request(key: str, value: str) -> bytes:
    """A request that the store does not answer."""
    parts = (key.encode(), value.encode())
    return bytes([_SET]) + b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def drain(end: socket.socket, limit: float) -> None:
    """Return once the store has carried out all that was sent before.

    Raises:
        OSError: it does not answer within `limit`, or otherwise than a store does.
    """
    nonce = secrets.token_bytes(4)
    end.setblocking(False)
    end.sendall(ping(nonce))
    # Unlike a socket's own timeout, poll finds what came while this thread waited for the interpreter lock.
    answers = select.poll()
    answers.register(end, select.POLLIN)
    answer = b""
    while len(answer) < len(nonce):
        if not answers.poll(1000 * limit):
            raise TimeoutError(f"the store has not answered for {seconds(limit)}")
        part = end.recv(len(nonce) - len(answer))
        if not part:
            raise ConnectionResetError("the store has hung up")
        answer += part
    if answer != nonce:
        raise ConnectionError(f"the store has answered {answer!r}")


def is_open(end: socket.socket) -> bool:
    try:
        return bool(end.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False
