"""A subscriber follows one training, and goes back only if it is asked to."""

import time
from pathlib import Path

import pytest
import torch
from faulty_store import (
    MemoryStore,
    Weights,
    copied,
    held_of,
    publisher_at,
    small_weights,
    step,
    subscriber_at,
    zeros,
)
from published import same_bits

from loco.sync import NoVersionError, OtherTrainingError, Publisher, StaleStoreError, Subscriber

KEY = b"sixteen bytes or more"


def chain(store: MemoryStore, seed: int, versions: int, **settings: object) -> tuple[Publisher, Weights]:
    trained, generator = small_weights(seed), torch.Generator().manual_seed(seed)
    publisher = publisher_at(store, trained, key=KEY, **settings)
    for _ in range(versions):
        step(trained, generator)
        publisher.publish()
    return publisher, trained


def test_another_trainings_versions_are_refused_by_name_and_stop_nobody() -> None:
    """Sealed with the same key, and copied into this one's store."""
    ours, theirs = MemoryStore(), MemoryStore()
    publisher, trained = chain(ours, 0, 3)
    chain(theirs, 1, 5)
    engine = zeros(trained)
    subscriber = subscriber_at(ours, engine, key=KEY)
    subscriber.update()
    before = copied(engine)
    ours.files.update({path: data for path, data in theirs.files.items() if path not in ours.files})
    for version in (5, 4):
        with pytest.raises(
            OtherTrainingError, match=f"versions/00000000000{version}.0-of-1.json .* of training"
        ):
            subscriber.update()
    assert subscriber.update().version == 3
    same_bits(engine, before)
    step(trained, torch.Generator().manual_seed(2))
    assert publisher.publish().version == 6  # past the numbers that are taken
    assert subscriber.update().version == 6
    same_bits(engine, held_of(trained))


def test_one_shard_of_another_training_is_no_part_of_a_version() -> None:
    """Though a newcomer has seen neither."""
    store, theirs, trained = MemoryStore(), MemoryStore(), small_weights()
    ours = [publisher_at(store, trained, stream=(k, 2), key=KEY) for k in range(2)]
    other = [publisher_at(theirs, trained, stream=(k, 2), key=KEY) for k in range(2)]
    for publisher in (*ours, *other):
        publisher.publish(3)
    ours[0].publish(4)
    other[1].publish(4)
    store.files.update({path: data for path, data in theirs.files.items() if "4.1-of-2" in path})
    engine = zeros(trained)
    subscriber = subscriber_at(store, engine, key=KEY)
    assert subscriber.update().version == 3
    with pytest.raises(NoVersionError, match=r"4\.1-of-2\.json is of another attempt"):
        subscriber.update(4)


def test_a_publisher_that_comes_back_is_of_the_same_training() -> None:
    store = MemoryStore()
    chain(store, 0, 2)
    engine = zeros(small_weights())
    subscriber = subscriber_at(store, engine, key=KEY)
    subscriber.update()
    _, trained = chain(store, 1, 2)
    assert subscriber.update().version == 4
    same_bits(engine, held_of(trained))
    store.files["training"] = b"\xff" * 5000  # its identity is lost, but not what it has said
    publisher, _ = chain(store, 2, 1)
    assert publisher.version == 5
    with pytest.raises(OtherTrainingError):
        subscriber.update()


def test_a_newcomer_asks_for_a_training_by_its_name() -> None:
    store, engine = MemoryStore(), zeros(small_weights())
    _, trained = chain(store, 0, 2, training="run 7")
    assert "training" not in store.files
    with pytest.raises(OtherTrainingError, match="is of training run 7, and run 8 is followed"):
        subscriber_at(store, engine, key=KEY, training="run 8").update()
    same_bits(engine, zeros(small_weights()))
    subscriber_at(store, engine, key=KEY, training="run 7").update()
    same_bits(engine, held_of(trained))


@pytest.mark.parametrize("end", [Publisher, Subscriber])
def test_a_training_has_no_empty_name(tmp_path: Path, end: type[Publisher] | type[Subscriber]) -> None:
    with pytest.raises(ValueError, match="training must be a name that is not empty"):
        end(zeros(small_weights()), tmp_path, training="")


# ---- back ----


def test_an_update_goes_back_only_if_it_is_asked_to(tmp_path: Path) -> None:
    """The newest manifests are gone, or a relay lags behind."""
    trained, generator, were = small_weights(), torch.Generator().manual_seed(0), list[Weights]()
    publisher, engine = Publisher(trained, tmp_path, key=KEY), zeros(trained)
    subscriber = Subscriber(engine, tmp_path, key=KEY)
    for _ in range(5):
        were.append(step(trained, generator))
        publisher.publish()
    subscriber.update()
    for version in (4, 5):
        (tmp_path / "versions" / f"{version:012d}.0-of-1.json").unlink()
    for wait in (0.0, 0.2):
        begun = time.monotonic()
        with pytest.raises(StaleStoreError, match=r"is 3, and 5 was held: .* update\(3\) goes back to it"):
            subscriber.update(wait=wait)
        assert time.monotonic() - begun >= wait
    same_bits(engine, were[4])
    subscriber.verify()
    engine["a"][0, 0] += 1.0  # also once it is not known any more what is held
    assert subscriber.version == 5
    with pytest.raises(Exception, match="not version 5"):
        subscriber.verify()
    with pytest.raises(StaleStoreError):
        subscriber.update()
    assert subscriber.update(3).version == 3
    same_bits(engine, were[2])
    assert subscriber.update().version == 3
    fresh = step(trained, generator)
    assert publisher.publish().version == 6
    assert subscriber.update().version == 6
    same_bits(engine, fresh)


def test_an_update_that_waits_passes_over_an_older_version() -> None:
    """It returned the older one at once."""
    store, trained, generator = MemoryStore(), small_weights(), torch.Generator().manual_seed(0)
    publisher, engine = publisher_at(store, trained), zeros(trained)
    subscriber = subscriber_at(store, engine)
    for _ in range(3):
        step(trained, generator)
        publisher.publish()
    subscriber.update()
    del store.files["versions/000000000003.0-of-1.json"]
    waited = []

    def wait(folder: str, known: list[str], timeout: float) -> list[str]:
        waited.append(known)
        step(trained, generator)
        publisher.publish()
        return store.names(folder)

    store.wait = wait
    assert subscriber.update(wait=60.0).version == 4
    assert len(waited) == 1
    same_bits(engine, held_of(trained))


def test_who_rolled_back_goes_forward_again() -> None:
    store, engine = MemoryStore(), zeros(small_weights())
    publisher, trained = chain(store, 0, 2)
    subscriber = subscriber_at(store, engine, key=KEY)
    subscriber.update(1)
    subscriber.update(2)
    del store.files["versions/000000000002.0-of-1.json"]
    with pytest.raises(StaleStoreError):
        subscriber.update()
    assert subscriber.rollback() == 1
    assert subscriber.update().version == 1
    step(trained, torch.Generator().manual_seed(2))
    publisher.publish()
    assert subscriber.update().version == 3
