"""The kernel's count of a process's TCP bytes."""

import socket

import pytest

from experiments.training.ledger import TcpBytes, ring_all_reduce_bytes, tcp_bytes


def count() -> TcpBytes:
    counted = tcp_bytes()
    if counted is None:
        pytest.skip("needs TCP_INFO with byte counters (Linux 4.19 or newer)")
    return counted


def test_every_byte_between_two_sockets_is_counted_once_in_each_direction() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0] as far,
    ):
        before = count()
        near.sendall(b"x" * 100_003)
        received = 0
        while received < 100_003:
            received += len(far.recv(65536))
        apart = count() - before
        # Both ends are this process's. What TCP repeats is its own: it takes a late answer for a lost packet.
        assert (apart.sent, apart.received) == (100_003, 100_003)
        near.sendall(b"y")  # the connection has survived being looked at
        assert far.recv(1) == b"y"


def test_bytes_still_in_the_queue_are_counted_as_sent() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0],
    ):
        before = count()
        near.setblocking(False)
        handed_over = 0
        while True:  # nobody reads: the windows fill up
            try:
                handed_over += near.send(b"x" * 65536)
            except BlockingIOError:
                break
        assert (count() - before).sent == handed_over


def test_the_ring_formula() -> None:
    assert ring_all_reduce_bytes(1_000_000, 4) == 6_000_000
    assert ring_all_reduce_bytes(1_000_000, 2) == 4_000_000
    assert ring_all_reduce_bytes(1_000_000, 1) == 0
