"""Messages over TCP connections: in order, whole, counted in no other bytes, and never waited for in vain."""

import gc
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from selection import INTERRUPTIONS, MESSAGES
from torch import Tensor

from loco.net.connection import LENGTH
from loco.net.mesh import Parcel
from loco.net.tcp import LONG, TcpLinks

SOON = timedelta(seconds=20)
TOO_LONG = 32 << 20  # bytes: more than the system holds for both ends


@contextmanager
def linked(size: int = 2) -> Iterator[list[TcpLinks]]:
    """A member's links each, over real TCP connections."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for low in range(size):
            for high in range(low + 1, size):
                ends[high][low] = socket.create_connection(listener.getsockname())
                ends[low][high] = listener.accept()[0]
    links = [TcpLinks("test", mine) for mine in ends]
    try:
        yield links
    finally:
        for one in links:
            one.close()


def filled(size: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def room(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def in_threads(*do: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in do]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


@pytest.mark.check(MESSAGES, sample="2")
@pytest.mark.parametrize("seed", range(4))
def test_messages_of_all_sizes_arrive_whole_and_in_order(seed: int) -> None:
    """Three members send to each other at once; rooms are larger than messages, or just as large."""
    rng = random.Random(seed)
    longest = LONG + LONG // 2
    sizes = [rng.choice([1, 7, 8, 9, 65_535, 65_536, 65_537, rng.randrange(1, longest)]) for _ in range(40)]
    spare = [rng.choice([0, 1, 70_000]) for _ in sizes]
    batches = sorted(rng.sample(range(1, len(sizes)), 6))
    spans = list(zip([0, *batches], [*batches, len(sizes)], strict=True))

    with linked(3) as links:

        def member(me: int) -> None:
            others = [other for other in range(3) if other != me]
            waits = []
            rooms: dict[tuple[int, int], Tensor] = {}
            for start, stop in spans:
                rooms |= {(p, k): room(sizes[k] + spare[k]) for k in range(start, stop) for p in others}
                waits += links[me].begin(
                    [Parcel(p, filled(sizes[k], 100 * me + k)) for k in range(start, stop) for p in others],
                    [Parcel(p, rooms[p, k]) for k in range(start, stop) for p in others],
                )
            for one in waits:
                one.wait(SOON)
            for (p, k), got in rooms.items():
                assert torch.equal(got[: sizes[k]], filled(sizes[k], 100 * p + k))
                assert not got[sizes[k] :].any()

        in_threads(*(lambda me=me: member(me) for me in range(3)))


def test_a_long_message_travels_while_nobody_waits_for_it() -> None:
    """Longer than what the system holds for both ends. A thread moves what is not taken at once, and what has
    not come yet when the first of it is seen."""
    data, got = filled(TOO_LONG, 0), room(TOO_LONG)
    with linked() as (left, right):
        (sent,) = left.begin([Parcel(1, data)], [])
        (received,) = right.begin([], [Parcel(0, got)])
        deadline = time.monotonic() + SOON.total_seconds()
        while not (sent.over and received.over) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sent.over
        assert received.over
        assert torch.equal(data, got)


@pytest.mark.parametrize("size", [16_384, 2 * LONG])
def test_short_messages_start_no_thread_whatever_room_there_is(size: int) -> None:
    before = threading.active_count()
    with linked() as (left, right):
        sent, received = left.begin([Parcel(1, filled(100, 0))], []), right.begin([], [Parcel(0, room(size))])
        for one in sent + received:
            one.wait(SOON)
        assert threading.active_count() == before


@pytest.mark.parametrize("size", [101, 1 << 20, 1 << 63, (1 << 64) - 1])
def test_a_message_longer_than_its_room_ends_its_connection_and_no_other(size: int) -> None:
    ours, theirs = socket.socketpair()
    other, others = socket.socketpair()
    links = TcpLinks("test", {1: ours, 2: other})
    with theirs, others:
        theirs.sendall(LENGTH.pack(size))
        (first,) = links.begin([], [Parcel(1, room(100))])
        with pytest.raises(RuntimeError, match=rf"a message of {size:,} bytes where 0 to 100 are expected"):
            first.wait(SOON)
        assert theirs.recv(1) == b""  # it hears of it
        others.sendall(LENGTH.pack(3) + b"abc")
        (second,) = links.begin([], [Parcel(2, got := room(100))])
        second.wait(SOON)
        assert bytes(got[:3].tolist()) == b"abc"
        with pytest.raises(RuntimeError, match="a message of"):
            links.begin([Parcel(1, filled(1, 0))], [])
    links.close()


def test_what_a_member_sent_before_it_hung_up_is_received() -> None:
    with linked() as (left, right):
        data = [filled(5, 1), filled(100_000, 2)]
        sent = left.begin([Parcel(1, one) for one in data], [])
        for one in sent:
            one.wait(SOON)
        left.close()
        rooms = [room(5), room(100_000), room(1)]
        received = right.begin([], [Parcel(0, one) for one in rooms])
        for one in received[:2]:
            one.wait(SOON)
        assert all(torch.equal(one, got) for one, got in zip(data, rooms, strict=False))
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            received[2].wait(SOON)


@pytest.mark.parametrize("size", [1, 2 * LONG])
def test_a_member_that_hangs_up_ends_the_wait_of_those_that_wait(size: int) -> None:
    with linked(3) as (left, middle, _):
        (awaited,) = middle.begin([], [Parcel(0, room(size))])
        threading.Timer(0.2, left.close).start()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"connection closed by peer|reset"):
            awaited.wait(SOON)
        assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("size", [1, 2 * LONG])
def test_links_that_another_thread_interrupts_end_the_wait(size: int) -> None:
    with linked() as (left, _):
        (awaited,) = left.begin([], [Parcel(1, room(size))])
        threading.Timer(0.2, left.interrupt).start()
        with pytest.raises(RuntimeError, match="given up"):
            awaited.wait(SOON)
        with pytest.raises(RuntimeError, match="given up"):
            left.begin([], [Parcel(1, room(1))])


def test_a_wait_that_ends_without_its_message_closes_all_connections() -> None:
    with linked(3) as (left, middle, right):
        (awaited,) = left.begin([], [Parcel(1, room(1))])
        with pytest.raises(RuntimeError, match="not in time"):
            awaited.wait(timedelta(seconds=0.2))
        for other in (middle, right):
            (one,) = other.begin([], [Parcel(0, room(1))])
            with pytest.raises(RuntimeError, match="connection closed by peer"):
                one.wait(SOON)


class InterruptedByTestError(Exception):
    pass


@pytest.mark.parametrize("size", [1, 2 * LONG])
def test_a_signal_ends_a_wait(size: int) -> None:
    """As Ctrl-C does. What came before is not lost, for whoever goes on."""

    def raised(*_: object) -> None:
        raise InterruptedByTestError

    before = signal.signal(signal.SIGALRM, raised)
    try:
        with linked() as (left, right):
            (awaited,) = right.begin([], [Parcel(0, got := room(size))])
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(InterruptedByTestError):
                awaited.wait(SOON)
            data = filled(size, 3)
            (sent,) = left.begin([Parcel(1, data)], [])
            awaited.wait(SOON)
            sent.wait(SOON)
            assert torch.equal(got, data)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_links_that_are_dropped_leave_no_descriptor_and_no_thread() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    gc.collect()
    before = held()
    with linked() as links:
        links[0].begin([Parcel(1, filled(TOO_LONG, 0))], [])  # nobody receives it, and its thread waits
        descriptors, threads = held()
        assert descriptors > before[0]
        assert threads == before[1] + 1
        links.clear()
        gc.collect()
        deadline = time.monotonic() + 20.0
        while held() != before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert held() == before


def test_a_forked_child_that_drops_its_copy_and_ends_hangs_up_on_nobody() -> None:
    """As a DataLoader's worker may."""
    with linked() as (left, right):
        child = os.fork()
        if not child:
            left.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        (sent,) = left.begin([Parcel(1, filled(5, 1))], [])
        (received,) = right.begin([], [Parcel(0, got := room(5))])
        for one in (sent, received):
            one.wait(SOON)
        assert torch.equal(got, filled(5, 1))


def test_a_wait_may_be_longer_than_the_system_takes() -> None:
    with linked() as (left, right):
        (awaited,) = right.begin([], [Parcel(0, room(5))])
        threading.Timer(0.2, lambda: left.begin([Parcel(1, filled(5, 1))], [])).start()
        awaited.wait(timedelta(days=1000))


def test_an_error_while_the_thread_moves_messages_ends_all_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    with linked() as (left, right):
        awaited, _ = right.begin([Parcel(0, filled(TOO_LONG, 0))], [Parcel(0, room(5))])
        deadline = time.monotonic() + SOON.total_seconds()
        while right._connections._leader is None and time.monotonic() < deadline:
            time.sleep(0.01)  # until the thread leads
        monkeypatch.setattr("loco.net.tcp.Connection.see", fail)
        left.begin([Parcel(1, filled(5, 1))], [])
        with pytest.raises(RuntimeError, match="MemoryError while messages were moved: no room"):
            awaited.wait(SOON)


def test_links_in_a_circle_of_references_are_dropped_by_whichever_thread_finds_them() -> None:
    """The garbage collector may run in the thread that moves messages, while it holds the lock."""
    with linked() as links:
        one = links.pop()
        one.begin([Parcel(0, filled(TOO_LONG, 0))], [])
        connections, circle = one._connections, [one]
        circle.append(circle)  # type: ignore[arg-type]
        del one, circle
        with connections._lock:
            gc.collect()
        (awaited,) = links[0].begin([], [Parcel(1, room(TOO_LONG))])
        with pytest.raises(RuntimeError, match=r"connection closed by peer|reset"):
            awaited.wait(SOON)


@pytest.mark.check(INTERRUPTIONS)
def test_a_signal_at_any_point_of_a_wait_leaves_no_lock_behind() -> None:
    """While the thread moves messages. The wait ends by the signal, or goes on; or the message is lost with
    its connection, where it came between two of its bytes."""

    def raised(*_: object) -> None:
        raise InterruptedByTestError

    ended = []
    hook, threading.excepthook = threading.excepthook, lambda args: ended.append(args.exc_value)
    before = signal.signal(signal.SIGALRM, raised)
    rng, interrupted = random.Random(5), 0
    try:
        for k in range(100):
            with linked() as (left, right):
                (sent,) = left.begin([Parcel(1, data := filled(2 * LONG, k))], [])
                (awaited,) = right.begin([], [Parcel(0, got := room(2 * LONG))])
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 4e-4))
                        awaited.wait(SOON)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except InterruptedByTestError:
                    interrupted += 1
                try:
                    awaited.wait(SOON)
                    sent.wait(SOON)
                except RuntimeError as error:
                    assert "InterruptedByTestError" in str(error) or "peer" in str(error)  # noqa: PT017
                else:
                    assert torch.equal(got, data)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        threading.excepthook = hook
    assert interrupted > 3
    assert not ended


@pytest.mark.parametrize("size", [0, 1, 100, 70_000])
def test_a_seal_comes_behind_its_message_however_much_of_the_room_that_fills(size: int) -> None:
    seal, last = filled(16, 1), filled(3, 2)
    with linked() as (left, right):
        sent = left.begin([Parcel(1, filled(size, 0), seal), Parcel(1, last)], [])
        rooms = [Parcel(0, room(size + 5), room(16)), Parcel(0, room(3))]
        received = right.begin([], rooms)
        for one in sent + received:
            one.wait(SOON)
        assert [one.size for one in received] == [size, 3]
        assert torch.equal(rooms[0].data[:size], filled(size, 0))
        assert rooms[0].seal is not None
        assert torch.equal(rooms[0].seal, seal)
        assert torch.equal(rooms[1].data, last)


def test_a_message_shorter_than_its_seal_ends_its_connection() -> None:
    with linked() as (left, right):
        left.begin([Parcel(1, filled(15, 0))], [])
        (awaited,) = right.begin([], [Parcel(0, room(100), room(16))])
        with pytest.raises(RuntimeError, match="15 bytes where 16 to 116 are expected"):
            awaited.wait(SOON)
