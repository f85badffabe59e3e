"""Subscribers that are interrupted or killed, and weights that somebody else has written into."""

import mmap
import os
import random
import re
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest
import torch
from faulty_store import (
    MemoryStore,
    Weights,
    copied,
    held_of,
    is_same,
    publisher_at,
    step,
    subscriber_at,
    zeros,
)
from published import same_bits
from selection import INTERRUPTIONS
from sites import context

from loco.sync import NotThisVersionError, Publisher, Subscriber


class AtLine:
    """Does something before the `number`-th line of loco.sync and its kernels that this thread comes to, and
    before the `again`-th after that."""

    def __init__(self, number: int, does: Any, again: int = 0) -> None:
        self.left, self._does, self._again = [number, again], does, again
        self.where: list[str] = []

    def __enter__(self) -> "AtLine":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        if not re.match(r"loco\.(sync\.(subscriber|journal|publisher_memory)|kernels)", name):
            return None
        if event == "line" and self.left:
            self.left[0] -= 1
            if self.left[0] == 0:
                self.left.pop(0)
                if self.left == [0]:
                    self.left = []
                self.where.append(f"{name}:{frame.f_lineno}")
                self._does()
        return self._trace


def interrupt() -> None:
    raise KeyboardInterrupt


class Engine:
    """A subscriber of three publishers, some of whose memory lies in no row, and what its versions are."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        trained = {name: torch.randn(40, 9, generator=generator) for name in "abc"}
        store, self.were = MemoryStore(), [Weights()]
        publishers = [publisher_at(store, trained, stream=(k, 3)) for k in range(3)]
        for version in range(1, 4):
            self.were.append(step(trained, generator))
            for publisher in publishers:
                publisher.publish(version)
        self.memory = zeros(trained)
        self.memory["b"] = torch.zeros(9, 40, dtype=torch.bfloat16).t()
        self.subscriber = subscriber_at(store, self.memory)
        self.subscriber.update(1)
        self.subscriber.update(2)

    def check(self) -> None:
        """The weights are one version, and the subscriber says so, or that it does not know."""
        assert any(is_same(self.memory, version) for version in self.were[1:])
        version = self.subscriber.version
        if version is not None:
            same_bits(self.memory, self.were[version])
            self.subscriber.verify()


@pytest.mark.check(INTERRUPTIONS, sample="(update|rollback), once, every 23")
@pytest.mark.parametrize(
    ("what", "twice", "every"),
    [
        pytest.param(what, twice, every, id=f"{what}, {'twice' if twice else 'once'}, every {every}")
        for what in ("update", "rollback")
        for twice, every in ((False, 23), (False, 3), (True, 7))
    ],
)
def test_ctrl_c_at_any_line_leaves_one_version_or_the_other(what: str, twice: bool, every: int) -> None:
    number, found = 1, 0
    rng = random.Random(0)
    while True:
        engine = Engine()
        does = engine.subscriber.update if what == "update" else engine.subscriber.rollback
        at = AtLine(number, interrupt, rng.randrange(1, 60) if twice else 0)
        with at, suppress(KeyboardInterrupt):
            does()
        if len(at.where) < 2 or engine.subscriber.version is not None:
            engine.check()
        engine.subscriber.update()
        same_bits(engine.memory, engine.were[3])
        engine.subscriber.verify()
        if not at.where:
            break
        found += 1
        number += every
    assert found > 5


def test_a_signal_at_any_moment_leaves_one_version_or_the_other() -> None:
    """As Ctrl-C: also between the lines, and in what the kernels and torch do."""
    rng, hits, usual = random.Random(0), 0, []
    for _ in range(5):
        engine, began = Engine(), time.perf_counter()
        engine.subscriber.update()
        engine.subscriber.rollback()
        usual.append(time.perf_counter() - began)
    for _ in range(40):
        engine, came = Engine(), False

        def raises(*_: object) -> None:
            nonlocal came
            came = True
            raise KeyboardInterrupt

        previous = signal.signal(signal.SIGALRM, raises)
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2 * median(usual)))
            began = time.perf_counter()
            engine.subscriber.update()
            engine.subscriber.rollback()
            usual.append(time.perf_counter() - began)  # the first ones may have met a busy machine
            hits -= 1
            while not came:
                pass
        except KeyboardInterrupt:
            hits += 1
        finally:
            signal.signal(signal.SIGALRM, previous)
        engine.check()
        engine.subscriber.update()
        same_bits(engine.memory, engine.were[3])
    assert hits > 5


# ---- killed ----


def mapped(path: Path, like: Weights) -> Weights:
    """Tensors in a file that processes share."""
    size = sum(tensor.nbytes for tensor in like.values())
    if not path.exists():
        path.write_bytes(bytes(size))
    with open(path, "r+b") as file:
        whole = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.bfloat16)
    parts = whole.split([tensor.numel() for tensor in like.values()])
    return {name: part.view(like[name].shape) for name, part in zip(like, parts, strict=True)}


def update_until_killed(memory: str, folder: str, like: Weights, number: int, done: Connection) -> None:
    """SIGKILL comes at the `number`-th line, and half way through what the kernel writes."""
    subscriber = Subscriber(mapped(Path(memory), like), folder)
    prepared = subscriber.prepare()

    def die() -> None:
        half = prepared.parts[0].changes
        if half and number % 2:
            for format, changes in half:
                memory = prepared.parts[0].memory
                memory.swap_bits(format, type(changes)(changes.positions[::2], changes.bits[::2].clone()))
        os.kill(os.getpid(), signal.SIGKILL)

    with AtLine(number, die):
        subscriber.apply(prepared)
    done.send("done")


@pytest.mark.check(INTERRUPTIONS, sample="from a version-every 71")
@pytest.mark.parametrize("every", [71, 11], ids=lambda every: f"every {every}")
@pytest.mark.parametrize("is_known", [True, False], ids=["from a version", "from nothing"])
def test_a_subscriber_killed_while_it_writes_is_found_out_by_the_next_one(
    tmp_path: Path, every: int, is_known: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    trained = {name: torch.randn(40, 9, generator=generator) for name in "abc"}
    folder = tmp_path / "store"
    publisher = Publisher(trained, folder)
    were = []
    for _ in range(2):
        were.append(step(trained, generator))
        publisher.publish()
    number, ends, torn = 1, [], 0
    while 0 not in ends:
        memory = mapped(tmp_path / "memory", were[0])
        for name, tensor in memory.items():
            tensor.copy_(were[0][name] if is_known else torch.full_like(tensor, 3))
        receiver, sender = context.Pipe()
        worker = context.Process(
            target=update_until_killed, args=(str(tmp_path / "memory"), str(folder), were[0], number, sender)
        )
        worker.start()
        worker.join()
        ends.append(worker.exitcode)
        assert worker.exitcode != 0 or receiver.recv() == "done"
        torn += not any(is_same(memory, version) for version in were)
        again = Subscriber(memory, folder)
        again.update()
        same_bits(memory, were[1])
        again.verify()
        number += every
    assert set(ends) == {0, -signal.SIGKILL}
    assert torn > 0


# ---- written into ----


@pytest.mark.parametrize("share", [1e-2, 0.3])
def test_weights_that_were_written_into_are_told_and_no_file_is_blamed(share: float) -> None:
    """A patch that then led elsewhere was taken for damaged, and never read again."""
    generator = torch.Generator().manual_seed(0)
    trained = {name: torch.randn(40, 9, generator=generator) for name in "abc"}
    store, found = MemoryStore(), 0
    publisher = publisher_at(store, trained, anchor_every=1000)
    step(trained, generator)
    publisher.publish()
    engine = zeros(trained)
    subscriber = subscriber_at(store, engine)
    subscriber.update()
    for _ in range(12):
        after = step(trained, generator)
        publisher.publish()
        mine = engine["b"].view(torch.int16)
        mine ^= (torch.rand(mine.shape, generator=generator) < share).short() * 0x80
        before = copied(engine)
        try:
            subscriber.update()
        except NotThisVersionError:
            found += 1
            assert subscriber.version is None
            same_bits(engine, before)
            subscriber.update()
        else:  # none of the elements that the patch changes had been written into
            if not is_same(engine, after):
                with pytest.raises(NotThisVersionError, match="b differ"):
                    subscriber.verify()
                subscriber.update()
        same_bits(engine, after)
        assert not subscriber._reader.avoid
    assert found > 0


def test_weights_that_change_between_prepare_and_apply_are_told() -> None:
    engine = Engine()
    prepared = engine.subscriber.prepare()
    _, changes = prepared.parts[0].changes[0] if prepared.parts[0].changes else (None, None)
    assert changes is not None
    engine.memory["a"].view(-1)[changes.positions[0]] += 1
    with pytest.raises(NotThisVersionError, match="the weights in memory are not version 2: a differ"):
        engine.subscriber.apply(prepared)
    engine.subscriber.update()
    same_bits(engine.memory, engine.were[3])


def test_what_is_prepared_but_not_applied_does_not_confuse_a_rollback() -> None:
    """Tensors in another order, as a new run may have them: the digests of what was held were lost."""
    generator = torch.Generator().manual_seed(0)
    trained = {name: torch.randn(5, 9, generator=generator) for name in "abc"}
    store, source = MemoryStore(), dict(trained)
    publisher = publisher_at(store, source)
    engine = zeros(trained)
    subscriber = subscriber_at(store, engine)
    for _ in range(2):
        step(trained, generator)
        publisher.publish()
        subscriber.update()
    late = subscriber.prepare()
    source = dict(reversed(trained.items()))
    again = publisher_at(store, source)
    after = step(trained, generator)
    again.publish()
    subscriber.prepare()
    subscriber.apply(late)
    subscriber.verify()
    subscriber.update()
    same_bits(engine, after)
    subscriber.verify()
    assert subscriber.rollback() == 2
    subscriber.verify()
    subscriber.update()
    same_bits(engine, held_of(trained))
    subscriber.verify()


def test_a_rollback_after_another_update_was_prepared_holds_what_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    trained = {name: torch.randn(5, 9, generator=generator) for name in "abc"}
    store, engine = MemoryStore(), zeros(trained)
    publisher, subscriber = publisher_at(store, trained), subscriber_at(store, engine)
    for _ in range(2):
        step(trained, generator)
        publisher.publish()
        subscriber.update()
    step(trained, generator)
    publisher_at(store, dict(reversed(trained.items()))).publish()
    subscriber.prepare()
    assert subscriber.rollback() == 1
    subscriber.verify()
