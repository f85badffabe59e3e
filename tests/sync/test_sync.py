"""A subscriber holds what the publisher published, bit for bit, whatever it missed."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from faulty_store import MemoryStore, held_of, publisher_at, step, subscriber_at, zeros
from published import blank, chain, held, model, publish, same_bits, train, weights_of
from selection import CHECKPOINTS, SCHEDULES

from loco import kernels
from loco.sync import (
    NoVersionError,
    Publisher,
    Subscriber,
)
from loco.sync.storage.stores import Store


@pytest.mark.parametrize("wait", [True, False])
def test_every_version_arrives_bit_for_bit(tmp_path: Path, generator: torch.Generator, wait: bool) -> None:
    trained = model()
    engine = blank(trained)
    with Publisher(trained, tmp_path) as publisher:
        subscriber = Subscriber(engine, tmp_path)
        for version in range(1, 6):
            published = publisher.publish(wait=wait)
            publisher.flush()
            updated = subscriber.update()
            assert (updated.version, published.version) == (version, version)
            same_bits(engine, held(trained))
            subscriber.verify()
            train(trained, generator)


@pytest.mark.check(CHECKPOINTS, sample="130-10.0")
@pytest.mark.parametrize(("versions", "skips"), [(130, 10.0), (130, 0.25), (400, 10.0), (400, 0.0)])
def test_a_chain_with_random_misses_ends_bitwise_equal(tmp_path: Path, versions: int, skips: float) -> None:
    """Subscribers that look now and then, forwards only, and some that begin in between."""
    trained, _publisher, were = chain(tmp_path, versions, skips=skips)
    rng = random.Random(2)
    for _ in range(6):
        engine, version, files = blank(trained), 0, []
        subscriber = Subscriber(engine, tmp_path)
        while version < versions:
            missed = rng.choice([1, 1, 2, 3, 7, 20, 100, versions])
            version = min(version + missed, versions)
            updated = subscriber.update(version)
            same_bits(engine, were[version])
            files.append((missed, updated.files))
        subscriber.verify()
        # With all patches over 8, 16, … versions: up to seven single ones at each end, about 2·log2 of the
        # eights between them, and the anchor that it began with.
        if skips > 1:
            assert all(count <= 14 + 2 * (missed // 8).bit_length() + 1 for missed, count in files), files


def test_who_missed_many_reads_far_less_than_every_patch(tmp_path: Path) -> None:
    trained, _publisher, were = chain(tmp_path, 65, skips=10.0)
    engine = blank(trained)
    subscriber = Subscriber(engine, tmp_path)
    subscriber.update(1)
    singly = sum(
        next(iter((tmp_path / "weights").glob(f"{v:012d}.*from-{v - 1:012d}"))).stat().st_size
        for v in range(2, 66)
    )
    updated = subscriber.update()
    same_bits(engine, were[65])
    assert updated.files <= 3
    assert updated.bytes < singly / 2


@pytest.mark.parametrize("skips", [0.0, 0.25, 1.0])
def test_patches_over_several_versions_keep_to_their_budget(generator: torch.Generator, skips: float) -> None:
    """They had made what is uploaded four times as much as the patches that everybody reads."""
    store, trained = MemoryStore(), {"a": torch.randn(100_003, generator=generator) * 0.02}
    publisher = publisher_at(store, trained, skips=skips, anchor_every=1000)
    singles, over, said = 0, 0, 0
    for version in range(1, 130):
        step(trained, generator, 0.01)
        published = publisher.publish()
        said += len(published.skips)
        assert all((version - base) % 8 == 0 for base in published.skips)
        if not published.reason:
            singles += published.patch_bytes
            files = [(name, data) for name, data in store.files.items() if f"/{version:012d}." in name]
            over += sum(len(d) for n, d in files if any(f"from-{base:012d}" in n for base in published.skips))
            assert over <= skips * singles
    assert (said > 4) == (skips > 0)
    assert skips == 0 or over > 0.1 * singles  # and it is used


@contextmanager
def reads_of(store: Store) -> Iterator[list[str]]:
    """The paths of the files that are read meanwhile."""
    paths: list[str] = []
    read, read_chunks = store.read, store.read_chunks
    with (
        mock.patch.object(store, "read", lambda path, most: (paths.append(path), read(path, most))[1]),
        mock.patch.object(store, "read_chunks", lambda path: (paths.append(path), read_chunks(path))[1]),
    ):
        yield paths


def test_who_takes_every_version_reads_one_manifest_and_one_patch_for_each(tmp_path: Path) -> None:
    trained, generator = model(width=9), torch.Generator().manual_seed(1)
    publisher, engine = Publisher(trained, tmp_path), blank(trained)
    subscriber = Subscriber(engine, tmp_path)
    store = subscriber._reader._store
    for version in range(1, 40):
        publisher.publish()
        with reads_of(store) as read_files:
            subscriber.update()
        if version > 1:
            assert 2 <= len(read_files) <= 3, (
                read_files
            )  # and that of the version before, to see that it is the same
        train(trained, generator)


@pytest.mark.check(SCHEDULES)
@pytest.mark.parametrize("missed", [7, 63, 126, 127])
def test_who_missed_versions_reads_few_patches_and_as_few_manifests(missed: int) -> None:
    """Manifests of all versions that it might have gone by were read, about log₂(n)² of them. With all
    patches over 8, 16, … versions.
    """
    store, trained = MemoryStore(), {"a": torch.zeros(400, 300)}
    publisher, generator = publisher_at(store, trained, skips=10.0), torch.Generator().manual_seed(0)
    publisher.publish()
    engine = zeros(trained)
    subscriber = subscriber_at(store, engine)
    subscriber.update()
    for _ in range(missed):
        step(trained, generator, 0.002)
        publisher.publish()
    with reads_of(store) as read_files:
        updated = subscriber.update()
    same_bits(engine, held_of(trained))
    manifests = [path for path in read_files if path.startswith("versions/")]
    assert updated.files <= 7 + 2 * math.log2(missed // 8 + 1)
    assert len(manifests) <= updated.files + 3


def test_weights_that_are_a_version_already_are_not_read_again(
    tmp_path: Path, generator: torch.Generator
) -> None:
    """An engine that has loaded the checkpoint that training began with."""
    trained = model()
    engine = held(trained)
    publisher = Publisher(trained, tmp_path)
    publisher.publish()
    publish(publisher, trained, generator, 1)
    updated = Subscriber(engine, tmp_path).update()
    same_bits(engine, held(trained))
    (patch,) = weights_of(tmp_path, 2)
    assert updated.bytes == patch.stat().st_size
    assert Subscriber(engine, tmp_path).update().bytes == 0


def test_weights_of_any_version_that_is_kept_are_recognised(tmp_path: Path) -> None:
    """Also if there has been a new anchor since: then the update can be taken back."""
    trained, generator = model(width=9), torch.Generator().manual_seed(1)
    publisher, engine = Publisher(trained, tmp_path, anchor_every=2), held(trained)
    publisher.publish()
    publish(publisher, trained, generator, 5)
    before = {name: tensor.clone() for name, tensor in engine.items()}
    subscriber = Subscriber(engine, tmp_path)
    subscriber.update()
    same_bits(engine, held(trained))
    subscriber.rollback()
    same_bits(engine, before)


def test_dense_changes_go_as_an_anchor_when_that_is_smaller(
    tmp_path: Path, generator: torch.Generator
) -> None:
    """As a LoRA's small tensors, which change as a whole."""
    trained = {"lora": torch.randn(64, 512, generator=generator)}
    engine = {"lora": torch.zeros(64, 512, dtype=torch.bfloat16)}
    publisher, subscriber = Publisher(trained, tmp_path), Subscriber(engine, tmp_path)
    for _ in range(3):
        trained["lora"].copy_(torch.randn(64, 512, generator=generator))
        published = publisher.publish()
        assert published.patch_bytes < 0.85 * published.dense_bytes
        subscriber.update()
        same_bits(engine, {"lora": kernels.reference.cast(trained["lora"], torch.bfloat16)})


def test_nothing_that_changed_takes_next_to_nothing(tmp_path: Path) -> None:
    trained = model()
    publisher, engine = Publisher(trained, tmp_path), blank(trained)
    publisher.publish()
    subscriber = Subscriber(engine, tmp_path)
    subscriber.update()
    published = publisher.publish()
    assert (published.entries, published.patch_bytes) == (0, 0)
    assert published.bytes < 1000
    assert subscriber.update().version == 2


@pytest.mark.check(SCHEDULES)
def test_old_versions_go_and_everybody_still_finds_a_way(tmp_path: Path) -> None:
    """Those who are at most `keep` behind by patches alone; newcomers and those far behind by an anchor."""
    trained, generator = model(width=9), torch.Generator().manual_seed(1)
    publisher = Publisher(trained, tmp_path, keep=8)
    engines = {}
    for version in range(1, 101):
        train(trained, generator)
        publisher.publish()
        if version in (3, 92, 97):
            engines[version] = Subscriber(engine := blank(trained), tmp_path), engine
            engines[version][0].update()
    left = len(list((tmp_path / "versions").iterdir()))
    assert left < 8 + 12
    assert {path.name.partition(".")[0] for path in (tmp_path / "weights").iterdir()} <= {
        path.name.partition(".")[0] for path in (tmp_path / "versions").iterdir()
    }
    engines[100] = Subscriber(engine := blank(trained), tmp_path), engine
    for version, (subscriber, engine) in engines.items():
        updated = subscriber.update()
        same_bits(engine, held(trained))
        if version in (92, 97):
            assert updated.bytes < 0.3 * sum(t.nbytes for t in engine.values())


def test_anchors_come_as_often_as_asked(tmp_path: Path, generator: torch.Generator) -> None:
    trained = model()
    publish(Publisher(trained, tmp_path, anchor_every=3), trained, generator, 8)
    anchors = sorted(int(path.name[:12]) for path in (tmp_path / "weights").glob("*.anchor"))
    assert anchors == [1, 4, 7]
    engine = blank(trained)
    Subscriber(engine, tmp_path).update()
    same_bits(engine, held(trained))


def test_nothing_published_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoVersionError, match="has no version: nothing is published there"):
        Subscriber(blank(model()), tmp_path).update()
    publisher = Publisher(model(), tmp_path)
    publisher.publish()
    with pytest.raises(NoVersionError, match="has no version 7: there are 1 to 1"):
        Subscriber(blank(model()), tmp_path).update(7)


def test_vectors_of_several_slices_are_joined_and_decoded_slice_by_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    monkeypatch.setattr("loco.sync.versions.history.SLICE", kernels.PART)
    monkeypatch.setattr("loco.sync.decoding.SLICE", kernels.PART)
    numel = 2 * kernels.PART + 1003
    trained = {"a": torch.randn(numel, generator=generator) * 0.02, "b": torch.ones(5)}
    publisher = Publisher(trained, tmp_path, skips=10.0)
    engine = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in trained.items()}
    subscriber = Subscriber(engine, tmp_path)
    for version in range(1, 18):
        publisher.publish()
        if version in (1, 9, 17):
            assert subscriber.update().files == 1
            same_bits(
                engine, {name: kernels.reference.cast(t, torch.bfloat16) for name, t in trained.items()}
            )
            subscriber.verify()
        where = torch.randint(numel, (3000,), generator=generator)
        trained["a"][where] *= 1.01
        trained["a"][[0, kernels.PART - 1, kernels.PART, numel - 1]] += 1.0
    assert subscriber.rollback() == 9
    subscriber.verify()
