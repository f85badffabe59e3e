"""TCP connections between the members of a group, and the messages on them.

A message travels behind its length, so it may be shorter than the room for it. Whoever waits for a message
moves the bytes of all connections meanwhile: no other thread has to be woken for the few bytes that the
system takes and gives at once. Long messages are moved by a thread while this rank computes.
"""

import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Mapping

import torch

from .connection import EVENTS, Connection, Message
from .mesh import GIVEN_UP, Messages

LONG = 1 << 20  # bytes of room from which on a message that is expected is moved by the thread


class TcpLinks:
    """Connections to all other members of a group.

    Args:
        name: as `Mesh`.
        ends: a connected socket for each of them.
    """

    device = torch.device("cpu")
    takes_less, needs_waiter = True, False

    def __init__(self, name: str, ends: Mapping[int, socket.socket]) -> None:
        self.name = name
        self._connections = Connections(ends)
        self._end = weakref.finalize(self, self._connections.close)
        self._end.atexit = False  # the system hangs up; a forked child that ends must not

    @property
    def is_open(self) -> bool:
        return self._end.alive

    def begin(self, sends: Messages, receives: Messages) -> list[Message]:
        return self._connections.begin(sends, receives)

    def interrupt(self) -> None:
        self._connections.give_up(GIVEN_UP)

    def close(self) -> None:
        self._end()


class Connections:
    """What moves the bytes. One thread at a time leads: it waits for events of all connections, and moves
    what can be moved. Others that need a message wait until it has come, or until nobody leads any more."""

    def __init__(self, ends: Mapping[int, socket.socket]) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for those who wait while another thread leads
        self._needed = threading.Condition(self._lock)  # for the thread of long messages
        self._waiting = 0
        self._leader: int | None = None
        self._long = 0  # messages on their way
        self._thread: threading.Thread | None = None
        self._given_up = self._closed = False
        self._events = select.epoll()
        self._by_member = {member: Connection(end) for member, end in ends.items()}
        self._by_number = {one.end.fileno(): one for one in self._by_member.values()}
        for number in self._by_number:
            self._events.register(number, EVENTS)

    def begin(self, sends: Messages, receives: Messages) -> list[Message]:
        """-> a message each, the receives first

        Raises:
            RuntimeError: a connection is lost.
        """
        messages: list[Message] = []
        with self._lock:
            if self._given_up:
                raise RuntimeError(GIVEN_UP)
            for member, tensor in receives:
                messages.append(message := Message(tensor, self.complete))
                self._by_member[member].expect(message)
                if len(message.memory) >= LONG:
                    self._need_thread(message)
            for member, tensor in sends:
                messages.append(message := Message(tensor, self.complete))
                self._by_member[member].add(message)
            for member in {member for member, _ in sends}.union(member for member, _ in receives):
                self._move(self._by_member[member])
            for message in messages[len(receives) :]:
                if not message.over:  # the system did not take all of it
                    self._need_thread(message)
        return messages

    def complete(self, message: Message, seconds: float) -> None:
        """Wait for it, and move all others meanwhile."""
        deadline, me = time.monotonic() + seconds, threading.get_ident()
        try:
            while not message.over:
                left = deadline - time.monotonic()
                if left <= 0:
                    self.give_up("not in time")
                    break
                with self._lock:
                    if message.over:
                        break
                    if self._leader not in (None, me):
                        self._waiting += 1
                        try:
                            self._changed.wait(left)
                        finally:
                            self._waiting -= 1
                        continue
                    self._leader = me
                self._look(left)
        finally:
            if self._leader == me:
                self._step_down()

    def give_up(self, why: str) -> None:
        """End all waits, and hang up; from any thread."""
        with self._lock:
            self._given_up = True
            for one in self._by_member.values():
                self._lose(one, why)
            self._changed.notify_all()

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child drops its copy: the connections are its parent's
        self.give_up(GIVEN_UP)
        with self._lock:
            self._closed = True
            self._needed.notify_all()
            if self._leader is None:
                self._free()

    def _look(self, seconds: float) -> None:
        """The leader's turn: wait until something can be moved."""
        events = self._events.poll(seconds)
        with self._lock:
            for number, what in events:
                one = self._by_number[number]
                one.see(what)
                self._move(one)
            if self._waiting:
                self._changed.notify_all()

    def _step_down(self) -> None:
        with self._lock:
            self._leader = None
            if self._closed:
                self._free()
            if self._waiting:
                self._changed.notify_all()
            if self._long:
                self._needed.notify()

    def _move(self, one: "Connection") -> None:
        try:
            one.send(self._finish)
            one.receive(self._finish)
        except OSError as error:
            self._lose(one, error.strerror or str(error))
        except BaseException as error:  # Ctrl-C: nobody knows which bytes come next
            self._lose(one, f"{type(error).__name__} at its messages")
            raise

    def _lose(self, one: "Connection", why: str) -> None:
        for message in one.lose(why):
            message.error = why
            self._finish(message)

    def _finish(self, message: Message) -> None:
        message.over = True
        if message.is_long:
            self._long -= 1

    def _need_thread(self, message: Message) -> None:
        message.is_long = True
        self._long += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="loco moves messages", daemon=True)
            self._thread.start()
        elif self._leader is None:
            self._needed.notify()

    def _work(self) -> None:
        """The thread of long messages."""
        me = threading.get_ident()
        while True:
            with self._lock:
                while not (self._closed or (self._long and self._leader is None)):
                    self._needed.wait()
                if self._closed:
                    return
                self._leader = me
            while self._long:
                self._look(-1)
            self._step_down()

    def _free(self) -> None:
        for one in self._by_member.values():
            one.end.close()
        self._events.close()
