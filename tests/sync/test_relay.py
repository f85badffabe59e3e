"""A relay: one download for all who ask it, and what it has if its upstream is down."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from disks import small_disk
from faulty_store import WHOLE
from http_proxy import Proxy
from selection import SCHEDULES
from sites import free_port
from test_server import LONG, until

from experiments.processes.orphans import through
from loco.sync.storage import relay as relay_module
from loco.sync.storage.http_store import HttpStore
from loco.sync.storage.server import SyncServer, serve

DATA = os.urandom(1_000_003)


class Chain:
    """clients -> relay -> proxy, which counts -> upstream"""

    def __init__(self, folder: Path, upstream: SyncServer, proxy: Proxy, relay: SyncServer) -> None:
        self.kept = folder
        self.upstream, self.relay = HttpStore(upstream.url), HttpStore(relay.url)
        self.proxy, self.relay_server = proxy, relay

    def connections(self) -> int:
        return len(self.relay_server._listener._connections)


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    (tmp_path / "upstream").mkdir()
    (tmp_path / "relay").mkdir()
    with (
        serve(tmp_path / "upstream", port=0, writable=True) as upstream,
        Proxy(upstream.url) as proxy,
        serve(tmp_path / "relay", port=0, upstream=proxy.url) as relay,
    ):
        yield Chain(tmp_path / "relay", upstream, proxy, relay)


def test_eight_readers_at_once_cost_one_download(chain: Chain) -> None:
    chain.upstream.write("versions/1", DATA)
    chain.proxy.answers_pass.clear()
    with ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(chain.relay.read, "versions/1", WHOLE) for _ in range(8)]
        until(lambda: chain.connections() == 8)
        chain.proxy.answers_pass.set()
        assert all(read.result() == DATA for read in reads)
    assert chain.relay.read("versions/1", WHOLE) == DATA
    assert len(chain.proxy.requests) == 1


def test_a_slow_download_is_not_taken_for_a_relay_that_is_down(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "_KEEP_ALIVE", 0.05)
    chain.upstream.write("versions/1", DATA)
    chain.proxy.answers_pass.clear()
    parts = urlsplit(chain.relay.url)
    with ThreadPoolExecutor() as pool, socket.create_connection((parts.hostname, parts.port), LONG) as raw:
        read = pool.submit(HttpStore(chain.relay.url).read, "versions/1", WHOLE)
        raw.sendall(b"GET /versions/1 HTTP/1.1\r\nConnection: close\r\n\r\n")
        with raw.makefile("rb") as answer:
            assert [answer.readline() for _ in range(6)] == [b"HTTP/1.1 100 Continue\r\n", b"\r\n"] * 3
            chain.proxy.answers_pass.set()
            assert answer.read().endswith(DATA)
        assert read.result() == DATA


def test_a_client_that_hangs_up_does_not_end_the_download_of_the_others(chain: Chain) -> None:
    chain.upstream.write("versions/1", DATA)
    chain.proxy.answers_pass.clear()
    parts = urlsplit(chain.relay.url)
    with ThreadPoolExecutor() as pool:
        with socket.create_connection((parts.hostname, parts.port), LONG) as first:
            first.sendall(b"GET /versions/1 HTTP/1.1\r\n\r\n")
            until(lambda: len(chain.proxy.requests) == 1)
        second = pool.submit(chain.relay.read, "versions/1", WHOLE)
        until(lambda: chain.connections() == 2)
        chain.proxy.answers_pass.set()
        assert second.result() == DATA
    assert len(chain.proxy.requests) == 1


def test_a_state_is_never_kept(chain: Chain) -> None:
    for latest in (b"1", b"2", b""):
        chain.upstream.write("state/latest", latest)
        assert chain.relay.read("state/latest", WHOLE) == latest
    assert not list(chain.kept.rglob("latest"))


def test_a_state_that_is_too_large_for_memory_is_refused(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "_LARGEST_STATE", 1003)
    chain.upstream.write("state/latest", DATA[:1003])
    assert chain.relay.read("state/latest", WHOLE) == DATA[:1003]
    chain.upstream.write("state/latest", DATA[:1004])
    with pytest.raises(OSError, match=r"has more than 1,003 bytes.*state/latest"):
        chain.relay.read("state/latest", WHOLE)


def test_what_the_upstream_deleted_is_dropped_after_a_listing(chain: Chain) -> None:
    for name in ("1", "2"):
        chain.upstream.write(f"versions/{name}", DATA)
        assert chain.relay.read(f"versions/{name}", WHOLE) == DATA
    chain.upstream.delete("versions/1")
    assert [path.name for path in sorted(chain.kept.rglob("versions/*"))] == ["1", "2"]
    assert chain.relay.names("versions") == ["2"]
    assert [path.name for path in chain.kept.rglob("versions/*")] == ["2"]
    with pytest.raises(FileNotFoundError):
        chain.relay.read("versions/1", WHOLE)


def test_all_who_wait_share_one_long_poll_upstream(chain: Chain) -> None:
    def polls(kind: str) -> int:
        return sum(kind in request for request in chain.proxy.requests)

    chain.upstream.write("versions/1", b"")
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(chain.relay.wait, "versions", ["1"], LONG) for _ in range(4)]
        # Each asks for the listing, and so does the one that waits for all of them.
        until(lambda: chain.proxy.count("GET /versions/ ") == 4 + 2)
        chain.upstream.write("versions/2", b"")
        assert [wait.result() for wait in waits] == [["1", "2"]] * 4
    assert 1 <= polls("Prefer: wait=") <= 2  # the next one has begun already


def test_a_download_that_is_cut_off_is_resumed_and_kept_once(tmp_path: Path) -> None:
    (tmp_path / "relay").mkdir()
    with (
        serve(tmp_path, port=0, writable=True) as upstream,
        Proxy(upstream.url, cuts=(300_000,)) as proxy,
        serve(tmp_path / "relay", port=0, upstream=proxy.url) as relay,
    ):
        HttpStore(upstream.url).write("versions/1", DATA)
        assert HttpStore(relay.url).read("versions/1", WHOLE) == DATA
        assert len(proxy.requests) == 2


def test_a_relay_of_a_relay_is_a_relay(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    with serve(tmp_path / "second", port=0, upstream=chain.relay.url) as second:
        store = HttpStore(second.url)
        chain.upstream.write("versions/1", DATA)
        assert store.wait("versions", [], LONG) == ["1"]
        assert store.read("versions/1", WHOLE) == store.read("versions/1", WHOLE) == DATA
        assert chain.proxy.count("GET /versions/1 ") == 1


def test_a_relay_can_have_any_store_as_its_upstream(tmp_path: Path) -> None:
    (tmp_path / "upstream/versions").mkdir(parents=True)
    (tmp_path / "upstream/versions/1").write_bytes(DATA)
    with serve(tmp_path, port=0, upstream=str(tmp_path / "upstream")) as relay:
        assert HttpStore(relay.url).wait("versions", [], LONG) == ["1"]
        assert HttpStore(relay.url).read("versions/1", WHOLE) == DATA


def test_a_relay_deletes_nothing_that_it_did_not_download(chain: Chain) -> None:
    mine = chain.kept / "versions" / "mine"
    mine.parent.mkdir()
    mine.write_bytes(DATA)
    assert chain.relay.names("versions") == []
    assert chain.relay.names("") == []
    assert mine.exists()


def test_a_relay_can_not_be_written_to(chain: Chain, tmp_path: Path) -> None:
    for change in (lambda: chain.relay.write("a", DATA), lambda: chain.relay.delete("a")):
        with pytest.raises(PermissionError, match="relay can't be written to"):
            change()
    with pytest.raises(ValueError, match="write to its upstream"):
        serve(tmp_path, port=0, upstream=chain.upstream.url, writable=True)


def test_a_full_relay_says_so(chain: Chain, tmp_path: Path) -> None:
    chain.upstream.write("versions/1", bytes(3_000_000))
    disk = tmp_path / "disk"
    with small_disk(disk, "1m"), serve(disk, port=0, upstream=chain.upstream.url) as relay:
        with pytest.raises(OSError, match="No space left"):
            HttpStore(relay.url).read("versions/1", WHOLE)
        assert not [path for path in disk.rglob("*") if path.is_file()]


@contextmanager
def upstream_process(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "loco", "sync", "serve", str(folder), "--port", str(port)]
    with subprocess.Popen(through(command), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == f"serving {folder} at http://127.0.0.1:{port}\n"
        yield process
        process.kill()


@pytest.mark.check(SCHEDULES)
def test_a_relay_outlives_its_upstream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, port = tmp_path / "upstream", free_port()
    for name in ("versions/1", "versions/2", "state/latest"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(DATA)
    with serve(tmp_path, port=0, upstream=f"http://127.0.0.1:{port}") as relay:
        store = HttpStore(relay.url)
        with upstream_process(folder, port):
            assert store.names("versions") == ["1", "2"]
            assert store.read("versions/1", WHOLE) == store.read("state/latest", WHOLE) == DATA
        assert store.read("versions/1", WHOLE) == DATA
        assert store.names("versions") == ["1"]  # what can be read
        assert store.wait("versions", [], LONG) == ["1"]
        for use in (
            lambda: store.read("versions/2", WHOLE),
            lambda: store.read("state/latest", WHOLE),
            lambda: store.names("state"),
        ):
            with pytest.raises(ConnectionError, match="the upstream does not answer"):
                use()
        with upstream_process(folder, port):
            assert store.wait("versions", ["1"], LONG) == ["1", "2"]
            assert store.read("versions/2", WHOLE) == DATA
    # Once when it goes and once when it is back; on a machine that is too slow it may seem to go again.
    said = [" down" in record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [True, False] * (len(said) // 2)
    assert said
