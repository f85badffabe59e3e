"""Publishers that are killed, and subscribers of any speed, in processes of their own."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from disks import DeadlyCall
from faulty_store import Weights, files_in, orphans, small_weights, step, zeros
from published import bytes_of, same_bits
from selection import SCHEDULES
from sites import context

from loco.sync import DamagedError, NoVersionError, Publisher, Subscriber
from loco.sync.storage.server import serve
from loco.sync.storage.stores import Store, open_store


def states(versions: int, seed: int = 0) -> list[Weights]:
    """What every publisher of a test publishes; number 0 is nothing."""
    trained, generator = small_weights(seed), torch.Generator().manual_seed(seed)
    return [{}, *(step(trained, generator) for _ in range(versions))]


# ---- killed ----


def publish_until_killed(folder: str, number: int, wait: bool) -> None:
    """SIGKILL comes at the `number`-th thing done to the disk after five versions; if there are fewer, in the
    end."""
    trained = zeros(small_weights())
    publisher, fsync = Publisher(trained, folder, keep=2, anchor_every=3), os.fsync
    for k, fresh in enumerate(states(8)[1:]):
        if k == 5:
            call = DeadlyCall(folder, number)

            def flushed(descriptor: int, call: DeadlyCall = call) -> None:
                call.count("os.fsync")
                fsync(descriptor)

            os.fsync = flushed
        for name, tensor in fresh.items():
            trained[name].copy_(tensor)
        publisher.publish(wait=wait)
    publisher.flush()
    os._exit(0)


@pytest.mark.check(SCHEDULES, sample="True-29")
@pytest.mark.parametrize("every", [29, 3])
@pytest.mark.parametrize("wait", [True, False])
def test_a_publisher_killed_at_any_write_of_a_version_leaves_whole_ones_and_the_next_goes_on(
    tmp_path: Path, every: int, wait: bool
) -> None:
    """Killed in anchors, patches, manifests and deletes. What it left half is removed by the next one."""
    were, ends, number, lefts = states(8), [], 1, 0
    while 0 not in ends:
        folder = tmp_path / str(number)
        worker = context.Process(target=publish_until_killed, args=(str(folder), number, wait))
        worker.start()
        worker.join()
        ends.append(worker.exitcode)
        engine = zeros(were[1])
        subscriber = Subscriber(engine, folder)
        updated = subscriber.update()
        assert updated.version >= 4 + wait  # else the fifth may not be there yet
        same_bits(engine, were[updated.version])
        subscriber.verify()
        lefts += bool(orphans(files_in(folder)))
        trained, generator = small_weights(9), torch.Generator().manual_seed(9)
        again = Publisher(trained, folder, keep=2, anchor_every=3)
        for k in range(5):
            after = step(trained, generator)
            assert again.publish().version == updated.version + k + 1
            subscriber.update()
            same_bits(engine, after)
        subscriber.verify()
        files = files_in(folder)
        assert not orphans(files)
        assert len(list((folder / "versions").glob("*.json"))) < 9
        partial = [path for path in files if "/.partial-" in path]
        assert len(partial) <= 1  # removed after an hour
        number += every
    assert set(ends) == {0, -signal.SIGKILL}
    assert every > 1 or lefts > 3


# ---- of any speed ----


class SlowStore:
    """Each read waits until some more versions have been published, or the last one."""

    def __init__(self, store: Store, versions: int, last: int) -> None:
        self._store, self._versions, self._last = store, versions, last
        self.url, self.at_once = store.url, 1

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def read(self, path: str, most: int) -> bytes:
        self._wait()
        return self._store.read(path, most)

    def read_chunks(self, path: str) -> Iterator[bytes]:
        self._wait()
        return self._store.read_chunks(path)

    def _wait(self) -> None:
        names = self._store.names("versions")
        goal = min(self._last, _newest(names) + self._versions)
        while _newest(names) < goal:
            names = self._store.wait("versions", names, 60.0)


def _newest(names: list[str]) -> int:
    return max([int(name.partition(".")[0]) for name in names], default=0)


def follow(url: str, slowness: int, last: int, told: Connection) -> None:
    engine = zeros(small_weights())
    subscriber, refused = Subscriber(engine, url), 0
    if slowness:
        subscriber._reader._store = SlowStore(open_store(url), slowness, last)  # pyright: ignore[reportAttributeAccessIssue]
    seen = []
    while subscriber.version != last:
        try:
            updated = subscriber.update(wait=60.0)
            seen.append((updated.version, [bytes_of(t).numpy().tobytes() for t in engine.values()]))
        except (DamagedError, NoVersionError):
            refused += 1
    subscriber.verify()
    told.send((seen, refused))
    os._exit(0)


@pytest.mark.check(SCHEDULES, sample="folder-60")
@pytest.mark.parametrize("versions", [60, 400])
@pytest.mark.parametrize("by", ["folder", "http"])
def test_readers_of_any_speed_hold_whole_versions_while_old_ones_go(
    tmp_path: Path, by: str, versions: int
) -> None:
    """Even those that come too late for almost every file."""
    were, told = states(versions), []
    trained = zeros(small_weights())
    with ExitStack() as stack:
        tmp_path.joinpath("store").mkdir()
        url = str(tmp_path / "store")
        if by == "http":
            url = stack.enter_context(serve(url, port=0)).url
        workers = []
        for slowness in (0, 0, 2, 15):
            receiver, sender = context.Pipe(duplex=False)
            workers.append(context.Process(target=follow, args=(url, slowness, versions, sender)))
            workers[-1].start()
            sender.close()
            told.append(receiver)
        publisher = Publisher(trained, tmp_path / "store", keep=6, anchor_every=5)
        for fresh in were[1:]:
            for name, tensor in fresh.items():
                trained[name].copy_(tensor)
            publisher.publish()
        for receiver, worker in zip(told, workers, strict=True):
            seen, _refused = receiver.recv()
            worker.join()
            assert seen[-1][0] == versions
            assert sorted(version for version, _ in seen) == [version for version, _ in seen]
            for version, found in seen:
                assert found == [bytes_of(t).numpy().tobytes() for t in were[version].values()]
    assert not orphans(files_in(tmp_path / "store"))


def miss_some(url: str, seed: int, versions: int) -> None:
    rng, were = random.Random(seed), states(versions)
    engine = zeros(small_weights())
    subscriber, version = Subscriber(engine, url), 0
    while version < versions:
        version = min(version + rng.choice([1, 1, 2, 3, 7, 20, 100, versions // 3]), versions)
        subscriber.update(version)
        same_bits(engine, were[version])
    subscriber.verify()
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.check(SCHEDULES)
@pytest.mark.parametrize("versions", [100, 400])
@pytest.mark.parametrize("by", ["folder", "http"])
def test_subscribers_that_miss_versions_at_random_in_parallel_end_bitwise_equal(
    tmp_path: Path, by: str, versions: int
) -> None:
    trained = zeros(small_weights())
    publisher = Publisher(trained, tmp_path, keep=10_000)
    for fresh in states(versions)[1:]:
        for name, tensor in fresh.items():
            trained[name].copy_(tensor)
        publisher.publish(wait=False)
    publisher.close()
    with ExitStack() as stack:
        url = str(tmp_path) if by == "folder" else stack.enter_context(serve(tmp_path, port=0)).url
        workers = [context.Process(target=miss_some, args=(url, seed, versions)) for seed in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 6
