"""One TCP connection: messages behind their lengths, as far as the system takes and gives bytes at once."""

import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import islice

from torch import Tensor

LENGTH = struct.Struct("<Q")
_STAGE = 1 << 16  # bytes read at once where short messages may come
_MOST = 1 << 20  # bytes moved by one call, so that none takes long
_PIECES = 16  # sent by one call: a length and a message are two

_READABLE = select.EPOLLIN
_WRITABLE = select.EPOLLOUT
_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
# They tell of changes only, so a connection keeps what they said.
EVENTS = _READABLE | _WRITABLE | select.EPOLLRDHUP | select.EPOLLET


class Message:
    """One that is sent or received.

    Args:
        tensor: uint8, contiguous.
        seal: uint8, of a fixed size: it follows the tensor's bytes in the same message.
        complete: waits for it, at most so many seconds.

    Attributes:
        memory: the tensor's.
        seal: the seal's memory, if there is one.
        size: how many bytes of `memory` are sent, or have been received.
        over: it has been, or never will be.
        error: why not.
        is_long: the thread moves it while nobody waits.
        is_shared: as of `mesh.Work`.
    """

    is_shared = False
    __slots__ = ("_complete", "error", "is_long", "memory", "over", "seal", "size")

    def __init__(
        self, tensor: Tensor, seal: Tensor | None, complete: Callable[["Message", float], object]
    ) -> None:
        self._complete = complete
        self.memory = tensor.numpy().data
        self.seal = None if seal is None else seal.numpy().data
        self.size = len(self.memory)
        self.over = False
        self.error = ""
        self.is_long = False

    def wait(self, timeout: timedelta) -> None:
        """
        Raises:
            RuntimeError: it did not come in time, and all connections are closed now; or its own was lost.
        """
        if not self.over:
            self._complete(self, timeout.total_seconds())
        if self.error:
            raise RuntimeError(self.error)


class Connection:
    """Messages to and from one member, in their order. Nothing in it waits."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        with suppress(OSError):  # it is no TCP socket
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.end = end
        # What is left of lengths and messages. A message comes with the last of its bytes.
        self._leaving: deque[tuple[memoryview, Message | None]] = deque()
        self._expected: deque[Message] = deque()
        self._room: memoryview | None = None  # what the message that is coming has left of its own
        self._seal: memoryview | None = None  # is received after it
        self._stage = memoryview(bytearray(_STAGE))
        self._unread = slice(0, 0)  # of the stage
        self._is_readable = self._is_writable = True
        self._is_ending = False
        self._lost = ""

    def check(self) -> None:
        """
        Raises:
            RuntimeError: it is lost.
        """
        if self._lost:
            raise RuntimeError(self._lost)

    def expect(self, message: Message) -> None:
        self._expected.append(message)

    def add(self, message: Message) -> None:
        pieces = [message.memory] if message.seal is None else [message.memory, message.seal]
        self._leaving.append((memoryview(LENGTH.pack(sum(map(len, pieces)))), None))
        self._leaving.extend((piece, None) for piece in pieces[:-1])
        self._leaving.append((pieces[-1], message))

    def see(self, events: int) -> None:
        self._is_readable |= bool(events & (_READABLE | _GONE))
        self._is_writable |= bool(events & (_WRITABLE | _GONE))
        self._is_ending |= bool(events & _GONE)

    def send(self, finish: Callable[[Message], object]) -> None:
        """As much as the system takes."""
        leaving = self._leaving
        while leaving and self._is_writable:
            pieces = [piece for piece, _ in islice(leaving, _PIECES)]
            if sum(map(len, pieces)) > _MOST:
                pieces = _first_of(pieces, _MOST)
            try:
                sent = self.end.sendmsg(pieces, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._is_writable = False
                return
            while leaving and sent >= len(leaving[0][0]):
                piece, message = leaving.popleft()
                sent -= len(piece)
                if message is not None:
                    finish(message)
            if sent:
                piece, message = leaving[0]
                leaving[0] = piece[sent:], message

    def receive(self, finish: Callable[[Message], object]) -> None:
        """As much as has come of the messages that are expected."""
        while self._expected:
            unread = self._unread.stop - self._unread.start
            if self._room is None:
                if unread < LENGTH.size:
                    if not self._read_on():
                        return
                    continue
                (size,) = LENGTH.unpack_from(self._stage, self._unread.start)
                message = self._expected[0]
                least = 0 if message.seal is None else len(message.seal)
                most = len(message.memory) + least
                if not least <= size <= most:
                    raise OSError(
                        f"a message of {size:,} bytes where {least:,} to {most:,} are expected: the members "
                        f"are not at the same point"
                    )
                self._unread = slice(self._unread.start + LENGTH.size, self._unread.stop)
                message.size = size - least
                self._room, self._seal = message.memory[: message.size], message.seal
                continue
            if taken := min(unread, len(self._room)):
                at = self._unread.start
                self._room[:taken] = self._stage[at : at + taken]
                self._room = self._room[taken:]
                self._unread = slice(at + taken, self._unread.stop)
            if not self._room:
                self._room, self._seal = self._seal, None
                if self._room is None:
                    finish(self._expected.popleft())
            elif len(self._room) < _STAGE:
                if not self._read_on():
                    return
            elif (count := self._read(self._room[:_MOST])) == 0:
                return
            else:
                self._room = self._room[count:]

    @property
    def coming(self) -> tuple[Message | None, int]:
        """The message that has begun to come, and how many of its bytes are yet to come."""
        return (None, 0) if self._room is None else (self._expected[0], len(self._room))

    def lose(self, why: str) -> list[Message]:
        """-> the messages that are lost with it"""
        if self._lost:
            return []
        self._lost = why
        with suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)
        lost = [*self._expected, *(message for _, message in self._leaving if message is not None)]
        self._expected.clear()
        self._leaving.clear()
        self._room = self._seal = None
        return lost

    def _read_on(self) -> bool:
        """More for the stage. False: nothing has come."""
        at, end = self._unread.start, self._unread.stop
        rest = end - at
        if at:
            self._stage[:rest] = bytes(self._stage[at:end])
        count = self._read(self._stage[rest:])
        self._unread = slice(0, rest + count)
        return count > 0

    def _read(self, room: memoryview) -> int:
        """0: nothing has come."""
        if not self._is_readable:
            return 0
        try:
            count = self.end.recv_into(room)
        except BlockingIOError:
            self._is_readable = False
            return 0
        if count == 0:
            raise OSError("connection closed by peer")
        if count < len(room) and not self._is_ending:
            self._is_readable = False  # there was no more; an event will tell when there is
        return count


def _first_of(pieces: list[memoryview], size: int) -> list[memoryview]:
    """Their first bytes."""
    first: list[memoryview] = []
    for piece in pieces:
        first.append(piece[:size])
        size -= len(first[-1])
    return first
