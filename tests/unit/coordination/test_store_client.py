"""A line to the store: every question is answered within a limit or given up, and a cut one is laid again."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest
from selection import INTERRUPTIONS
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from loco.coordination import store_client as line
from loco.coordination.store_client import StoreClient


@pytest.fixture
def host() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)


def cut(port: int) -> int:
    """Close all of this process's connections to the store's host, as a router that forgets them does."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        if not Path(f"/proc/self/fd/{name}").is_socket():
            continue
        with suppress(OSError, IndexError), socket.socket(fileno=os.dup(int(name))) as end:
            if end.getpeername()[1] == port:
                end.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def test_a_connection_that_was_cut_is_laid_again(host: TCPStore) -> None:
    asked = StoreClient(PrefixStore("p", host), limit=20.0)
    asked.set("a", "1")
    for _ in range(3):
        assert cut(host.port) > 0
        assert asked.get("a") == b"1"
        assert asked.compare_set("a", "1", "1") == b"1"


def test_a_host_that_is_gone_is_an_error_and_not_a_wait() -> None:
    host = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300), wait_for_workers=False)
    client = TCPStore("127.0.0.1", host.port, None, False, timedelta(seconds=300))
    asked, port = StoreClient(client, limit=20.0), host.port
    del host
    cut(port)
    with pytest.raises(RuntimeError, match=f"127.0.0.1:{port} can't be reached"):
        asked.check(["a"])


def test_the_first_connection_may_take_longer_than_an_answer(
    host: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second goes by until a lost packet that opens a connection is sent again."""
    connect = socket.create_connection

    def slow(address: tuple[str, int], timeout: float) -> socket.socket:
        if timeout < 1.0:
            raise TimeoutError("timed out")
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", slow)
    asked = StoreClient(host, limit=0.5, connect_limit=20.0)
    asked.set("a", "1")
    cut(host.port)
    with pytest.raises(RuntimeError, match="can't be reached: timed out"):
        asked.get("a")


class Slow(HashStore):
    """It answers late, as long as it is told to."""

    seconds: ClassVar[list[float]] = []

    def clone(self) -> "Slow":
        return self

    def check(self, keys: list[str]) -> bool:
        time.sleep(Slow.seconds.pop() if Slow.seconds else 0.0)
        return False


def test_one_slow_answer_at_the_start_does_not_raise_the_limit_for_good() -> None:
    Slow.seconds = [0.5]
    asked = StoreClient(Slow(), limit=0.2)
    assert asked.round_trip >= 0.5
    assert not asked.check(["a"])
    Slow.seconds = [2.0]
    with pytest.raises(RuntimeError, match=r"no answer within 0\.2 s"):
        asked.check(["a"])


def test_writing_a_key_does_not_count_as_a_round_trip() -> None:
    """torch sends it, and waits for no answer: a store that is far away would look near."""
    Slow.seconds = [0.3]
    asked = StoreClient(Slow(), limit=5.0)
    asked.set("a", "1")
    assert asked.round_trip >= 0.3


def test_over_a_slow_link_a_connection_that_was_cut_has_time_to_be_laid_again(
    host: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = socket.create_connection
    asked = StoreClient(host, limit=0.2)
    asked.round_trip = 5.0
    given: list[float] = []

    def remember(address: tuple[str, int], timeout: float) -> socket.socket:
        given.append(timeout)
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", remember)
    cut(host.port)
    asked.set("a", "1")
    assert given == [30.0]


class Stuck(HashStore):
    """Its connections wait without end when they are asked, if they are told to be silent."""

    made = 0
    silent: ClassVar[set[int]] = set()
    ended = threading.Event()

    def clone(self) -> "Connection":
        Stuck.made += 1
        return Connection(Stuck.made)


class Connection:
    def __init__(self, number: int) -> None:
        self.number = number

    def check(self, keys: list[str]) -> bool:
        if self.number in Stuck.silent:
            Stuck.ended.wait(60.0)
        return True


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    Stuck.made, Stuck.silent, Stuck.ended = 0, set(), threading.Event()
    yield Stuck()
    Stuck.ended.set()


def test_a_thread_that_waits_without_end_is_replaced_now_and_then(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, before = StoreClient(stuck, limit=0.2), threading.active_count()
    Stuck.silent = {1, 2}
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"no answer within 0\.2 s"):
            asked.check(["a"])
    assert Stuck.made == 2  # at once, but not again and again
    monkeypatch.setattr(line, "_AGAIN", 0.0)
    with pytest.raises(RuntimeError, match=r"no answer within 0\.2 s"):
        asked.check(["a"])
    assert asked.check(["a"])
    Stuck.ended.set()
    deadline = time.monotonic() + 30.0
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before  # those that were left to themselves end


ENDING = """
import time
from datetime import timedelta
from pathlib import Path
from torch.distributed import TCPStore
from loco.coordination.store_client import StoreClient

host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
guest = TCPStore("127.0.0.1", host.port, is_master=False)

class Slow:
    def clone(self):
        return self

    def check(self, keys):
        return False

    def delete_key(self, key):
        guest.wait([key], timedelta(seconds=1.2))  # inside torch's C++

class Last:
    def __del__(self):  # while the interpreter ends
        time.sleep(2.0)

last = Last()
client = StoreClient(Slow(), limit=0.3)
client.delete_key("never there")
time.sleep(0.3)
"""


@pytest.mark.check(INTERRUPTIONS)
@pytest.mark.parametrize("then", ["", "del client"])
def test_a_program_that_ends_waits_for_the_thread_to_leave_the_store(then: str) -> None:
    """A thread that comes back from torch's C++ while the interpreter ends aborts the process."""
    ended = subprocess.run([sys.executable, "-c", ENDING + then], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
