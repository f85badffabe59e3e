"""What takes long says how far it is: the first anchor, a checkpoint, weights that are published or read."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_store import MemoryStore
from sites import run_ranks
from torch import nn

import loco
from loco import logs
from loco.checkpoints import formats
from loco.net.transport import Transport
from loco.sync import Publisher, Subscriber

LATE = 0.3  # seconds that each piece takes


def slow(do: Callable[..., Any]) -> Callable[..., Any]:
    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(LATE)
        return do(*args, **kwargs)

    return slowly


def told(records: list[str], *texts: str) -> bool:
    return any(all(text in record for text in texts) for record in records)


class Keeps(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def says_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "SAY_SOON", 0.1)
    monkeypatch.setattr(logs, "REMIND_EVERY", 0.1)


def starting(rank: int, folder: str) -> list[str]:
    keeps = Keeps()
    logging.getLogger("loco").addHandler(keeps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "SAY_SOON", 0.1)
        patch.setattr(logs, "REMIND_EVERY", 0.1)
        patch.setattr("loco.net.transport.CHUNK", 1 << 18)
        patch.setattr(Transport, "post", slow(Transport.post))
        inner = torch.optim.AdamW(nn.Linear(1024, 1024).parameters())
        optimizer = loco.PulseLoCo(inner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "SAY_SOON", 0.1)
        patch.setattr(formats.torch, "save", slow(torch.save))
        loco.Checkpoints(folder).save(optimizer, blocking=True)
    return keeps.texts


def test_the_first_anchor_and_a_checkpoint_say_how_far_they_are(tmp_path: Path) -> None:
    for texts in run_ranks(2, starting, str(tmp_path)):
        assert told(texts, "first anchor: ", " of 4.2 MB at", "s left"), texts
        assert told(texts, "writing ", "of 16.8 MB"), texts  # θ, m, e and the weights


class SlowStore(MemoryStore):
    def write_chunks(self, path: str, chunks: Any) -> None:
        super().write_chunks(path, map(slow(lambda chunk: chunk), chunks))

    def read_chunks(self, path: str) -> Iterator[bytes]:
        return map(slow(lambda chunk: chunk), super().read_chunks(path))


@pytest.mark.usefixtures("says_soon")
def test_published_and_read_weights_say_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = SlowStore()
    for module in ("publisher", "subscriber"):
        monkeypatch.setattr(f"loco.sync.{module}.open_store", lambda *_: store)
    weights = {"weight": torch.randn(1 << 16)}
    Publisher(weights, "memory").publish()
    assert told(caplog.messages, "writing weights/", " MB at "), caplog.messages
    Subscriber({"weight": torch.zeros(1 << 16, dtype=torch.bfloat16)}, "memory").update()
    assert told(caplog.messages, "reading weights/", " of 0.1 MB"), caplog.messages
