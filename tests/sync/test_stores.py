"""What a store promises, whichever kind it is."""

import errno
import hashlib
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch.distributed as dist
from faulty_store import WHOLE
from fsspec.implementations.memory import MemoryFileSystem
from selection import SCHEDULES
from sites import run_ranks

from loco.sync import Subscriber
from loco.sync.storage.folder_store import FolderStore
from loco.sync.storage.http_store import HttpStore
from loco.sync.storage.server import serve
from loco.sync.storage.stores import FsspecStore, Store, open_store
from loco.sync.versions.training import training_of

OLD, NEW = b"old", b"new" * 100_000
HOUR = 3600.0


@pytest.fixture(autouse=True)
def empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFileSystem, "store", {})


@pytest.fixture(params=["folder", "memory", "fsspec", "http"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """fsspec: a file system that has only what fsspec gives to all of them."""
    match request.param:
        case "folder":
            yield open_store(tmp_path / "store")
        case "memory":
            yield open_store("memory://store/run")
        case "fsspec":
            yield FsspecStore(f"file://{tmp_path}/store")
        case _:
            with serve(tmp_path, port=0, writable=True) as server:
                yield open_store(server.url)


@pytest.mark.parametrize("size", [0, 1, 63, 1003, 5_000_000])
def test_what_is_written_is_read(store: Store, size: int) -> None:
    data = os.urandom(size)
    store.write("versions/1/changes", data)
    assert store.read("versions/1/changes", WHOLE) == data
    assert b"".join(store.read_chunks("versions/1/changes")) == data


@pytest.mark.parametrize("size", [0, 1, 63, 1003, 2_000_000])
def test_no_more_of_a_file_is_read_than_is_allowed(store: Store, size: int) -> None:
    data = os.urandom(size)
    store.write("a", data)
    assert store.read("a", size) == store.read("a", size + 1) == data
    with pytest.raises(FileNotFoundError):
        store.read("missing", size)
    store.write("a", data + bytes(9_000_000))
    tracemalloc.start()
    try:
        assert store.read("a", size) == data
        assert tracemalloc.get_traced_memory()[1] < 3_000_000 + 2 * size  # a MiB of a connection's
    finally:
        tracemalloc.stop()


def test_an_empty_file_is_read_from_a_store_that_has_no_range_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As s3:// has none."""
    whole = MemoryFileSystem.cat_file

    def refusing(
        self: MemoryFileSystem, path: str, start: int | None = None, end: int | None = None
    ) -> bytes:
        if end is not None and not whole(self, path):
            raise OSError(errno.EINVAL, "The requested range is not satisfiable")
        return whole(self, path, start, end)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", refusing)
    store = open_store("memory://x")
    store.write("a", b"")
    assert store.read("a", 10) == b""


def test_a_small_file_costs_an_object_store_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening one asks for its size before its contents."""
    store = open_store("memory://x")
    store.write("training", b"one")
    for name in ("open", "info", "size"):
        monkeypatch.setattr(MemoryFileSystem, name, None)
    assert training_of(store) == hashlib.sha256(b"one").hexdigest()


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (0, 7, 0), (3_000_000, 0, 1003, 5_000_000)])
def test_what_is_written_in_chunks_is_read(store: Store, sizes: tuple[int, ...]) -> None:
    chunks = [os.urandom(size) for size in sizes]
    store.write("versions/1/changes", b"what is there already")
    store.write_chunks("versions/1/changes", iter(chunks))
    assert store.read("versions/1/changes", WHOLE) == b"".join(chunks)


def test_a_chunk_is_written_before_the_next_is_made(store: Store) -> None:
    """So that a large file never is in memory as a whole."""
    chunk, alive = 1 << 20, 0

    class Chunk(bytes):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def chunks() -> Iterator[bytes]:
        nonlocal alive
        for _ in range(50):
            assert alive <= 2
            alive += 1
            yield Chunk(chunk)

    store.write_chunks("a", chunks())
    assert len(store.read("a", WHOLE)) == 50 * chunk


def test_a_file_whose_chunks_end_with_an_error_is_not_there(store: Store) -> None:
    def chunks() -> Iterator[bytes]:
        yield NEW
        raise OSError(errno.EIO, "no more of it")

    with pytest.raises(OSError, match="no more of it"):
        store.write_chunks("a", chunks())
    if not isinstance(store, FsspecStore):  # an object store may have its first part
        assert store.names("") == []


def test_a_write_replaces_and_a_create_does_not(store: Store) -> None:
    store.create("state/latest", b"1")
    with pytest.raises(FileExistsError) as refused:
        store.create("state/latest", b"2")
    assert store.url in str(refused.value)
    assert "state/latest" in str(refused.value)
    assert store.read("state/latest", WHOLE) == b"1"
    store.write("state/latest", b"3")
    assert store.read("state/latest", WHOLE) == b"3"


def test_names_are_of_the_files_directly_in_a_folder(store: Store) -> None:
    assert store.names("versions") == []
    for path in ("top", "versions/2", "versions/1", "versions/a name % of ü?#", "versions/deeper/3"):
        store.write(path, b"")
    assert store.names("versions") == ["1", "2", "a name % of ü?#"]
    assert store.names("versions/deeper") == ["3"]
    assert store.names("") == ["top"]
    assert store.names("versions/1") == []  # a file
    assert store.read("versions/a name % of ü?#", WHOLE) == b""


def test_a_deleted_file_is_gone_and_may_be_gone_already(store: Store) -> None:
    store.write("a", b"")
    store.delete("a")
    store.delete("a")
    store.delete("no/such/folder")
    assert store.names("") == []


@pytest.mark.parametrize("path", ["missing", "folder/missing", "no/folder/missing"])
def test_a_missing_file_is_named_with_its_store(store: Store, path: str) -> None:
    store.write("folder/file", b"")
    for read in (lambda path: store.read(path, WHOLE), lambda path: list(store.read_chunks(path))):
        with pytest.raises(FileNotFoundError) as missing:
            read(path)
        assert store.url in str(missing.value)
        assert path in str(missing.value)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/etc",
        "../a",
        "a/../b",
        "a/..",
        "./a",
        "a//b",
        "a/",
        ".hidden",
        "a/.b",
        "a\\b",
        "a\0b",
        "\ud800",
    ],
)
def test_a_path_that_no_file_may_have_is_refused(store: Store, path: str) -> None:
    for refuse in (
        lambda path: store.read(path, WHOLE),
        store.delete,
        lambda path: list(store.read_chunks(path)),
        lambda path: store.write(path, b""),
        lambda path: store.create(path, b""),
        *([store.names] if path else []),
    ):
        with pytest.raises(ValueError, match="relative path of plain names"):
            refuse(path)


def test_a_wait_ends_with_a_change_and_otherwise_in_time(store: Store) -> None:
    assert store.wait("versions", ["1"], 60.0) == []  # it has changed already
    started = time.monotonic()
    assert store.wait("versions", [], 0.2) == []
    assert 0.2 <= time.monotonic() - started < 10.0
    found: list[list[str]] = []
    waiting = threading.Thread(target=lambda: found.append(store.wait("versions", [], 60.0)))
    waiting.start()
    store.write("versions/1", b"")
    waiting.join(20.0)
    assert found == [["1"]]


def creating(rank: int, url: str, count: int) -> list[int]:
    store, won = open_store(url), []
    for k in range(count):
        dist.barrier()
        try:
            store.create(f"claims/{k}", bytes([rank]) * 100_000)
            won.append(k)
        except FileExistsError:
            pass
    return won


@pytest.mark.check(SCHEDULES)
@pytest.mark.parametrize("is_served", [False, True])
def test_of_processes_that_create_the_same_file_exactly_one_wins(tmp_path: Path, is_served: bool) -> None:
    with serve(tmp_path, port=0, writable=True) as server:
        winners = run_ranks(3, creating, server.url if is_served else str(tmp_path), 20)
    assert sorted(k for won in winners for k in won) == list(range(20))
    for rank, won in enumerate(winners):
        for k in won:
            assert FolderStore(tmp_path).read(f"claims/{k}", WHOLE) == bytes([rank]) * 100_000


class CachingFileSystem(MemoryFileSystem):
    """Remembers listings, as those of object stores do."""

    protocol = "caching"

    def ls(self, path: str, detail: bool = True, **options: object) -> list[object]:
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail, **options)
        return self.dircache[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.pop(path, None)


def test_a_listing_is_never_stale() -> None:
    fsspec.register_implementation("caching", CachingFileSystem, clobber=True)
    writer, reader = FsspecStore("caching://x/store"), FsspecStore("caching://x/store")
    writer.write("a", b"")
    assert reader.names("") == ["a"]
    writer.write("b", b"")
    assert reader.names("") == ["a", "b"]
    writer.delete("a")
    assert reader.names("") == ["b"]


def test_whatever_a_file_system_raises_is_an_os_error_that_names_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
    with pytest.raises(OSError, match=r"RuntimeError: no credentials.*memory://x/a"):
        open_store("memory://x").read("a", WHOLE)


def test_a_topmost_folder_is_not_made_by_mistake() -> None:
    """It would be a bucket."""
    with pytest.raises(FileNotFoundError):
        FsspecStore("file:///no-such-folder/run").write("versions/1", b"")
    assert not Path("/no-such-folder").exists()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("s3://bucket/run", "pip install s3fs"),
        ("sftp://host/run", "pip install paramiko"),
        ("nothing://x", "must be a path or begin with one of file://, .*s3://.*, got nothing://x"),
        ("http://", "must be http://host:port"),
        ("http://user:password@host", "must be http://host:port"),
        ("http://host/?x", "must be http://host:port"),
        ("http://host:port", "is no URL of a server"),
    ],
)
def test_a_url_of_no_store_is_refused_in_a_sentence(
    url: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("s3fs", "paramiko"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=sentence):
        open_store(url)


WRAPPING = ["reference", "dir", "cached", "blockcache", "filecache", "simplecache", "zip", "tar"]
WRAPPING += ["libarchive", "generic", "async_wrapper", "dask", "jupyter", "pyscript", "git", "ftp", "data"]


@pytest.mark.parametrize(
    "url",
    [
        *(f"{protocol}://x" for protocol in WRAPPING),
        *(f"{protocol}::memory://x" for protocol in WRAPPING),
        "memory::reference://x",
        "memory://x::reference://y",
        "memory://x::memory://y",
        "S3://bucket",
        "://x",
    ],
)
def test_a_protocol_that_wraps_others_or_runs_code_is_refused(url: str, tmp_path: Path) -> None:
    """With fsspec before 2026.9 a file of references that somebody wrote could call any Python function."""
    for use in (
        open_store,
        lambda url: serve(tmp_path, port=0, upstream=url),
        lambda url: Subscriber({}, url),
    ):
        with pytest.raises(ValueError, match="must be a path or begin with one of file://"):
            use(url)


def test_a_url_says_which_kind_of_store_it_is(tmp_path: Path) -> None:
    for url in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        store = open_store(url)
        assert isinstance(store, FolderStore)
        assert store.folder == tmp_path
    assert isinstance(open_store("memory://x"), FsspecStore)
    assert isinstance(open_store("https://host/prefix"), HttpStore)
