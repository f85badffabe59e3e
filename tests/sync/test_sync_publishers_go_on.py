"""A publisher goes on, whatever its store, its predecessor and its own threads have left."""

import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from faulty_store import (
    FailingStore,
    MemoryStore,
    held_of,
    orphans,
    publisher_at,
    small_weights,
    step,
    subscriber_at,
    zeros,
)
from published import same_bits

from loco.sync import NoVersionError


def test_a_version_whose_manifest_arrived_though_the_answer_was_lost_is_the_publishers_own(
    generator: torch.Generator,
) -> None:
    """It took its own version for another publisher's, and never published again."""
    store, trained = FailingStore(), small_weights()
    publisher = publisher_at(store, trained)
    publisher.publish()
    for call in ("create", "read"):  # its answer is lost, and then the store is asked in vain, too
        step(trained, generator)
        with mock.patch.object(store, "after", _losing(call)):
            try:
                publisher.publish()
            except ConnectionResetError:
                assert call == "read"
    after = step(trained, generator)
    assert publisher.publish().version == 4
    subscriber_at(store, engine := zeros(trained)).update()
    same_bits(engine, after)


def _losing(until: str) -> Callable[[str, str], None]:
    def after(call: str, path: str) -> None:
        if path.startswith("versions/") and call in ("create", until):
            raise ConnectionResetError(errno.ECONNRESET, "the link is down", path)

    return after


def test_a_late_manifest_is_the_publishers_own_too(generator: torch.Generator) -> None:
    """A server that hung has written it after the publisher had given up."""
    store, trained = FailingStore(), small_weights()
    publisher = publisher_at(store, trained)
    publisher.publish()
    late: dict[str, bytes] = {}

    def create(path: str, data: bytes) -> None:
        late[path] = data
        raise TimeoutError(errno.ETIMEDOUT, "no answer", path)

    second = step(trained, generator)
    with mock.patch.object(store, "create", create), pytest.raises(TimeoutError):
        publisher.publish()
    store.files.update(late)
    subscriber_at(store, engine := zeros(trained)).update()
    same_bits(engine, second)
    after = step(trained, generator)
    assert publisher.publish().version == 3
    subscriber_at(store, engine).update()
    same_bits(engine, after)


@pytest.mark.parametrize("damage", [b"?", b""])
def test_a_damaged_old_manifest_stops_no_publisher(damage: bytes, generator: torch.Generator) -> None:
    """Each publish raised once a version that was to be removed could not be read: all were anchors then."""
    store, trained = MemoryStore(), small_weights()
    publisher = publisher_at(store, trained)
    for _ in range(4):
        step(trained, generator)
        publisher.publish()
    store.files["versions/000000000002.0-of-1.json"] = damage
    again = publisher_at(store, trained, keep=2, anchor_every=3)
    reasons = []
    for _ in range(9):
        step(trained, generator)
        reasons.append(again.publish().reason)
    assert reasons == ["it is this publisher's first", *[""] * 8]
    assert not orphans(store.files)
    assert "versions/000000000002.0-of-1.json" not in store.files
    subscriber_at(store, engine := zeros(trained)).update()
    same_bits(engine, held_of(trained))


def test_a_store_that_was_emptied_begins_anew_with_an_anchor(generator: torch.Generator) -> None:
    """The next version was number 1 again, and a patch from one after it, which nobody could read."""
    store, trained = MemoryStore(), small_weights()
    publisher = publisher_at(store, trained)
    engine = zeros(trained)
    subscriber = subscriber_at(store, engine)
    for _ in range(3):
        step(trained, generator)
        publisher.publish()
    subscriber.update()
    store.files.clear()
    with pytest.raises(NoVersionError):
        subscriber.update()
    after = step(trained, generator)
    published = publisher.publish()
    assert published.version == 4
    assert published.reason == "the version before it, 3, is no longer in the store"
    subscriber.update()
    same_bits(engine, after)
    after = step(trained, generator)
    assert publisher.publish().reason == ""
    subscriber.update()
    same_bits(engine, after)


def test_retention_that_failed_half_way_forgets_no_way(generator: torch.Generator) -> None:
    """Versions that were gone counted as ways for newcomers, so the real ones were removed."""
    for at in range(1, 40, 5):
        store, trained = FailingStore(), small_weights()
        publisher = publisher_at(store, trained, keep=2, anchor_every=4)
        for version in range(1, 16):
            after = step(trained, generator)
            store.fail(at if version in (7, 11) else 0)
            with suppress(ConnectionResetError):
                publisher.publish()
            if publisher.version != version:
                break
            store.fail(0)
            subscriber_at(store, engine := zeros(trained)).update()
            same_bits(engine, after)
            for old in (version - 1, version - 2):
                if f"versions/{old:012d}.0-of-1.json" in store.files:
                    subscriber_at(store, zeros(trained)).update(old)


def test_patches_over_several_versions_are_left_out_when_their_room_is_full() -> None:
    """A block of versions that had found no room was taken for another one: publishing failed then."""
    for share in (0.02, 0.05, 0.1, 0.3):
        store, trained, generator = MemoryStore(), small_weights(), torch.Generator().manual_seed(1)
        publisher, engine = publisher_at(store, trained, skips=10.0), zeros(trained)
        subscriber, skips = subscriber_at(store, engine), 0
        for version in range(1, 60):
            after = step(trained, generator, share)
            skips += len(publisher.publish().skips)
            if version % 7 == 0:
                subscriber.update()
                same_bits(engine, after)
                subscriber.verify()
        assert share > 0.02 or skips > 5


def test_weights_may_change_as_soon_as_a_publish_that_does_not_wait_returns(
    generator: torch.Generator,
) -> None:
    store, trained, changed = FailingStore(), small_weights(), threading.Event()
    publisher = publisher_at(store, trained)
    for reason in ("it is this publisher's first", "", ""):
        fresh = step(trained, generator)
        changed.clear()
        store.hook = lambda _: threading.current_thread() is threading.main_thread() or changed.wait(60.0)
        assert publisher.publish(wait=False).reason == reason
        for tensor in trained.values():
            tensor.neg_()
        changed.set()
        publisher.flush()
        for tensor in trained.values():
            tensor.neg_()
        subscriber_at(MemoryStore(store.files), engine := zeros(trained)).update()
        same_bits(engine, fresh)


def test_a_round_is_published_though_the_one_before_could_not_be(
    generator: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """What had gone wrong behind a round was raised in the next one, which then was not published either."""
    hooks: list[Callable[[object], None]] = []
    store, trained = FailingStore(), small_weights()
    publisher = publisher_at(store, trained)
    settings = SimpleNamespace(overlap=None)
    optimizer = SimpleNamespace(round=0, register_report_hook=hooks.append, settings=settings)
    publisher.after(optimizer, wait=False)
    for number in range(1, 5):
        step(trained, generator)
        store.fail(3 if number == 2 else 0)
        hooks[0](SimpleNamespace(round=number))
        assert publisher._writing is not None
        publisher._writing.join()
    assert "version 2 was not published" in caplog.text
    publisher.close()
    engine = zeros(trained)
    subscriber = subscriber_at(store, engine)
    assert store.names("versions") == [f"00000000000{k}.0-of-1.json" for k in (1, 3, 4)]
    subscriber.update()
    same_bits(engine, held_of(trained))
