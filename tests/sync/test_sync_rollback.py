"""What an update overwrites comes back: on request, and if the update fails half way."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from published import blank, held, model, publish, same_bits, train

from loco import kernels
from loco.sync import (
    NotThisVersionError,
    Publisher,
    Subscriber,
    SyncError,
)


def test_rollback_takes_one_update_back(tmp_path: Path, generator: torch.Generator) -> None:
    trained = model()
    publisher, engine = Publisher(trained, tmp_path), blank(trained)
    subscriber = Subscriber(engine, tmp_path)
    publish(publisher, trained, generator, 1)
    subscriber.update()
    with pytest.raises(SyncError, match="there is no update that can be taken back"):
        subscriber.rollback()
    before = {name: tensor.clone() for name, tensor in engine.items()}
    publish(publisher, trained, generator, 3)
    subscriber.update()
    assert subscriber.rollback() == 1
    same_bits(engine, before)
    subscriber.verify()
    with pytest.raises(SyncError, match="there is no update that can be taken back"):
        subscriber.rollback()
    subscriber.update()
    same_bits(engine, held(trained))


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [0, 1, 2])
def test_an_update_that_fails_half_way_is_taken_back(
    tmp_path: Path, generator: torch.Generator, call: int, error: type[BaseException]
) -> None:
    """With three vectors of three publishers, at each of their writes."""
    trained = model()
    publishers = [Publisher(trained, tmp_path, stream=(k, 3)) for k in range(3)]
    engine = blank(trained)
    subscriber = Subscriber(engine, tmp_path)
    for publisher in publishers:
        publisher.publish(1)
    subscriber.update()
    before = {name: tensor.clone() for name, tensor in engine.items()}
    train(trained, generator)
    for publisher in publishers:
        publisher.publish(2)
    prepared = subscriber.prepare()
    swap, calls = kernels.swap_bits, iter(range(100))

    def failing(*arguments: object) -> list[int]:
        if next(calls) == call:
            raise error("here")
        return swap(*arguments)  # pyright: ignore[reportArgumentType]

    with mock.patch("loco.kernels.swap_bits", failing), pytest.raises(error, match="here"):
        subscriber.apply(prepared)
    same_bits(engine, before)
    assert subscriber.version == 1
    subscriber.verify()
    with pytest.raises(SyncError, match="prepared for other weights"):
        subscriber.apply(prepared)
    subscriber.update()
    same_bits(engine, held(trained))


def test_weights_that_do_not_become_what_they_should_are_taken_back(
    tmp_path: Path, generator: torch.Generator
) -> None:
    """Something has written into the weights: the patch then leads elsewhere, which the digest tells."""
    trained = model()
    publisher, engine = Publisher(trained, tmp_path), blank(trained)
    subscriber = Subscriber(engine, tmp_path)
    publish(publisher, trained, generator, 1)
    subscriber.update()
    engine["norm.weight"][5] += 1
    before = {name: tensor.clone() for name, tensor in engine.items()}
    with pytest.raises(
        NotThisVersionError, match=r"the weights in memory are not version 1: norm.weight differ"
    ):
        subscriber.verify()
    assert subscriber.version is None
    same_bits(engine, before)
    subscriber.update()
    same_bits(engine, held(trained))


def test_an_update_that_was_prepared_for_other_weights_is_refused(
    tmp_path: Path, generator: torch.Generator
) -> None:
    trained = model()
    publisher, engine = Publisher(trained, tmp_path), blank(trained)
    subscriber = Subscriber(engine, tmp_path)
    publish(publisher, trained, generator, 2)
    subscriber.update(1)
    prepared = subscriber.prepare()
    before = {name: tensor.clone() for name, tensor in engine.items()}
    same_bits(engine, before)
    subscriber.update()
    with pytest.raises(SyncError, match="version 2 was prepared for other weights"):
        subscriber.apply(prepared)


def test_preparing_writes_nothing(tmp_path: Path, generator: torch.Generator) -> None:
    trained = model()
    publisher, engine = Publisher(trained, tmp_path), blank(trained)
    subscriber = Subscriber(engine, tmp_path)
    prepared = None
    for versions in (1, 1, 3):  # all weights, one patch, several patches
        publish(publisher, trained, generator, versions)
        before = {name: tensor.clone() for name, tensor in engine.items()}
        prepared = subscriber.prepare()
        same_bits(engine, before)
        subscriber.apply(prepared)
        same_bits(engine, held(trained))
