"""The client of a server: what is cut off is resumed, and what can't be had is named."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_proxy import Proxy

from loco.sync.storage import http_store
from loco.sync.storage.http_store import HttpStore
from loco.sync.storage.server import SyncServer, serve

DATA = os.urandom(1_000_003)
LONG = 60.0  # seconds; no test waits for it to pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SyncServer]:
    with serve(tmp_path, port=0, writable=True) as server:
        yield server


def test_a_body_that_is_cut_off_is_resumed_where_it_ended(server: SyncServer) -> None:
    HttpStore(server.url).write("a", DATA)
    with Proxy(server.url, cuts=(300_000, 500_000, 100)) as proxy:  # the last within a header
        assert HttpStore(proxy.url).read("a") == DATA
    starts = [
        int(line[13:-1]) for asked in proxy.requests for line in asked.split("\r\n") if "Range: b" in line
    ]
    assert len(proxy.requests) == 4
    assert 290_000 < starts[0] < 300_000
    assert 780_000 < starts[1] == starts[2] < 800_000


def test_a_body_that_is_cut_off_for_ever_is_given_up(
    server: SyncServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_store, "_RESUMING", (0.0, 0.0))
    HttpStore(server.url).write("a", DATA)
    with (
        Proxy(server.url, cuts=(1000,) * 5) as proxy,
        pytest.raises(ConnectionError, match="again and again"),
    ):
        HttpStore(proxy.url).read("a")
    assert len(proxy.requests) == 3


def test_a_file_is_never_put_together_from_two(server: SyncServer) -> None:
    store = HttpStore(server.url)
    store.write("state/latest", DATA)
    with Proxy(server.url, cuts=(300_000,)) as proxy:
        chunks = HttpStore(proxy.url).read_chunks("state/latest")
        next(chunks)
        store.write("state/latest", DATA[::-1])
        with pytest.raises(OSError, match="replaced while it was read"):
            list(chunks)


def test_an_open_download_outlives_the_file(server: SyncServer) -> None:
    store, large = HttpStore(server.url), DATA * 30
    store.write("a", large)
    chunks = store.read_chunks("a")
    first = next(chunks)
    store.delete("a")
    assert first + b"".join(chunks) == large


def test_a_server_that_is_down_is_named(tmp_path: Path) -> None:
    with serve(tmp_path, port=0) as server:
        store = HttpStore(server.url)
    for use in (
        lambda: store.read("a"),
        lambda: store.write("a", DATA),
        lambda: store.create("a", b""),
        lambda: store.delete("a"),
        lambda: store.names("versions"),
        lambda: store.wait("versions", [], LONG),
    ):
        with pytest.raises(ConnectionError, match=server.url):
            use()


def test_a_server_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"No answer in time.*{url}/a"):
            HttpStore(url, timeout=0.2).read("a")


def test_what_is_no_server_of_ours_is_told_apart(tmp_path: Path) -> None:
    def answer(headers: bytes) -> None:
        connection, _ = other.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.0 200 OK\r\n" + headers + b"\r\nwelcome")

    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=lambda: [answer(b"Content-Length: 7\r\n"), answer(b"")])
        thread.start()
        store = HttpStore(f"http://127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(OSError, match=r"no server of loco\.sync"):
            store.names("versions")
        with pytest.raises(OSError, match="has no length"):
            store.read("a")
        thread.join()
