"""Waits that last say what for: every minute, and soon where somebody may have to mend something."""

import gc
import logging
import re
import threading
import time
from contextlib import suppress
from queue import SimpleQueue

import pytest
from interruption import Interruption

from loco import logs
from loco.logs import Progress, Waiting


class Heard(logging.Handler):
    """What a logger was told, as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = SimpleQueue[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.put(record.getMessage())


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def logger(heard: Heard) -> logging.Logger:
    logger = logging.Logger("waits")
    logger.addHandler(heard)
    return logger


def threads() -> int:
    return sum(thread.name == "loco tells of waits" for thread in threading.enumerate())


def test_a_wait_says_again_and_again_what_is_still_waited_for(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger, heard: Heard
) -> None:
    monkeypatch.setattr(logs, "REMIND_EVERY", 0.05)
    missing = ["b", "c"]
    with Waiting(logger, lambda: ", ".join(missing)):
        assert heard.texts.get(timeout=20.0) == "still waiting after 0 s: b, c"
        missing.remove("b")
        while heard.texts.get(timeout=20.0).endswith(": b, c"):
            pass
        assert heard.texts.get(timeout=20.0).endswith("s: c")


def test_a_short_wait_says_nothing_and_no_thread_is_left(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger, heard: Heard
) -> None:
    monkeypatch.setattr(logs, "REMIND_EVERY", 0.3)
    for _ in range(100):
        with Waiting(logger, lambda: "a"):
            pass
    assert threads() <= 1
    deadline = time.monotonic() + 20.0
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (threads(), heard.texts.qsize()) == (0, 0)


def test_a_wait_that_is_to_be_told_of_soon_does_not_wait_for_others(
    logger: logging.Logger, heard: Heard
) -> None:
    with Waiting(logger, lambda: "long"), Waiting(logger, lambda: "soon", first=0.05):
        assert heard.texts.get(timeout=20.0).endswith("s: soon")
    assert heard.texts.qsize() == 0


def test_a_transfer_says_how_far_it_is_and_how_long_the_rest_takes(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger, heard: Heard
) -> None:
    monkeypatch.setattr(logs, "SAY_SOON", 0.0)
    monkeypatch.setattr(logs, "REMIND_EVERY", 0.05)
    with Progress(logger, "reading", 8_000_000) as progress:
        assert heard.texts.get(timeout=20.0) == "still waiting after 0 s: reading: 0.0 of 8.0 MB"
        progress.add(2_000_000)
        time.sleep(0.3)
        while not (told := heard.texts.get(timeout=20.0)).endswith("left"):
            pass
    found = re.fullmatch(r"still .* s: reading: 2\.0 of 8\.0 MB at ([\d.]+) MB/s, about (\d+) s left", told)
    assert found is not None, told
    assert float(found[2]) == pytest.approx(6.0 / float(found[1]), abs=1.0)  # both are rounded


def test_a_transfer_of_unknown_size_says_what_is_done(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger, heard: Heard
) -> None:
    monkeypatch.setattr(logs, "SAY_SOON", 0.1)
    with Progress(logger, "writing", None, lambda: 3_000_000):
        assert re.fullmatch(r".* s: writing: 3\.0 MB at [\d.]+ MB/s", heard.texts.get(timeout=20.0))


def test_ctrl_c_at_any_line_of_a_wait_leaves_the_other_waits_alone(logger: logging.Logger) -> None:
    """At Python's own lines, too: a lock that is left locked would hold up every thread that waits next."""

    def waits() -> None:
        with Waiting(logger, lambda: "a"):
            pass

    number, where = 1, "the beginning"
    while where:
        # Not where Python forgets what a WeakSet held, at any time: no interruption comes out of there.
        interruption = Interruption(number, r"loco\.logs|threading|_weakrefset(?!.*_remove$)")
        with suppress(KeyboardInterrupt), interruption:
            waits()
        where = interruption.where
        other = threading.Thread(target=waits, daemon=True)
        other.start()
        other.join(60.0)
        assert not other.is_alive(), where
        number += 1
    assert number > 20
    deadline = time.monotonic() + 60.0
    while threads() and time.monotonic() < deadline:  # a second one may have been begun
        gc.collect()
        logs._clock._sooner.put(None)
        time.sleep(0.01)
