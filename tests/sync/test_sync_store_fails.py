"""The store fails at any call of a publish or an update: an OSError, nothing half, and then it goes on."""

import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from disks import small_disk
from faulty_store import (
    FailingStore,
    MemoryStore,
    copied,
    held_of,
    orphans,
    publisher_at,
    small_weights,
    step,
    subscriber_at,
    zeros,
)
from published import same_bits

from loco.sync import DamagedError, NoVersionError, Publisher, Subscriber


def failures(wait: bool, lost: bool) -> Iterator[tuple[str, bool]]:
    """A chain with old versions to remove, whose fifth publish meets a failure at one call after the other.
    -> which call, and whether the version was there then"""
    at = 1
    while True:
        store, trained, generator = FailingStore(), small_weights(), torch.Generator().manual_seed(0)
        publisher = publisher_at(store, trained, keep=1, anchor_every=3)
        engine = zeros(trained)
        subscriber = subscriber_at(MemoryStore(store.files), engine)
        for _ in range(4):
            step(trained, generator)
            publisher.publish()
        subscriber.update()
        before, fresh = copied(engine), step(trained, generator)
        store.fail(at, lost)
        try:
            publisher.publish(wait=wait)
            step(trained, generator)
            publisher.flush()
        except ConnectionResetError:
            pass
        failed = store.failed
        store.fail(0)
        there = subscriber.update().version == 5
        same_bits(engine, fresh if there else before)
        subscriber.verify()
        after = step(trained, generator)
        publisher.publish()
        subscriber.update()
        same_bits(engine, after)
        subscriber.verify()
        newcomer = zeros(trained)
        subscriber_at(store, newcomer).update()
        same_bits(newcomer, after)
        publisher.publish()
        assert not orphans(store.files)
        if not failed:
            return
        yield failed, there
        at += 1


@pytest.mark.parametrize("lost", [False, True], ids=["the call", "its answer"])
@pytest.mark.parametrize("wait", [True, False])
def test_a_store_that_fails_at_any_call_of_a_publish_harms_no_version(wait: bool, lost: bool) -> None:
    found = list(failures(wait, lost))
    assert len(found) >= 5
    # What fails while room is made fails no version: it is tried again.
    removing = [arrived for call, arrived in found if call.startswith("delete")]
    assert removing
    assert all(removing)
    writing = [arrived for call, arrived in found if call.startswith(("write", "create"))]
    assert writing == [False] * (len(writing) - 1) + [lost]


def test_what_a_publish_that_does_not_wait_could_not_write_is_raised_by_the_next_call(
    generator: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """And logged when it happens: there may be no next call."""
    store, trained = FailingStore(), small_weights()
    publisher = publisher_at(store, trained)
    publisher.publish()
    store.fail(3)
    step(trained, generator)
    assert publisher.publish(wait=False).version == 2
    with pytest.raises(ConnectionResetError, match="the link is down"):
        publisher.publish()
    assert "version 2 was not published" in caplog.text
    assert publisher.flush() is not None
    after = step(trained, generator)
    assert "could not be published" in publisher.publish(wait=False).reason
    publisher.close()
    subscriber_at(store, engine := zeros(trained)).update()
    same_bits(engine, after)


@pytest.mark.parametrize("held", [None, 1, 3], ids=["from nothing", "over four versions", "over two"])
def test_a_store_that_fails_at_any_call_of_an_update_leaves_the_weights(
    held: int | None, generator: torch.Generator
) -> None:
    store, trained = FailingStore(), small_weights()
    publisher = publisher_at(store, trained)
    for _ in range(5):
        step(trained, generator)
        publisher.publish()
    fresh = held_of(trained)
    at, calls = 1, []
    while True:
        engine = zeros(trained)
        subscriber = subscriber_at(store, engine)
        store.fail(0)
        if held:
            subscriber.update(held)
        before = copied(engine)
        store.fail(at)
        try:
            subscriber.update()
        except ConnectionResetError:
            same_bits(engine, before)
            assert subscriber.version == held
            subscriber.update()
        same_bits(engine, fresh)
        subscriber.verify()
        if not store.failed:
            break
        calls.append(store.failed)
        at += 1
    assert len(calls) > 3


@pytest.mark.parametrize("held", [None, 2, 6])
def test_a_version_that_is_removed_at_any_call_of_an_update_is_no_harm(
    held: int | None, generator: torch.Generator
) -> None:
    """Retention goes as far as it may while a reader reads: all but the newest versions are gone."""
    trained, were, chain = small_weights(), {}, MemoryStore()
    publisher = publisher_at(chain, trained, anchor_every=4, keep=2)
    for version in range(1, 9):
        were[version] = step(trained, generator)
        with mock.patch.object(chain, "delete"):
            publisher.publish()
    number = 1
    while True:
        store = FailingStore(dict(chain.files))
        engine = zeros(trained)
        subscriber = subscriber_at(store, engine)
        if held:
            subscriber.update(held)
        before, goal = copied(engine), 7
        gone = [p for p in store.files if not p.startswith("layouts/") and "00008" not in p]
        store.fail(0)
        store.hook = partial(_remove, store, gone, number)
        try:
            subscriber.update(goal)
        except (DamagedError, NoVersionError):
            same_bits(engine, before)
        else:
            same_bits(engine, were[goal])
        if store.calls < number:
            break
        store.files.update(chain.files)
        subscriber = subscriber_at(store, engine)
        subscriber.update()
        same_bits(engine, were[8])
        number += 1
    assert number > 3


def _remove(store: FailingStore, paths: list[str], at: int, call: int) -> None:
    for path in paths if call == at else ():
        store.files.pop(path, None)


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_and_a_read_only_store_leave_no_half_version(
    tmp_path: Path, generator: torch.Generator, wait: bool
) -> None:
    """What could not be written is removed, since it would fill the disk further with each attempt."""
    folder = tmp_path / "disk"
    with small_disk(folder, "256k"):
        trained = small_weights()
        publisher, engine = Publisher(trained, folder), zeros(trained)
        subscriber = Subscriber(engine, folder)
        publisher.publish()
        subscriber.update()
        (folder / "ballast").write_bytes(bytes(1 << 20)[: _free(folder) - 4096 - 1024])
        before, full = copied(engine), 0
        for _ in range(40):
            step(trained, generator)
            try:
                publisher.publish(wait=wait)
                publisher.flush()
            except OSError:
                full += 1
            subscriber.update()
            subscriber.verify()
        assert full > 3
        left = len(list((folder / "weights").iterdir())) - len(list((folder / "versions").iterdir()))
        assert left <= 3
        (folder / "ballast").unlink()
        after = step(trained, generator)
        publisher.publish()
        subscriber.update()
        same_bits(engine, after)
        before = copied(engine)
        with mock.patch("os.link", side_effect=OSError(errno.EROFS, "Read-only file system")):
            step(trained, generator)
            with pytest.raises(OSError, match="Read-only"):
                publisher.publish()
        assert subscriber.update().entries == 0
        same_bits(engine, before)
        publisher.publish()
        subscriber.update()
        same_bits(engine, held_of(trained))


def _free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
