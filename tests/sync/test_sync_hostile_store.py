"""What somebody else has put into a store costs neither memory nor a publisher; nor does a full store."""

import os
import resource
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from disks import small_disk
from faulty_store import MemoryStore, held_of, publisher_at, small_weights, step, subscriber_at, zeros
from published import same_bits
from sites import context

import loco
from loco.sync import DamagedError, Publisher, Subscriber, TakenOverError
from loco.sync.storage.server import serve
from loco.sync.versions.manifest import Stream, parse_name

KEY = b"sixteen bytes or more"
HUGE, ROOM = 3 << 30, 256 << 20  # bytes


def in_little_memory(function: Callable[..., None], *arguments: object) -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    try:
        function(*arguments)
    except (DamagedError, loco.AuthenticationError):
        os._exit(7)
    os._exit(0)


def subscribe(url: str) -> None:
    Subscriber(zeros(small_weights()), url, key=KEY).update()


def publish(url: str) -> None:
    assert Publisher(small_weights(), url, key=KEY).publish().version == 1


def run(function: Callable[..., None], url: str) -> int | None:
    worker = context.Process(target=in_little_memory, args=(function, url))
    worker.start()
    worker.join()
    return worker.exitcode


@pytest.mark.parametrize("by", ["folder", "http"])
@pytest.mark.parametrize("what", ["weights/*", "layouts/*", "versions/*"])
def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path, what: str, by: str) -> None:
    Publisher(small_weights(), tmp_path, key=KEY).publish()
    (path,) = tmp_path.glob(what)
    os.truncate(path, HUGE)
    with ExitStack() as stack:
        url = str(tmp_path) if by == "folder" else stack.enter_context(serve(tmp_path, port=0)).url
        assert run(subscribe, url) == 7


def test_a_huge_manifest_stops_no_publisher(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    for name in ("versions/000000000009.0-of-1.json", "training"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, HUGE)
    assert run(publish, str(tmp_path)) == 0


@pytest.mark.parametrize(
    "name",
    [
        "000000000002.0-of-1.json",
        "000000000004.0-of-1.json",
        "999999999999.0-of-1.json",
        f"{'9' * 230}.0-of-1.json",
        "000000000004.5-of-9.json",
    ],
)
def test_a_file_that_is_no_manifest_stops_no_publisher(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It was taken for another publisher's: TakenOverError, at each publish."""
    store, trained, generator = MemoryStore(), small_weights(), torch.Generator().manual_seed(0)
    publisher, engine = publisher_at(store, trained, key=KEY, keep=3), zeros(trained)
    subscriber = subscriber_at(store, engine, key=KEY)
    publisher.publish()
    store.files[f"versions/{name}"] = b"?"
    versions = []
    for again in (publisher, publisher_at(store, trained, key=KEY, keep=3)):
        for _ in range(5):
            step(trained, generator)
            versions.append(again.publish().version)
    taken = parse_name(name)
    expected = [v for v in range(2, 13) if not taken or taken != (v, Stream())]
    assert versions == expected[:10]
    assert len(store.names("versions")) < 10
    if taken and taken > (11, Stream()):
        with pytest.raises(loco.AuthenticationError, match=name):
            subscriber.update()
    assert subscriber.update().version == versions[-1]
    same_bits(engine, held_of(trained))
    assert caplog.text.count("its number is left out") <= 2


def test_a_number_that_a_file_has_taken_is_refused_where_it_is_asked_for() -> None:
    store = MemoryStore({"versions/000000000004.0-of-1.json": b"?"})
    publisher = publisher_at(store, small_weights())
    with pytest.raises(ValueError, match="version must be one that is free: memory has a file for 4"):
        publisher.publish(4)
    publisher.publish(5)
    with pytest.raises(ValueError, match="version must be <= 999999999999, got 1000000000000"):
        publisher.publish(10**12)
    assert publisher.publish().version == 6


def test_another_publisher_is_told_still() -> None:
    store, trained = MemoryStore({"versions/000000000009.0-of-1.json": b"?"}), small_weights()
    first, second = publisher_at(store, trained), publisher_at(store, trained)
    first.publish()
    second.publish()
    with pytest.raises(TakenOverError):
        first.publish()


def test_old_versions_go_before_a_new_one_comes(tmp_path: Path) -> None:
    """On a disk whose files are used up no version could be written any more, and so none was removed."""
    folder = tmp_path / "disk"
    with small_disk(folder, "4m", inodes=24):
        trained, generator = small_weights(), torch.Generator().manual_seed(0)
        publisher, engine = Publisher(trained, folder, keep=100), zeros(trained)
        subscriber = Subscriber(engine, folder)
        for _ in range(20):
            step(trained, generator)
            with suppress(OSError):
                publisher.publish()
        with pytest.raises(OSError, match="No space left"):
            publisher.publish()
        again = Publisher(trained, folder, keep=2, anchor_every=4)
        for _ in range(6):
            step(trained, generator)
            again.publish()
            subscriber.update()
            same_bits(engine, held_of(trained))
