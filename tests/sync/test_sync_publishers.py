"""Several publishers of one version, one that comes back, two of one name, one that follows an optimizer."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from faulty_store import MemoryStore, publisher_at, step, subscriber_at, zeros
from published import blank, held, model, publish, same_bits, train
from torch import nn

import loco
from loco.sync import (
    DamagedError,
    NoVersionError,
    Publisher,
    Subscriber,
    TakenOverError,
)


def test_publishers_that_share_the_work_make_one_version(tmp_path: Path, generator: torch.Generator) -> None:
    """As after a round, in which all sites hold the same weights: each publishes a third."""
    trained = model()
    publishers = [Publisher(trained, tmp_path, stream=(k, 3)) for k in range(3)]
    engine = blank(trained)
    subscriber = Subscriber(engine, tmp_path)
    total = publishers[0].publish(10).dense_bytes
    with pytest.raises(NoVersionError, match="of version 10 there are 1 of 3 parts"):
        subscriber.update()
    total += sum(publisher.publish(10).dense_bytes for publisher in publishers[1:])
    assert total == sum(t.numel() * t.element_size() for n, t in held(trained).items() if n != "head.weight")
    assert subscriber.update().version == 10
    same_bits(engine, held(trained))
    train(trained, generator)
    for publisher in publishers[:2]:
        publisher.publish(12)
    assert subscriber.update().version == 10  # a version is there whole or not at all
    publishers[2].publish(12)
    assert subscriber.update().version == 12
    same_bits(engine, held(trained))
    assert subscriber.rollback() == 10
    subscriber.verify()


class CrowdedStore(MemoryStore):
    """Bears three reads at once, and once it is told to answers no fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = 3
        self.together: threading.Barrier | None = None

    def before(self, call: str, path: str) -> None:
        if self.together is not None and call == "read":
            self.together.wait(60.0)


def test_files_of_several_publishers_are_read_at_once(generator: torch.Generator) -> None:
    store, trained = CrowdedStore(), {name: torch.randn(40, 9, generator=generator) for name in "abcdef"}
    publishers = [publisher_at(store, trained, stream=(k, 6)) for k in range(6)]
    engine = zeros(trained)
    subscriber = subscriber_at(store, engine)
    for version in range(1, 4):
        after = step(trained, generator)
        for publisher in publishers:
            publisher.publish(version)
        # What publishers read, and layouts, which are read once, are read by one thread.
        store.together = threading.Barrier(3) if version > 1 else None
        subscriber.update()
        store.together = None
        same_bits(engine, after)


class SlowStore(MemoryStore):
    """Bears eight reads at once. Those of files of weights, but the first, wait until they may end."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once, self.goes_on, self.reads, self.first = 8, threading.Event(), list[str](), ""

    def read_chunks(self, path: str) -> Iterator[bytes]:
        if path.startswith("weights/"):
            self.reads.append(path)
            if path != self.first:
                self.goes_on.wait(60.0)
        return super().read_chunks(path)


def test_after_an_error_nothing_more_is_read(generator: torch.Generator) -> None:
    store, trained = SlowStore(), {f"{k}": torch.randn(40, 9, generator=generator) for k in range(20)}
    publishers = [publisher_at(store, trained, stream=(k, 20)) for k in range(20)]
    subscriber = subscriber_at(store, zeros(trained))
    for publisher in publishers:
        publisher.publish(1)
    damaged = next(path for path in sorted(store.files) if path.startswith("weights/"))
    store.first = damaged
    store.files[damaged] = store.files[damaged][:-1] + b"?"
    with pytest.raises(DamagedError, match="SHA-256"):
        subscriber.update()
    store.goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "loco-read":
            thread.join(60.0)
    assert len(store.reads) <= 9  # of each thread one, and another one by the thread that met the error
    assert subscriber._reader.avoid == {damaged}


def test_ctrl_c_waits_for_no_file(generator: torch.Generator) -> None:
    store, trained = CrowdedStore(), {name: torch.randn(40, 9, generator=generator) for name in "abc"}
    publishers = [publisher_at(store, trained, stream=(k, 3)) for k in range(3)]
    engine = zeros(trained)
    subscriber = subscriber_at(store, engine)
    after = step(trained, generator)
    for publisher in publishers:
        publisher.publish(1)
    store.together = barrier = threading.Barrier(4)  # which three reads do not reach

    def interrupt() -> None:
        while barrier.n_waiting < 3:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupting = threading.Thread(target=interrupt, daemon=True)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            subscriber.update()
    finally:
        interrupting.join()
        signal.signal(signal.SIGALRM, before)
    store.together = None
    barrier.abort()
    assert subscriber.update().version == 1
    same_bits(engine, after)


def test_publishers_that_share_the_work_must_name_their_versions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="version must be given where several publishers share the work"):
        Publisher(model(), tmp_path, stream=(0, 2)).publish()


def test_a_publisher_that_comes_back_goes_on_with_an_anchor(
    tmp_path: Path, generator: torch.Generator
) -> None:
    trained = model()
    engine = blank(trained)
    subscriber = Subscriber(engine, tmp_path)
    publish(Publisher(trained, tmp_path), trained, generator, 3)
    subscriber.update()
    again = Publisher(trained, tmp_path)
    train(trained, generator)
    assert again.publish().version == 4
    updated = subscriber.update()
    same_bits(engine, held(trained))
    assert updated.previous == 3
    subscriber.rollback()
    assert subscriber.version == 3
    subscriber.verify()


def test_who_changes_most_weights_in_each_version_is_told_once_why_that_may_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, generator: torch.Generator
) -> None:
    trained = {"a": torch.randn(1000, generator=generator)}
    publisher = Publisher(trained, tmp_path)
    for share, told in ((1.0, 0), (0.25, 0), (0.35, 1), (1.0, 1)):
        trained["a"][: int(1000 * share)] *= 1.5
        publisher.publish()
        texts = [text for text in caplog.messages if "of the weights, so that its patch takes" in text]
        assert len(texts) == told
    assert "version 3 changes 35% of the weights" in texts[0]
    assert "does the training keep no FP32 weights" in texts[0]


def test_two_publishers_of_one_name_are_told(tmp_path: Path, generator: torch.Generator) -> None:
    trained = model()
    first, second = Publisher(trained, tmp_path), Publisher(trained, tmp_path)
    first.publish()
    second.publish()
    with pytest.raises(
        TakenOverError, match="version 2 was published by another process: two publishers use"
    ):
        first.publish()


def test_two_publishers_at_the_same_moment_are_told(tmp_path: Path) -> None:
    """The second one's manifest finds the first one's in its place."""
    trained = model()
    first, second = Publisher(trained, tmp_path), Publisher(trained, tmp_path)
    with mock.patch.object(second._writer._store, "names", return_value=[]):
        first.publish()
        with pytest.raises(TakenOverError, match="version 1 was published by another process"):
            second.publish()
    engine = blank(trained)
    Subscriber(engine, tmp_path).update()
    same_bits(engine, held(trained))


@pytest.mark.usefixtures("single_site")
def test_an_optimizer_publishes_after_each_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also on one site alone. A version that can't be written is no reason to fail the round."""
    trained = nn.Linear(8, 8)
    optimizer = loco.PulseLoCo(torch.optim.SGD(trained.parameters(), lr=0.1), sync_every=2)
    publisher = Publisher(trained, tmp_path)
    handle = publisher.after(optimizer)
    engine = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in trained.state_dict().items()}
    subscriber = Subscriber(engine, tmp_path)
    for number in range(1, 7):
        optimizer.zero_grad()
        trained(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        if number % 2 == 0:
            assert subscriber.update().version == number // 2
            same_bits(engine, held(trained))
    with mock.patch.object(publisher._writer._store, "create", side_effect=OSError("no room")):
        optimizer.sync()
    assert "the weights after round 4 were not published" in caplog.text
    optimizer.sync()
    assert subscriber.update().version == 5
    same_bits(engine, held(trained))
    handle.remove()
    optimizer.sync()
    assert publisher.version == 5
    # Resumed from the checkpoint of an earlier round, it goes on after what is published.
    again = Publisher(trained, tmp_path)
    optimizer = loco.PulseLoCo(torch.optim.SGD(trained.parameters(), lr=0.1), sync_every=2)
    again.after(optimizer)
    optimizer.sync()
    assert again.version == 6


@pytest.mark.usefixtures("single_site")
def test_where_rounds_overlap_what_the_sites_agree_on_is_published(tmp_path: Path) -> None:
    trained = nn.Linear(8, 8)
    optimizer = loco.PulseLoCo(torch.optim.SGD(trained.parameters(), lr=0.1), sync_every=2, overlap=True)
    publisher = Publisher(trained, tmp_path)
    publisher.after(optimizer)
    engine = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in trained.state_dict().items()}
    subscriber = Subscriber(engine, tmp_path)
    for number in range(1, 7):
        optimizer.zero_grad()
        trained(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        if number % 2 == 0 and number > 2:
            before = [p.detach().clone() for p in trained.parameters()]
            assert subscriber.update().version == number // 2 - 1
            optimizer.eval()
            same_bits(engine, held(trained))
            optimizer.train()
            assert all(torch.equal(p, b) for p, b in zip(trained.parameters(), before, strict=True))
            own = {name: t.bfloat16() for name, t in trained.state_dict().items()}
            assert not all(torch.equal(engine[name], t) for name, t in own.items())


@pytest.mark.usefixtures("single_site")
def test_a_run_that_goes_back_to_a_checkpoint_publishes_the_next_version(tmp_path: Path) -> None:
    """Whether it publishes from before the checkpoint is loaded, or after."""

    def built() -> tuple[loco.PulseLoCo, Publisher]:
        trained = nn.Linear(8, 8)
        inner = torch.optim.SGD(trained.parameters(), lr=0.1)
        return loco.PulseLoCo(inner, sync_every=2), Publisher(trained, tmp_path)

    optimizer, publisher = built()
    publisher.after(optimizer)
    for _ in range(2):
        optimizer.sync()
    saved = optimizer.state_dict()
    optimizer.sync()
    for is_first, expected in ((True, 4), (False, 5)):
        optimizer, publisher = built()
        if is_first:
            publisher.after(optimizer)
        optimizer.load_state_dict(saved)
        if not is_first:
            publisher.after(optimizer)
        optimizer.sync()
        assert (optimizer.round, publisher.version) == (3, expected)


def test_a_share_that_nobody_completes_is_told_at_both_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each site publishes into a folder of its own, say."""
    trained = model()
    publisher = Publisher(trained, tmp_path, stream=(0, 2))
    for version in (1, 2, 3):
        publisher.publish(version)
    (told,) = (text for text in caplog.messages if "nobody else publishes into" in text)
    assert "all must publish into one store that all of them reach" in told
    with pytest.raises(NoVersionError, match=r"of version 3 there are 1 of 2 parts\. All 2 publishers must"):
        Subscriber(blank(trained), tmp_path).update()
    other = Publisher(trained, tmp_path, stream=(1, 2))
    for version in (1, 2, 3):
        other.publish(version)
    assert sum("nobody else publishes into" in text for text in caplog.messages) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"stream": (2, 2)}, r"stream must be \(k, n\) with 0 <= k < n, got \(2, 2\)"),
        ({"keep": 0}, "keep must be >= 1, got 0"),
        ({"anchor_every": 0}, "anchor_every must be >= 1, or None, got 0"),
        ({"skips": -0.1}, "skips must be >= 0 and finite, got -0.1"),
        ({"skips": math.inf}, "skips must be >= 0 and finite, got inf"),
        ({"key": b"short"}, "key must have at least 16 bytes, got 5"),
        ({"dtype": torch.float8_e4m3fn}, "dtype must be torch.bfloat16, torch.float16 or torch.float32 for"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Publisher(model(), tmp_path, **arguments)  # pyright: ignore[reportArgumentType]


def test_versions_only_grow(tmp_path: Path) -> None:
    publisher = Publisher(model(), tmp_path)
    publisher.publish(5)
    with pytest.raises(ValueError, match="version must be > 5, which is published, got 5"):
        publisher.publish(5)
    assert publisher.publish().version == 6


def test_an_optimizers_topology_says_who_publishes_what_and_may_not_change(tmp_path: Path) -> None:
    topology: Any = SimpleNamespace(site=1, num_sites=2, rank_in_site=2, ranks_per_site=3)
    publisher = Publisher(model(), tmp_path, stream=topology)
    assert (publisher.stream.index, publisher.stream.count) == (5, 6)
    publisher.publish(1)
    topology.num_sites = 1
    with pytest.raises(
        ValueError, match=r"were 2 sites, .* others: .* let one publish, by stream=\(rank_in_site"
    ):
        publisher.publish(2)
    topology.num_sites = 2
    assert "could not be published" in publisher.publish(2).reason
