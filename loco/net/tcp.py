"""TCP connections between the members of a group, and the messages on them.

A message travels behind its length, so it may be shorter than the room for it. Whoever waits for a message
moves the bytes of all connections meanwhile: no other thread has to be woken for the few bytes that the
system takes and gives at once. While this rank computes, a thread moves what the system did not take, and
long messages of which the first bytes have been read.
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
from .mesh import GIVEN_UP, Parcels

LONG = 1 << 20  # bytes that are yet to come of a message which the thread moves
_LONGEST_LOOK = 3600.0  # seconds; the system takes no more than some weeks


class TcpLinks:
    """Connections to all other members of a group.

    Args:
        name: as `Mesh`.
        ends: a connected socket for each of them.
    """

    device = torch.device("cpu")
    takes_seals = True

    def __init__(self, name: str, ends: Mapping[int, socket.socket]) -> None:
        self.name = name
        self._connections = Connections(ends)
        self._dropped = weakref.finalize(self, _close_soon, self._connections)
        self._dropped.atexit = False  # the system hangs up; a forked child that ends must not

    @property
    def is_open(self) -> bool:
        return self._dropped.alive

    def begin(self, sends: Parcels, receives: Parcels) -> list[Message]:
        return self._connections.begin(sends, receives)

    def interrupt(self) -> None:
        self._connections.give_up(GIVEN_UP)

    def close(self) -> None:
        if self._dropped.detach() is not None:
            self._connections.close()


class Connections:
    """What moves the bytes. One thread at a time leads: it waits for events of all connections, and moves
    what can be moved. Others that need a message wait until it has come, or until nobody leads any more."""

    def __init__(self, ends: Mapping[int, socket.socket]) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()  # Ctrl-C can come at any point: nothing that needs it waits in it
        self._turns: list[threading.Lock] = []  # of those who wait while another thread leads
        self._needed = threading.Condition(self._lock)  # for the thread of long messages
        self._leader: int | None = None
        self._long = 0  # messages on their way
        self._thread: threading.Thread | None = None
        self._given_up = self._closed = False
        self._events = select.epoll()
        self._by_member = {member: Connection(end) for member, end in ends.items()}
        self._by_number = {one.end.fileno(): one for one in self._by_member.values()}
        for number in self._by_number:
            self._events.register(number, EVENTS)

    def begin(self, sends: Parcels, receives: Parcels) -> list[Message]:
        """-> a message each, the receives first

        Raises:
            RuntimeError: a connection is lost.
        """
        messages: list[Message] = []
        members = {one.member for one in (*sends, *receives)}
        with self._lock:
            if self._given_up:
                raise RuntimeError(GIVEN_UP)
            for member in members:
                self._by_member[member].check()
            for one in receives:
                messages.append(message := Message(one.data, one.seal, self.complete))
                self._by_member[one.member].expect(message)
            for one in sends:
                messages.append(message := Message(one.data, one.seal, self.complete))
                self._by_member[one.member].add(message)
            for member in members:
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
                turn = None
                with self._lock:
                    if message.over:
                        break
                    if self._leader in (None, me):
                        self._leader = me
                    else:
                        self._turns.append(turn := threading.Lock())
                        turn.acquire()
                if turn is None:
                    self._look(left)
                else:
                    turn.acquire(timeout=min(left, _LONGEST_LOOK))
        finally:
            if self._leader == me:
                self._step_down()

    def give_up(self, why: str) -> None:
        """End all waits, and hang up; from any thread."""
        with self._lock:
            self._given_up = True
            for one in self._by_member.values():
                self._lose(one, why)
            self._long = 0  # whatever became of them
            self._end_turns()

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
        try:
            events = self._events.poll(min(seconds, _LONGEST_LOOK))
            with self._lock:
                for number, what in events:
                    one = self._by_number[number]
                    one.see(what)
                    self._move(one)
                self._end_turns()
        except BaseException:  # Ctrl-C: events are told once, so ask for them again
            with self._lock:
                for number in self._by_number:
                    self._events.modify(number, EVENTS)
            raise

    def _step_down(self) -> None:
        with self._lock:
            self._leader = None
            if self._closed:
                self._free()
            self._end_turns()
            if self._long:
                self._needed.notify()

    def _end_turns(self) -> None:
        while self._turns:
            self._turns.pop().release()

    def _move(self, one: "Connection") -> None:
        try:
            one.send(self._finish)
            one.receive(self._finish)
        except OSError as error:
            self._lose(one, error.strerror or str(error))
        except BaseException as error:  # Ctrl-C: nobody knows which bytes come next
            self._lose(one, f"{type(error).__name__} at its messages")
            raise
        coming, left = one.coming
        if coming is not None and left >= LONG and not coming.is_long:
            self._need_thread(coming)

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
            thread = threading.Thread(target=self._work, name="loco moves messages", daemon=True)
            thread.start()
            self._thread = thread
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
            try:
                while self._long and not self._closed:
                    self._look(_LONGEST_LOOK)
            except BaseException as error:  # or all would wait for a leader that is gone
                self.give_up(f"{type(error).__name__} while messages were moved: {error}")
            finally:
                self._step_down()

    def _free(self) -> None:
        for one in self._by_member.values():
            one.end.close()
        self._events.close()


def _close_soon(connections: Connections) -> None:
    """For links that were dropped: any thread may find them, perhaps while it holds the connections' lock."""
    threading.Thread(target=connections.close, name="loco closes links", daemon=True).start()
