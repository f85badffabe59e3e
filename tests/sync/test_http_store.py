"""The client of a server: what is cut off is resumed, and what can't be had is named."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from faulty_store import WHOLE
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
        assert HttpStore(proxy.url).read("a", WHOLE) == DATA
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
        HttpStore(proxy.url).read("a", WHOLE)
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
        lambda: store.read("a", WHOLE),
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
            HttpStore(url, timeout=0.2).read("a", WHOLE)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
DRIPS = 200  # bytes, after which a dripping server ends, so that this test does


@contextmanager
def saying(at_once: bytes, again: bytes) -> Iterator[tuple[str, list[bool]]]:
    """A server whose answers are these bytes, and then others, a few every 20 ms.

    -> its URL, and for each answer that has ended whether all of it was taken
    """
    closed, ended = threading.Event(), []

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(1 << 16)
                connection.sendall(at_once)
                for _ in range(DRIPS):
                    if closed.wait(0.02):
                        return
                    connection.sendall(again)
                ended.append(True)
            except OSError:  # the client has hung up
                ended.append(False)

    def accept() -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                threads.append(threading.Thread(target=answer, args=(listener.accept()[0],)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", ended
        finally:
            closed.set()
            listener.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(LONG)


DRIPPING = {
    "status": (b"", b"H"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "error": (HEAD.replace(b"200", b"404"), b" "),
    "body": (HEAD, b" "),
}
CALLS = ["names", "wait", "read", "read_chunks", "write"]


@pytest.mark.parametrize(
    ("call", "part"),
    [(call, part) for call in CALLS for part in DRIPPING if (call, part) != ("write", "body")],  # not read
)
def test_an_answer_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch, call: str, part: str) -> None:
    monkeypatch.setattr(http_store, "SLOWEST_LINK", 1e9)
    monkeypatch.setattr(http_store, "_LONGEST_DOWNLOAD", 0.5)
    monkeypatch.setattr(http_store, "_RESUMING", ())
    with saying(*DRIPPING[part]) as (url, ended):
        store = HttpStore(url, timeout=0.5)
        calls: dict[str, Callable[[], object]] = {
            "names": lambda: store.names("versions"),
            "read": lambda: store.read("a", 1 << 20),
            "read_chunks": lambda: list(store.read_chunks("a")),
            "wait": lambda: store.wait("versions", [], 0.1),
            "write": lambda: store.write("a", b""),
        }
        with pytest.raises(OSError, match=r"No answer in time|cut again and again"):
            calls[call]()
        assert True not in ended


def test_a_listing_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_store, "_LARGEST_LISTING", 99_999)
    with (
        saying(HEAD, b"") as (url, _),
        pytest.raises(
            OSError, match=f"has 100,000 bytes, and at most 99,999 may be read of it.*{url}/versions/"
        ),
    ):
        HttpStore(url).names("versions")


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
            store.read("a", WHOLE)
        thread.join()


def test_a_server_that_is_full_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose clients come with several connections each."""
    monkeypatch.setattr(http_store, "_RESUMING", (0.01, 0.01))
    answered: list[int] = []

    class Full(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answered.append(200 if len(answered) % 4 == 2 else 503)
            self.send_response(answered[-1])
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"data")

    with ThreadingHTTPServer(("127.0.0.1", 0), Full) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            store = HttpStore(f"http://127.0.0.1:{server.server_address[1]}")
            assert store.read("a", WHOLE) == b"data"
            with pytest.raises(ConnectionAbortedError, match="data"):
                store.read("a", WHOLE)
        finally:
            server.shutdown()
    assert answered == [503, 503, 200, 503, 503, 503]
