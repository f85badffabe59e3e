"""Two publishers of one name, in any order of their calls: one chain goes on, none is ever mixed."""

import copy
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from faulty_store import (
    WHOLE,
    MemoryStore,
    Weights,
    files_in,
    held_of,
    is_same,
    orphans,
    publisher_at,
    small_weights,
    step,
    subscriber_at,
    zeros,
)
from hypothesis import given
from hypothesis import strategies as st
from published import same_bits
from selection import SCHEDULES
from sites import context

from loco.sync import DamagedError, NoVersionError, Publisher, Subscriber, SyncError, TakenOverError
from loco.sync.storage.folder_store import FolderStore
from loco.sync.versions.manifest import Manifest

LONG = 60.0  # seconds


class Turns:
    """One of several threads runs at a time, from one call of the store to its next; chance says which."""

    def __init__(self, seed: int) -> None:
        self._random, self._changed = random.Random(seed), threading.Condition()
        self._waiting: set[str] = set()
        self._running: str | None = None
        self._alive = 0

    def wait(self) -> None:
        me = threading.current_thread().name
        with self._changed:
            self._waiting.add(me)
            self._running = None
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._running == me, LONG)
            self._waiting.remove(me)

    def run(self, actors: list[Callable[[], object]]) -> None:
        failed: list[BaseException] = []

        def act(actor: Callable[[], object]) -> None:
            try:
                self.wait()
                actor()
            except BaseException as error:
                failed.append(error)
            finally:
                with self._changed:
                    self._alive, self._running = self._alive - 1, None
                    self._changed.notify_all()

        self._alive = len(actors)
        threads = [threading.Thread(target=act, args=(actor,), name=str(k)) for k, actor in enumerate(actors)]
        for thread in threads:
            thread.start()
        while True:
            with self._changed:
                ready = self._changed.wait_for(
                    lambda: self._running is None and len(self._waiting) == self._alive, LONG
                )
                assert ready
                if not self._alive:
                    break
                self._running = self._random.choice(sorted(self._waiting))
                self._changed.notify_all()
        for thread in threads:
            thread.join()
        for error in failed:
            raise error


class TakingTurns(MemoryStore):
    turns: Turns

    def before(self, call: str, path: str) -> None:
        self.turns.wait()


def is_one_chain_after_the_other(files: dict[str, bytes]) -> bool:
    """Whether nobody publishes again once somebody else has, and every file is what its manifest says."""
    runs = []
    for path in sorted(path for path in files if path.startswith("versions/")):
        manifest = Manifest.load(files[path], path, None)
        assert all(len(files[file.path]) == file.bytes for file in manifest.files)
        if not runs or runs[-1] != manifest.run:
            runs.append(manifest.run)
    return len(runs) == len(set(runs))


def published_in_turns(seed: int, publishers: int) -> None:
    plain, store = MemoryStore(), TakingTurns()
    store.files, store.turns = plain.files, Turns(seed)
    tried: list[Weights] = []
    last: dict[int, Weights] = {}

    def publish(k: int) -> None:
        trained, generator = small_weights(k), torch.Generator().manual_seed(k)
        publisher = publisher_at(store, trained, keep=3)
        for _ in range(random.Random(seed + k).randrange(2, 6)):
            fresh = step(trained, generator)
            tried.append(fresh)
            try:
                last[publisher.publish().version] = fresh
            except TakenOverError:
                if publisher.version is not None:  # else it may begin after the other one
                    with pytest.raises(TakenOverError):
                        publisher.publish()
                return

    def subscribe() -> None:
        engine = zeros(small_weights())
        subscriber = subscriber_at(store, engine)
        for _ in range(6):
            with suppress(DamagedError, NoVersionError):
                subscriber.update()
                assert any(is_same(engine, weights) for weights in tried)
                subscriber.verify()

    store.turns.run([*(lambda k=k: publish(k) for k in range(publishers)), subscribe, subscribe])
    assert is_one_chain_after_the_other(plain.files)
    assert not orphans(plain.files)
    engine = zeros(small_weights())
    assert subscriber_at(plain, engine).update().version == max(last)
    same_bits(engine, last[max(last)])


@given(seed=st.integers(0, 2**32), publishers=st.integers(2, 3))
def test_publishers_of_one_name_never_make_a_mixture_in_any_order_of_calls(
    seed: int, publishers: int
) -> None:
    published_in_turns(seed, publishers)


def publish_until_taken_over(folder: str, k: int, versions: int, start: int) -> None:
    trained, generator = small_weights(k), torch.Generator().manual_seed(k)
    publisher, store = Publisher(trained, folder, keep=5), FolderStore(folder)
    while len(store.names("versions")) < start:
        pass
    try:
        for _ in range(versions):
            step(trained, generator)
            publisher.publish()
    except TakenOverError:
        os._exit(3)
    os._exit(0)


def lineages(k: int, versions: int) -> Iterator[Weights]:
    trained, generator = small_weights(k), torch.Generator().manual_seed(k)
    for _ in range(versions):
        yield step(trained, generator)


@pytest.mark.check(SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_publishers_of_one_name_in_real_processes_never_make_a_mixture(tmp_path: Path, seed: int) -> None:
    rng, versions = random.Random(seed), 20
    (tmp_path / "versions").mkdir()
    workers = [
        context.Process(
            target=publish_until_taken_over, args=(str(tmp_path), k, versions, rng.randrange(2) * k * 4)
        )
        for k in range(3)
    ]
    for worker in workers:
        worker.start()
    legal = [weights for k in range(3) for weights in lineages(k, versions)]
    engine = zeros(small_weights())
    subscriber = Subscriber(engine, tmp_path)
    while any(worker.is_alive() for worker in workers):
        with suppress(DamagedError, NoVersionError):
            subscriber.update()
            assert any(is_same(engine, weights) for weights in legal)
    for worker in workers:
        worker.join()
    assert {worker.exitcode for worker in workers} <= {0, 3}
    assert [worker.exitcode for worker in workers].count(0) <= 2  # one may have ended before another began
    assert is_one_chain_after_the_other(files_in(tmp_path))
    newcomer = zeros(small_weights())
    assert Subscriber(newcomer, tmp_path).update().version == Subscriber(engine, tmp_path).update().version
    same_bits(newcomer, engine)
    assert any(is_same(engine, weights) for weights in legal)


def test_a_forked_publisher_is_another_one() -> None:
    """It has the parent's run and weights, and yet the parent must not take its manifest for its own."""
    store, trained, generator = MemoryStore(), small_weights(), torch.Generator().manual_seed(0)
    publisher = publisher_at(store, trained)
    publisher.publish()
    child = copy.copy(publisher)  # as fork copies it
    child._turn = threading.RLock()
    child._writer, child._manifests = copy.copy(publisher._writer), dict(publisher._manifests)
    child._weights, child._history = copy.deepcopy((publisher._weights, publisher._history))
    step(trained, generator)
    child.publish()
    after = held_of(trained)
    step(trained, generator)
    for _ in range(2):
        with pytest.raises(TakenOverError):
            publisher.publish()
    subscriber_at(store, engine := zeros(trained)).update()
    same_bits(engine, after)


def test_threads_that_publish_wait_for_each_other() -> None:
    store, trained, generator = MemoryStore(), small_weights(), torch.Generator().manual_seed(0)
    publisher, found = publisher_at(store, trained), []
    publisher.publish()
    step(trained, generator)

    def publish(wait: bool) -> None:
        found.extend(publisher.publish(wait=wait).version for _ in range(20))

    threads = [threading.Thread(target=publish, args=(k % 2 == 0,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    publisher.close()
    assert sorted(found) == list(range(2, 82))
    subscriber_at(store, engine := zeros(trained)).update()
    same_bits(engine, held_of(trained))


def test_threads_that_update_wait_for_each_other() -> None:
    store, trained, generator = MemoryStore(), small_weights(), torch.Generator().manual_seed(0)
    publisher, engine, were = publisher_at(store, trained), zeros(trained), [Weights()]
    for _ in range(12):
        were.append(step(trained, generator))
        publisher.publish()
    subscriber, failed = subscriber_at(store, engine), []
    subscriber.update(1)

    def use(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                what = rng.randrange(4)
                if what == 0:
                    subscriber.verify()
                elif what == 1:
                    with suppress(SyncError):
                        subscriber.rollback()
                else:
                    with suppress(SyncError):
                        subscriber.update(rng.randrange(1, 13))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert subscriber.version is not None
    same_bits(engine, were[subscriber.version])
    subscriber.verify()


# ---- clocks ----


def test_no_clock_that_jumps_changes_what_arrives(tmp_path: Path) -> None:
    trained, generator, rng = small_weights(), torch.Generator().manual_seed(0), random.Random(0)
    with mock.patch("time.time", side_effect=lambda: rng.uniform(0, 4e9)):
        publisher, engine = Publisher(trained, tmp_path, keep=3), zeros(trained)
        subscriber = Subscriber(engine, tmp_path)
        for version in range(12):
            after = step(trained, generator)
            publisher.publish(wait=version % 2 == 0)
            publisher.flush()
            for path in tmp_path.rglob("*"):
                os.utime(path, (0, rng.uniform(0, 4e9)))
            subscriber.update(wait=0.01)
            same_bits(engine, after)
    assert not orphans(files_in(tmp_path))


@pytest.mark.parametrize("ahead", [-1, 1])
def test_a_file_that_is_being_written_is_kept_whatever_the_clock_says(tmp_path: Path, ahead: int) -> None:
    """It was taken for one that a killed writer had left."""
    store, now = FolderStore(tmp_path), time.time()

    def chunks() -> Iterator[bytes]:
        yield b"first "
        with mock.patch("time.time", return_value=now + ahead * 2 * 24 * 3600):
            FolderStore(tmp_path).write("weights/other", b"")
        yield b"second"

    store.put("weights/a", chunks())
    assert store.read("weights/a", WHOLE) == b"first second"
    left = tmp_path / "weights" / ".partial-of-one-that-was-killed"
    left.write_bytes(b"?")
    os.utime(left, (0, now - ahead * 2 * 24 * 3600))
    store.write("weights/b", b"")
    assert not left.exists()
