"""The HTTP server: what it serves, what it refuses, and when it answers."""

import hashlib
import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from faulty_store import WHOLE
from http_proxy import Proxy

from loco.sync.storage.headers import parse_range
from loco.sync.storage.http_store import HttpStore
from loco.sync.storage.server import SyncServer, serve

DATA, SECRET = os.urandom(1_000_003), b"for nobody"
LONG = 60.0  # seconds; no test waits for it to pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SyncServer]:
    """A writable one, with a secret beside its folder."""
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "served").mkdir()
    with serve(tmp_path / "served", port=0, writable=True) as server:
        yield server


def ask(
    server: SyncServer,
    method: str,
    target: str,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> tuple[int, Message, bytes]:
    """Status, headers and body of the answer to one request, whose target is sent as it is."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=LONG)
    connection._validate_path = lambda url: None  # type: ignore[attr-defined]
    try:
        connection.request(method, target, body, dict(headers or {}))
        with connection.getresponse() as response:
            return response.status, response.headers, response.read()
    finally:
        connection.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


HOSTILE = [
    "/../secret",
    "/versions/../../secret",
    "/versions//../../secret",
    "/%2e%2e/secret",
    "/..%2fsecret",
    "/..%2Fsecret",
    "/..%5csecret",
    "/..\\secret",
    "/%2fetc%2fpasswd",
    "/versions%2fa",
    "/secret%00",
    "/versions/a%00",
    "/versions/a\0",
    "/.hidden",
    "/versions/.partial-0",
    "/versions/%2epartial-0",
    "/link",
    "/links/secret",
    "/versions/a?x=1",
    "/versions/%ff",
    "/versions/%0aa",
    "/" + "a" * 300,
    "/" + "a/" * 5_000 + "a",
    "http://127.0.0.1/versions/a",
    "secret",
    "*",
    "..",
]


@pytest.mark.parametrize("target", HOSTILE)
def test_no_path_leads_out_of_the_folder_or_to_hidden_files(
    server: SyncServer, tmp_path: Path, target: str
) -> None:
    served = tmp_path / "served"
    (served / "versions").mkdir()
    for name in ("versions/a", ".hidden", "versions/.partial-0"):
        (served / name).write_bytes(SECRET)
    (served / "link").symlink_to(tmp_path / "secret")
    (served / "links").symlink_to(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        status, _, body = ask(server, method, target, body=b"changed" if method == "PUT" else None)
        assert 400 <= status < 500
        assert SECRET not in body
        assert sorted(tmp_path.rglob("*")) == before
        assert all(path.read_bytes() == SECRET for path in before if path.is_file())


def test_a_listing_has_a_tag_and_hides_what_is_hidden(server: SyncServer, tmp_path: Path) -> None:
    for name in ("b", "a", ".hidden", ".partial-0"):
        (tmp_path / "served" / name).write_bytes(b"")
    (tmp_path / "served" / "folder").mkdir()
    status, headers, body = ask(server, "GET", "/")
    assert (status, json.loads(body)) == (200, ["a", "b"])
    assert ask(server, "GET", "/", {"If-None-Match": headers["ETag"]})[::2] == (304, b"")
    assert ask(server, "GET", "/folder/")[::2] == (200, b"[]")
    assert ask(server, "GET", "/folder")[0] == 404


@pytest.mark.parametrize(
    ("asked", "status", "part"),
    [
        ("bytes=0-0", 206, slice(0, 1)),
        ("bytes=10-19", 206, slice(10, 20)),
        ("bytes=999999-", 206, slice(999_999, None)),
        ("bytes=-3", 206, slice(-3, None)),
        ("bytes=-2000000", 206, slice(None)),
        ("bytes=1000000-9999999", 206, slice(1_000_000, None)),
        ("bytes=1000003-", 416, slice(0)),
        ("bytes=-0", 416, slice(0)),
        ("bytes=5-4", 200, slice(None)),
        ("bytes=-", 200, slice(None)),
        ("bytes=0-1,5-6", 200, slice(None)),
        ("bytes=0x1-", 200, slice(None)),
        ("lines=1-2", 200, slice(None)),
        ("bytes=" + "9" * 5000 + "-", 200, slice(None)),
    ],
)
def test_one_range_is_served_and_others_are_ignored(
    server: SyncServer, asked: str, status: int, part: slice
) -> None:
    HttpStore(server.url).write("a", DATA)
    answer, headers, body = ask(server, "GET", "/a", {"Range": asked})
    assert (answer, body) == (status, DATA[part])
    if answer == 206:
        start, stop, _ = part.indices(len(DATA))
        assert headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(DATA)}"
    if answer == 416:
        assert headers["Content-Range"] == f"bytes */{len(DATA)}"
    silent, told, nothing = ask(server, "HEAD", "/a", {"Range": asked})
    assert (silent, told["Content-Length"], nothing) == (answer, headers["Content-Length"], b"")


def test_an_empty_file_has_no_range() -> None:
    assert parse_range("bytes=0-", 0) == range(0)
    assert parse_range("", 0) is None


def test_long_polls_are_answered_when_a_file_appears(server: SyncServer, tmp_path: Path) -> None:
    store = HttpStore(server.url)
    store.write("versions/1", b"")
    with Proxy(server.url) as proxy, ThreadPoolExecutor() as pool:
        waits = [pool.submit(HttpStore(proxy.url).wait, "versions", ["1"], LONG) for _ in range(3)]
        until(lambda: proxy.count("GET /versions/") == 3)
        changed = time.monotonic()
        (tmp_path / "served/versions/2").write_bytes(b"")  # by a process of this machine
        assert [wait.result() for wait in waits] == [["1", "2"]] * 3
        assert time.monotonic() - changed < LONG / 10
    assert len(proxy.requests) == 3


def test_a_long_poll_without_a_change_ends_in_time(server: SyncServer) -> None:
    tag = ask(server, "GET", "/versions/")[1]["ETag"]
    started = time.monotonic()
    status, headers, _ = ask(server, "GET", "/versions/", {"If-None-Match": tag, "Prefer": "wait=0.3"})
    assert (status, headers["ETag"]) == (304, tag)
    assert 0.3 <= time.monotonic() - started < LONG


def test_closing_the_server_ends_long_polls_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool, serve(tmp_path, port=0) as server:
        patient = {"If-None-Match": ask(server, "GET", "/versions/")[1]["ETag"], "Prefer": "wait=60"}
        polls = [pool.submit(ask, server, "GET", "/versions/", patient) for _ in range(3)]
        until(lambda: sum(watch.waiting for watch in server._watches._watches.values()) == 3)
        closing = time.monotonic()
        server.close()
        assert [poll.result()[0] for poll in polls] == [304] * 3
        assert time.monotonic() - closing < LONG / 4


def test_a_read_only_server_refuses_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(DATA)
    with serve(tmp_path, port=0) as server:
        store = HttpStore(server.url)
        for change in (
            lambda: store.write("a", DATA * 10),  # more than fits into the sockets' buffers
            lambda: store.create("b", b""),
            lambda: store.delete("a"),
        ):
            with pytest.raises(PermissionError, match="not --writable"):
                change()
        assert store.read("a", WHOLE) == DATA
        assert store.names("") == ["a"]


def test_without_the_token_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(tmp_path, port=0, writable=True, token="right") as server:
        HttpStore(server.url, "right").write("a", DATA)
        for token in ("wrong", "righ", "rightly", ""):
            store = HttpStore(server.url, token)
            for use in (
                lambda path, of=store: of.read(path, WHOLE),
                store.names,
                store.delete,
                lambda path, to=store: to.write(path, DATA * 10),
            ):
                with pytest.raises(PermissionError, match="asks for a token"):
                    use("a")
        for target in ("/a", "/metrics"):
            status, headers, _ = ask(server, "GET", target)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        monkeypatch.setenv("LOCO_SYNC_TOKEN", "right")
        assert HttpStore(server.url).read("a", WHOLE) == DATA
    with pytest.raises(ValueError, match="printable ASCII"):
        HttpStore(server.url, "two\nlines")


CHUNKED = b"PUT /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


def raw(server: SyncServer, request: bytes) -> bytes:
    """All that comes back before the server hangs up."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), LONG) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answer:
            return answer.read()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"PUT /a HTTP/1.1\r\n\r\n", 411),
        (b"PUT /a HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 411),
        (b"PUT /a HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n0123456789", 411),
        (b"PUT /a HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n", 411),
        (b"PUT /a HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 411),
        (b"PUT /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0", 411),
        (CHUNKED + b"-1\r\n", 400),
        (CHUNKED + b"0x1\r\na\r\n0\r\n\r\n", 400),
        (CHUNKED + b"1;name=value\r\na\r\n0\r\n\r\n", 400),
        (CHUNKED + b"1\na\n0\n\n", 400),
        (CHUNKED + b"1\r\nab\r\n0\r\n\r\n", 400),
        (CHUNKED + b"1\r\na\r\n0\r\nTrailer: a\r\n\r\n", 400),
        (CHUNKED + b"1" * 100, 400),
        (CHUNKED + b"ffffffffffff\r\n", 413),
        (CHUNKED + b"1\r\na\r\n10000000000\r\n", 413),
        (b"PUT /a HTTP/1.1\r\nContent-Length: 99999999999999999\r\n\r\n", 413),
        (b"PUT /folder/ HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 501),
        (b"GET /a HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", 431),
        (b"GET /a HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /a HTTP/9.9\r\n\r\n", 505),
        (b"\x16\x03\x01 / \x00\r\n\r\n", 400),
    ],
)
def test_a_request_of_no_use_is_refused(
    server: SyncServer, tmp_path: Path, request_: bytes, status: int
) -> None:
    answer = raw(server, request_)
    assert answer.split(b" ", 2)[1] == str(status).encode()
    assert b"<html" not in answer.lower()
    assert not list((tmp_path / "served").iterdir())


def test_a_body_is_not_taken_for_the_next_request(server: SyncServer) -> None:
    inner = b"GET /versions/ HTTP/1.1\r\n\r\n"
    for method in (b"GET", b"DELETE", b"HEAD"):
        asked = method + b" /a HTTP/1.1\r\nContent-Length: " + str(len(inner)).encode() + b"\r\n\r\n" + inner
        assert raw(server, asked).count(b"HTTP/1.1 ") == 1


def test_several_requests_may_share_a_connection(server: SyncServer) -> None:
    HttpStore(server.url).write("a", b"contents")
    answers = raw(server, b"GET /a HTTP/1.1\r\n\r\n" * 3)
    assert answers.count(b"HTTP/1.1 200 ") == answers.count(b"contents") == 3


def test_a_body_that_ends_early_leaves_nothing(server: SyncServer, tmp_path: Path) -> None:
    head = f"PUT /versions/a HTTP/1.1\r\nContent-Length: {len(DATA)}\r\n\r\n".encode()
    assert raw(server, head + DATA[:-1]) == b""
    for end in (b"", b"4", b"4\r\n", b"4\r\nab", b"4\r\nabcd", b"4\r\nabcd\r\n", b"4\r\nabcd\r\n0\r\n"):
        assert b"204" not in raw(server, CHUNKED.replace(b"/a", b"/versions/a") + end)
    assert not list((tmp_path / "served/versions").iterdir())


def test_prometheus_reads_what_was_done(server: SyncServer) -> None:
    for method, target, body in (
        ("PUT", "/a.bin", b"x" * 1000),
        ("GET", "/a.bin", None),
        ("GET", "/a.bin", None),
        ("GET", "/b.bin", None),
        ('A"TRAP', "/a.bin", None),
    ):
        ask(server, method, target, body=body)

    def read() -> dict[str, str]:
        status, headers, text = ask(server, "GET", "/metrics")
        assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        return dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#"))

    until(lambda: read()["loco_sync_connections"] == "1")  # when the other clients' threads have ended
    found = read()
    found.pop("loco_sync_connections")
    assert int(found.pop("loco_sync_sent_bytes_total")) > 2000  # with the sentences of two refusals
    assert int(found.pop('loco_sync_requests_total{method="GET",status="200"}')) > 2
    assert found == {
        "loco_sync_received_bytes_total": "1000",
        'loco_sync_requests_total{method="PUT",status="204"}': "1",
        'loco_sync_requests_total{method="GET",status="404"}': "1",
        'loco_sync_requests_total{method="other",status="501"}': "1",
    }


def test_a_large_file_is_streamed(server: SyncServer) -> None:
    """Over a connection that is slower than the disk, with other requests in between."""
    store, large = HttpStore(server.url), DATA * 20
    store.write("a", large)
    digest, expected = hashlib.sha256(), hashlib.sha256(large)
    for chunk in store.read_chunks("a"):
        digest.update(chunk)
        assert store.names("") == ["a"]
    assert digest.digest() == expected.digest()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.1.2.3", "trainer"])
def test_a_writable_server_for_other_machines_needs_a_token(tmp_path: Path, host: str) -> None:
    with pytest.raises(ValueError, match=r"needs a token.*LOCO_SYNC_TOKEN"):
        serve(tmp_path, host, port=0, writable=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_address_needs_none(tmp_path: Path, host: str) -> None:
    try:
        server = serve(tmp_path, host, port=0, writable=True)
    except OSError as error:
        pytest.skip(f"this machine has no {host}: {error}")
    with server:
        HttpStore(server.url).write("a", DATA)
        assert HttpStore(server.url).read("a", WHOLE) == DATA
