"""A folder as a store: writers that are killed, disks that are full, links that lead out of it."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import DeadlyCall, small_disk
from faulty_store import WHOLE
from selection import SCHEDULES
from sites import context

from loco.sync.storage.folder_store import FolderStore
from loco.sync.storage.server import serve
from loco.sync.storage.stores import open_store

OLD, NEW = b"old", b"new" * 100_000
HOUR = 3600.0


def write_until_killed(folder: str, number: int, replaces: bool) -> None:
    """SIGKILL comes at the `number`-th thing done to the disk; if there are fewer, in the end."""
    call, fsync = DeadlyCall(folder, number), os.fsync

    def flushed(descriptor: int) -> None:
        call.count("os.fsync")
        fsync(descriptor)

    def chunks() -> Iterator[bytes]:
        for k in range(0, len(NEW), 100_000):
            call.count("os.fsync")
            yield NEW[k : k + 100_000]

    os.fsync = flushed
    FolderStore(folder).put("versions/a", chunks(), replace=replaces)
    call.counting = False
    sys.exit(0)


@pytest.mark.check(SCHEDULES)
@pytest.mark.parametrize("replaces", [True, False])
def test_a_writer_killed_at_any_moment_leaves_no_half_file(tmp_path: Path, replaces: bool) -> None:
    ends, store = [], FolderStore(tmp_path)
    while 0 not in ends:
        folder = tmp_path / str(len(ends))
        store = FolderStore(folder)
        if replaces:
            store.write("versions/a", OLD)
        else:
            folder.mkdir()
        writer = context.Process(target=write_until_killed, args=(str(folder), len(ends) + 1, replaces))
        writer.start()
        writer.join()
        ends.append(writer.exitcode)
        assert store.names("versions") in ([["a"]] if replaces else [[], ["a"]])
        if store.names("versions"):
            assert store.read("versions/a", WHOLE) in (OLD, NEW)
    assert store.read("versions/a", WHOLE) == NEW
    assert len(ends) > 8
    assert set(ends) == {0, -signal.SIGKILL}


def test_what_a_killed_writer_left_is_hidden_and_in_time_removed(tmp_path: Path) -> None:
    writer = context.Process(target=write_until_killed, args=(str(tmp_path), 6, True))
    writer.start()
    writer.join()
    store = FolderStore(tmp_path)
    (partial,) = tmp_path.glob("versions/.partial-*")
    assert store.names("versions") == []
    store.write("versions/b", b"")
    assert partial.exists()  # its writer may be alive
    os.utime(partial, (0.0, time.time() - 2 * HOUR))
    store.write("versions/c", b"")
    assert not partial.exists()


def test_contents_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        done.append("renamed")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    FolderStore(tmp_path).write("versions/a", NEW)
    made, contents, *rest = done
    assert made == str(tmp_path)  # where the new folder has its name
    assert Path(contents).name.startswith(".partial-")
    assert rest == ["renamed", str(tmp_path / "versions")]


@pytest.mark.parametrize("is_served", [False, True])
def test_a_full_store_is_named_and_nothing_of_the_file_is_left(tmp_path: Path, is_served: bool) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder, "1m"), serve(folder, port=0, writable=True) as server:
        store = open_store(server.url if is_served else folder)
        store.write("versions/a", OLD)
        with pytest.raises(OSError, match="No space left") as full:
            store.write("versions/a", bytes(3_000_000))
        assert full.value.errno == errno.ENOSPC
        assert full.value.filename == f"{store.url}/versions/a"
        assert [path.name for path in (folder / "versions").iterdir()] == ["a"]
        assert store.read("versions/a", WHOLE) == OLD


@pytest.mark.parametrize("is_served", [False, True])
def test_a_read_only_store_is_named(tmp_path: Path, is_served: bool) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder, "1m"), serve(folder, port=0, writable=True) as server:
        store = open_store(server.url if is_served else folder)
        store.write("a", OLD)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        for change in (
            lambda: store.write("a", b""),
            lambda: store.create("b", b""),
            lambda: store.delete("a"),
        ):
            with pytest.raises(OSError, match="Read-only file system") as refused:
                change()
            assert store.url in str(refused.value)
        assert store.read("a", WHOLE) == OLD


def test_a_link_leads_nowhere_outside(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    store = FolderStore(tmp_path / "store")
    store.write("a", b"")
    (tmp_path / "store" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "store" / "folder").symlink_to(tmp_path)
    assert store.names("") == ["a"]
    for path in ("link", "folder/secret"):
        for use in (
            lambda path: store.read(path, WHOLE),
            store.delete,
            lambda path: store.write(path, b""),
        ):
            with pytest.raises(PermissionError, match="out of the store"):
                use(path)
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert FolderStore(tmp_path).names("") == []
    with pytest.raises(FileNotFoundError):
        FolderStore(tmp_path).read("pipe", WHOLE)
