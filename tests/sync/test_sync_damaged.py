"""A file that is damaged, forged or gone is named, nothing is written, and another way is found."""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from published import blank, chain, held, model, publish, same_bits, weights_of

import loco
from loco.sync import (
    DamagedError,
    NoVersionError,
    Publisher,
    Subscriber,
)

KEY = b"sixteen bytes or more"


def damages() -> Iterator[tuple[str, Callable[[Path], object]]]:
    yield "is not there", lambda path: path.unlink()
    yield (
        "is damaged",
        lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    )
    yield "bytes, and was written with", lambda path: path.write_bytes(path.read_bytes()[:-1])
    yield "bytes, and was written with", lambda path: path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize(("told", "damage"), list(damages()))
def test_a_damaged_patch_is_named_and_another_way_is_found(
    tmp_path: Path, generator: torch.Generator, told: str, damage: Callable[[Path], object]
) -> None:
    trained = model()
    publisher, engine = Publisher(trained, tmp_path, skips=10.0), blank(trained)
    subscriber = Subscriber(engine, tmp_path)
    publish(publisher, trained, generator, 1)
    subscriber.update()
    before = {name: tensor.clone() for name, tensor in engine.items()}
    publish(publisher, trained, generator, 8)
    (patch,) = (tmp_path / "weights").glob("000000000009.*.from-000000000001")
    damaged = str(patch.relative_to(tmp_path))
    damage(patch)
    with pytest.raises(DamagedError, match=told) as error:
        subscriber.update()
    assert error.value.path == damaged
    same_bits(engine, before)
    assert subscriber.version == 1
    assert subscriber.update().version == 9
    same_bits(engine, held(trained))


def test_without_any_way_every_damaged_file_is_named(tmp_path: Path, generator: torch.Generator) -> None:
    trained = model()
    publisher, engine = Publisher(trained, tmp_path), blank(trained)
    publish(publisher, trained, generator, 2)
    for path in (tmp_path / "weights").iterdir():
        path.write_bytes(b"?")
    subscriber = Subscriber(engine, tmp_path)
    with pytest.raises(DamagedError):
        subscriber.update()
    with pytest.raises(NoVersionError, match=r"no way leads to version 2 of .*; damaged: weights/"):
        subscriber.update()
    same_bits(engine, blank(trained))
    publish(publisher, trained, generator, 1)
    with pytest.raises(NoVersionError):
        subscriber.update()  # the patch is whole, and what it starts from is lost
    again = Publisher(trained, tmp_path)
    again.publish()
    subscriber.update()
    same_bits(engine, held(trained))


@pytest.mark.parametrize("key", [None, KEY])
def test_a_damaged_manifest_is_named_and_the_version_before_it_is_held(
    tmp_path: Path, generator: torch.Generator, key: bytes | None
) -> None:
    trained = model()
    publisher, engine = Publisher(trained, tmp_path, key=key), blank(trained)
    publish(publisher, trained, generator, 1)
    first = held(trained)
    publish(publisher, trained, generator, 1)
    path = tmp_path / "versions" / "000000000002.0-of-1.json"
    path.write_bytes(path.read_bytes().replace(b'"version":2', b'"version":3'))
    subscriber = Subscriber(engine, tmp_path, key=key)
    with pytest.raises(
        loco.LocoError, match=r"versions/000000000002.0-of-1.json (is damaged|was not written by)"
    ):
        subscriber.update()
    assert subscriber.update().version == 1
    same_bits(engine, first)


def test_what_is_written_without_the_key_is_refused(tmp_path: Path, generator: torch.Generator) -> None:
    trained = model()
    engine = blank(trained)
    publish(Publisher(trained, tmp_path, key=b"another key of sixteen"), trained, generator, 1)
    with pytest.raises(loco.AuthenticationError, match="was not written by a publisher that has the key"):
        Subscriber(engine, tmp_path, key=KEY).update()
    with pytest.raises(DamagedError, match="is sealed with a key, and none was given"):
        Subscriber(engine, tmp_path).update()
    same_bits(engine, blank(trained))


def test_a_file_of_another_version_under_this_ones_name_is_refused(
    tmp_path: Path, generator: torch.Generator
) -> None:
    """A whole manifest, sealed with the right key, but an old one."""
    trained = model()
    publish(Publisher(trained, tmp_path, key=KEY), trained, generator, 2)
    folder = tmp_path / "versions"
    (folder / "000000000003.0-of-1.json").write_bytes((folder / "000000000002.0-of-1.json").read_bytes())
    subscriber = Subscriber(blank(trained), tmp_path, key=KEY)
    with pytest.raises(
        DamagedError, match=r"is the manifest versions/000000000002.0-of-1.json under another name"
    ):
        subscriber.update()
    assert subscriber.update().version == 2


def test_a_version_that_is_removed_while_it_is_read_is_no_harm(tmp_path: Path) -> None:
    """The publisher keeps one version; a slow reader has seen the list, and comes too late."""
    trained, _publisher, were = chain(tmp_path, 9, skips=10.0)
    engine = blank(trained)
    subscriber = Subscriber(engine, tmp_path)
    subscriber.update(1)
    names = subscriber._reader._store.names("versions")
    for path in [*(tmp_path / "versions").glob("*2.0-of-1.json"), *weights_of(tmp_path, 2)]:
        path.unlink()
    with (
        mock.patch.object(subscriber._reader._store, "names", return_value=names),
        pytest.raises(DamagedError, match="was removed"),
    ):
        subscriber.update(2)
    same_bits(engine, were[1])
    subscriber.update()
    same_bits(engine, were[9])
