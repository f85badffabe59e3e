"""Members find each other by a store, prove that they are meant, and give up when one is lost."""

import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from selection import MESSAGES
from sites import context
from torch._C._distributed_c10d import HashStore, TCPStore

from loco.net.introductions import PatientStore
from loco.net.linking import link
from loco.net.listening import Endpoint
from loco.net.mesh import Parcel
from loco.net.tcp import TcpLinks


def patient(
    store: HashStore | TCPStore, limit: float = 20.0, may_still_come: Callable[[], bool] = lambda: True
) -> PatientStore:
    return PatientStore(store, limit=limit, may_still_come=may_still_come)


def link_all(
    store: HashStore, size: int, *, meanwhile: Callable[[], object] = lambda: None
) -> list[TcpLinks]:
    links: dict[int, TcpLinks] = {}

    def member(me: int) -> None:
        links[me] = link(patient(store), "a", me, size)

    threads = [threading.Thread(target=member, args=(me,)) for me in range(size)]
    threads[0].start()
    meanwhile()
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    return [links[me] for me in range(size)]


def assert_all_linked(links: list[TcpLinks]) -> None:
    for me, mine in enumerate(links):
        for other, theirs in enumerate(links):
            if other != me:
                mine.begin([Parcel(other, torch.tensor([me, other], dtype=torch.uint8))], [])
                (one,) = theirs.begin([], [Parcel(me, got := torch.zeros(2, dtype=torch.uint8))])
                one.wait(timedelta(seconds=20))
                assert got.tolist() == [me, other]


def where(store: HashStore | TCPStore, member: int) -> tuple[str, int]:
    deadline = time.monotonic() + 20
    while not store.check([f"a/{member}"]):
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.01)
    host, port, _, _ = store.get(f"a/{member}").decode().split(" ")
    return host, int(port)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_member_is_linked_to_every_other(size: int) -> None:
    links = link_all(HashStore(), size)
    assert_all_linked(links)
    for one in links:
        one.close()


def test_strangers_are_hung_up_on_and_hold_up_nobody() -> None:
    """One that says nothing, one that says too little, one that says something else; and a port scanner."""
    store, strangers = HashStore(), []

    def meddle() -> None:
        for said in (b"", b"GET / HTTP/1.1", bytes(20), bytes(100)):
            strangers.append(socket.create_connection(where(store, 0)))
            strangers[-1].sendall(said)
        socket.create_connection(where(store, 0)).close()

    links = link_all(store, 3, meanwhile=meddle)
    assert_all_linked(links)
    for stranger in strangers:
        stranger.settimeout(20.0)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()
    for one in links:
        one.close()


def link_with_few_descriptors(port: int, more: int, done: Any) -> None:
    """Member 0, in a process that can open `more` descriptors, and then none."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    highest = max(int(number) for number in os.listdir("/proc/self/fd"))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + more, most))
    one = link(patient(store, limit=60.0), "a", 0, 2)
    one.begin([Parcel(1, torch.tensor([7], dtype=torch.uint8))], [])
    done.recv()


@pytest.mark.check(MESSAGES)
@pytest.mark.parametrize("more", [4, 250], ids=lambda more: f"{more}")
def test_a_member_gets_in_however_many_strangers_keep_their_connections(more: int) -> None:
    """600 of them, before it comes: more than the process can open, and more than it keeps."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = context.Pipe()
    process = context.Process(target=link_with_few_descriptors, args=(store.port, more, theirs), daemon=True)
    process.start()
    strangers: list[socket.socket] = []
    try:
        strangers += [socket.create_connection(where(store, 0)) for _ in range(600)]
        mine = link(patient(store, limit=60.0), "a", 1, 2)
        (one,) = mine.begin([], [Parcel(0, got := torch.zeros(1, dtype=torch.uint8))])
        one.wait(timedelta(seconds=20))
        assert got.tolist() == [7]
        mine.close()
    finally:
        for stranger in strangers:
            stranger.close()
        process.kill()
        process.join()
        ours.close()


@pytest.mark.parametrize(
    "card",
    [
        f"127.0.0.1 {{port}} {'ab' * 2_000_000} {bytes(16).hex()}",  # longer than the sockets' memory
        f"127.0.0.1 {{port}} {bytes(16).hex()} {bytes(15).hex()}",
        f"127.0.0.1 99999 {bytes(16).hex()} {bytes(16).hex()}",
        f"127.0.0.1 x {bytes(16).hex()} {bytes(16).hex()}",
        f"a.name.to.look.up {{port}} {bytes(16).hex()} {bytes(16).hex()}",
        "127.0.0.1",
        "",
    ],
    ids=["long", "short", "port", "no port", "name", "words", "empty"],
)
def test_a_malformed_card_is_an_error_that_says_so(card: str) -> None:
    """What listens there does not read: whoever sent it all would wait for ever."""
    store, errors = HashStore(), list[BaseException]()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        store.set("a/0", card.format(port=deaf.getsockname()[1]))

        def member() -> None:
            try:
                link(patient(store), "a", 1, 2)
            except Exception as error:
                errors.append(error)

        linking = threading.Thread(target=member, daemon=True)
        linking.start()
        linking.join(30.0)
    (error,) = errors
    assert isinstance(error, RuntimeError)
    assert str(error).startswith(
        "a/0 in the store must hold an IP address, a port and two tokens of 16 bytes"
    )
    assert len(str(error)) < 300


def test_another_listener_at_a_members_address_is_not_taken_for_it() -> None:
    """As where two machines call themselves 127.0.0.1."""
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as other:
        host, port = other.getsockname()
        store.set("a/0", f"{host} {port} {bytes(16).hex()} {bytes(16).hex()}")

        def answer() -> None:
            end, _ = other.accept()
            with end:
                end.sendall(b"SSH-2.0-OpenSSH_9.9p1")
                end.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(
            RuntimeError, match=f"what listens at {host}:{port} is not member 0: it has another token"
        ):
            link(patient(store), "a", 1, 2)
        thread.join()


@pytest.mark.parametrize("member", [0, 1, 2])
def test_a_member_that_is_lost_ends_the_building_at_once(member: int) -> None:
    """Member 1 of three has come; it, or who connects to it, finds that another one will not."""
    store, began = HashStore(), time.monotonic()
    with pytest.raises(RuntimeError, match="another rank did not come to build its links"):
        link(patient(store, may_still_come=lambda: time.monotonic() < began + 0.2), "a", member, 3)
    assert time.monotonic() - began < 10.0


def test_a_member_that_never_accepts_is_waited_for_within_the_limit() -> None:
    """Its system completes connections, and it is stopped."""
    store, began = HashStore(), time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        host, port = stopped.getsockname()
        store.set("a/0", f"{host} {port} {bytes(16).hex()} {bytes(16).hex()}")
        with pytest.raises(RuntimeError, match="another rank did not come"):
            link(patient(store, limit=0.3), "a", 1, 2)
    assert time.monotonic() - began < 10.0


def test_a_member_whose_port_is_closed_is_tried_again_until_the_limit() -> None:
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        host, port = closed.getsockname()
    store.set("a/0", f"{host} {port} {bytes(16).hex()} {bytes(16).hex()}")
    with pytest.raises(RuntimeError, match=rf"it listens at {host}:{port}, and Connection refused"):
        link(patient(store, limit=0.3), "a", 1, 2)


def test_the_interface_that_the_environment_names_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    store = HashStore()
    links = link_all(store, 2)
    assert where(store, 0)[0] == "127.0.0.1"
    for one in links:
        one.close()


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(RuntimeError, match="GLOO_SOCKET_IFNAME: interface 'eth77' has no address"):
        link(patient(HashStore()), "a", 0, 2)


def test_an_address_that_is_not_this_machines_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"can't listen at 192\.0\.2\.1"):
        link(patient(HashStore()), "a", 0, 2, endpoint=Endpoint("192.0.2.1"))


def test_a_host_that_can_not_be_reached_is_named() -> None:
    store = HashStore()
    store.set("a/0", f"255.255.255.255 9 {bytes(16).hex()} {bytes(16).hex()}")
    with pytest.raises(RuntimeError, match=r"it listens at 255\.255\.255\.255:9, and "):
        link(patient(store, limit=0.5), "a", 1, 2)


def test_a_name_with_an_address_that_is_not_this_machines_has_others_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a cloud's public address."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, 0)) for at in ("203.0.113.5", "127.0.0.9")]
    monkeypatch.setattr("loco.net.linking.socket.getaddrinfo", lambda *_, **__: found)
    store = HashStore()
    with pytest.raises(RuntimeError, match="another rank did not come"):
        link(patient(store, limit=0.1), "a", 0, 2)
    assert where(store, 0)[0] == "127.0.0.9"
