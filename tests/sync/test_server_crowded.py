"""The server and clients that hold on to it: whoever has the token is answered all the same."""

import os
import resource
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from faulty_store import WHOLE
from selection import MESSAGES, SCHEDULES
from test_server import DATA, LONG, until

from experiments.processes.orphans import through
from loco.sync.storage import listener, watches
from loco.sync.storage import server as server_module
from loco.sync.storage.http_store import HttpStore
from loco.sync.storage.names import listing_tag
from loco.sync.storage.server import serve

TOKEN = "right"
HALF = b"GET /versions/1 HTTP/1.1\r\nX: "


@contextmanager
def limited(folder: Path, files: int, token: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a server under `ulimit -n`, and its URL."""
    (folder / "versions").mkdir()
    (folder / "versions/1").write_bytes(DATA)
    serving = shlex.join([sys.executable, "-m", "loco", "sync", "serve", str(folder), "--port", "0"])
    command = through(["bash", "-c", f"ulimit -n {files}; exec {serving}"])
    variables = os.environ | {"LOCO_SYNC_TOKEN": token}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process, process.stdout.readline().rpartition(" ")[2].strip()
        finally:
            process.kill()


def connected(url: str) -> socket.socket:
    return socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), LONG)


def held(open_ones: ExitStack, url: str, count: int, request: bytes) -> list[socket.socket]:
    found = [open_ones.enter_context(connected(url)) for _ in range(count)]
    for k, connection in enumerate(found):
        connection.sendall(request.replace(b"%d", b"%d" % k))
    return found


def ended(connection: socket.socket) -> bool:
    """Waits until the server has ended it."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def threads_of(process: subprocess.Popen[str]) -> int:
    return len(os.listdir(f"/proc/{process.pid}/task"))


@pytest.mark.check(MESSAGES)
def test_a_client_is_answered_while_380_others_send_half_a_request(tmp_path: Path) -> None:
    with limited(tmp_path, 256, TOKEN) as (process, url), ExitStack() as open_ones:
        connections = held(open_ones, url, 380, HALF)
        for _ in range(20):
            assert HttpStore(url, TOKEN, timeout=5.0).read("versions/1", WHOLE) == DATA
        assert threads_of(process) < 100
        assert all(ended(connection) for connection in connections[:200])  # at once, as there was no room


@pytest.mark.check(SCHEDULES)
def test_a_process_that_can_open_no_more_files_answers_and_does_not_spin(tmp_path: Path) -> None:
    with limited(tmp_path, 1024, TOKEN) as (process, url), ExitStack() as open_ones:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (64, 64))  # it has counted on more
        held(open_ones, url, 100, HALF)
        store = HttpStore(url, TOKEN)
        until(lambda: is_answered(store))
        before = cpu_seconds(process)
        threading.Event().wait(1.0)
        assert cpu_seconds(process) - before < 0.5


def is_answered(store: HttpStore) -> bool:
    try:
        return store.read("versions/1", WHOLE) == DATA
    except OSError:
        return False


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.check(SCHEDULES)
@pytest.mark.parametrize("folder", ["no%d", "versions"])
def test_long_polls_beyond_a_number_are_answered_at_once(tmp_path: Path, folder: str) -> None:
    """Of folders that are not there, too, and by anybody, as the server has no token."""
    tag = listing_tag(["1"] if folder == "versions" else [])
    asked = f"GET /{folder}/ HTTP/1.1\r\nIf-None-Match: {tag}\r\nPrefer: wait=60\r\nConnection: close\r\n\r\n"
    with limited(tmp_path, 128, "") as (_, url), ExitStack() as open_ones:
        # There is room for 36. Of these, 18 may wait, for 16 folders at most.
        connections = held(open_ones, url, 30, asked.encode())
        until(lambda: len(wait(connections, 0)) >= 12)
        for connection in wait(connections, 0):
            assert isinstance(connection, socket.socket)
            assert connection.recv(12) == b"HTTP/1.1 304"
        store = HttpStore(url, timeout=5.0)
        assert store.read("versions/1", WHOLE) == DATA
        with ThreadPoolExecutor() as pool:
            change = pool.submit(store.wait, "versions", ["1"], LONG)
            (tmp_path / "versions/2").write_bytes(DATA)
            assert change.result() == ["1", "2"]


def test_a_client_without_the_token_does_not_wait(tmp_path: Path) -> None:
    with serve(tmp_path, port=0, token=TOKEN) as server, connected(server.url) as connection:
        tag = listing_tag([])
        asked = f"GET /a/ HTTP/1.1\r\nIf-None-Match: {tag}\r\nPrefer: wait=60\r\n\r\n"
        connection.sendall(asked.encode())
        assert connection.recv(12) == b"HTTP/1.1 401"
        assert not server._watches._watches


@pytest.mark.parametrize("start", [b"", b"GE", HALF, b"GET /versions/1 HTTP/1.1\r\n"])
def test_a_request_that_drips_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(listener, "_HEAD", 0.5)
    with serve(tmp_path, port=0) as server, connected(server.url) as connection:
        connection.sendall(start)
        assert drips(connection, b"a")


def drips(connection: socket.socket, byte: bytes) -> bool:
    """Sends a byte every now and then until the server has ended the connection."""
    cut = threading.Event()

    def drip() -> None:
        try:
            while not cut.wait(0.02):
                connection.sendall(byte)
        except OSError:
            pass

    with ThreadPoolExecutor() as pool:
        dripping = pool.submit(drip)
        try:
            return ended(connection)
        finally:
            cut.set()
            dripping.result()


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_drips_is_cut_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_chunked: bool
) -> None:
    monkeypatch.setattr(listener, "QUIET", 0.5)
    monkeypatch.setattr(listener, "SLOWEST_LINK", 1e9)
    length = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: 1000000"
    with serve(tmp_path, port=0, writable=True) as server, connected(server.url) as connection:
        connection.sendall(b"PUT /a HTTP/1.1\r\n" + length + b"\r\n\r\n")
        assert drips(connection, b"1\r\na\r\n" if is_chunked else b"a")
        until(lambda: not server._listener._connections)
        assert not list(tmp_path.iterdir())


def test_a_client_that_reads_too_slowly_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "QUIET", 0.5)
    monkeypatch.setattr(listener, "SLOWEST_LINK", 1e9)
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 30)
    with serve(tmp_path, port=0) as server, connected(server.url) as connection:
        connection.sendall(b"GET /a HTTP/1.1\r\n\r\n")
        assert connection.recv(1) == b"H"
        until(lambda: bool(connection.recv(1)) and not server._listener._connections)


def test_a_server_whose_clients_are_all_busy_refuses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "most_connections", lambda: 2)
    with serve(tmp_path, port=0, writable=True) as server, ExitStack() as open_ones:
        held(open_ones, server.url, 2, b"PUT /%d HTTP/1.1\r\nContent-Length: 9\r\n\r\n")
        until(lambda: [one.is_busy for one in server._listener._connections.values()] == [True, True])
        with connected(server.url) as third, third.makefile("rb") as answer:
            assert answer.read().startswith(b"HTTP/1.1 503 ")
        with pytest.raises(ConnectionError):
            HttpStore(server.url).names("")


def test_a_client_that_has_the_token_is_cut_after_those_that_never_had_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "most_connections", lambda: 2)
    asked = f"GET /a HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    with serve(tmp_path, port=0, token=TOKEN) as server, ExitStack() as open_ones:
        (tmp_path / "a").touch()
        (known,) = held(open_ones, server.url, 1, asked)
        assert known.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        (stranger,) = held(open_ones, server.url, 1, HALF)
        assert HttpStore(server.url, TOKEN).read("a", WHOLE) == b""
        assert ended(stranger)
        known.sendall(asked)
        assert known.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_the_folders_that_are_watched_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "_MOST_FOLDERS", 2)
    with serve(tmp_path, port=0) as server, ExitStack() as open_ones:
        asked = f"HTTP/1.1\r\nIf-None-Match: {listing_tag([])}\r\nPrefer: wait=60\r\n\r\n".encode()
        held(open_ones, server.url, 2, b"GET /no%d/ " + asked)
        until(lambda: len(server._watches._watches) == 2)
        (third,) = held(open_ones, server.url, 1, b"GET /other/ " + asked)
        assert third.recv(12) == b"HTTP/1.1 304"
