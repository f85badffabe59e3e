"""A codec that loco does not have: whoever registers it needs to change nothing else."""

import time
from typing import Any

import pytest
import torch
from scripted import Scripted, parameters
from selection import MESSAGES
from sites import run_ranks
from states import Snapshot, assert_same, snapshot
from torch import Tensor

import loco
from loco.errors import WireError
from loco.kernels import Entries, Known
from loco.wire.codecs import CODECS, FAST, SPARSE, TIGHT, Codec, register

NUMEL = 5003


class Plain(Codec):
    """Positions, then values, 4 bytes each. Declines an odd number of entries."""

    id, name, entry_bytes = 9, "plain", 8.0
    fallback = TIGHT

    def encode(self, entries: Entries, known: Known, ahead: int = 0) -> Tensor | None:
        if entries.length % 2:
            return None
        values = entries.values[slice(*entries.ends)]
        parts = (torch.zeros(ahead, dtype=torch.uint8), entries.indices().int(), values)
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts])

    def decode(self, body: Tensor, count: int, known: Known) -> Entries:
        if body.numel() != 8 * count:
            raise WireError(f"{body.numel()} bytes can't hold {count} entries")
        positions = body[: 4 * count].view(torch.int32).long()
        return Entries.at(positions, body[4 * count :].view(torch.float32).clone(), known.numel)

    def most_bytes(self, count: int, numel: int) -> int:
        return 8 * count


def rounds(rank: int, wires: tuple[str, ...], exchange: str) -> tuple[Snapshot, str, set[int]]:
    """-> the state after four rounds, the codec by the report, and the codecs of the frames that came"""
    register(Plain())
    seen, check = set[int](), loco.wire.framing.Framing.check
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loco.wire.framing.LEAST", 512)  # several frames
        patch.setattr("loco.wire.framing.MOST", 512)
        patch.setattr(
            "loco.wire.framing.Framing.check",
            lambda self, header, *args: (seen.add(header.codec), check(self, header, *args))[1],
        )
        optimizer = loco.PulseLoCo(
            Scripted(parameters(5, NUMEL), 5, rank), sync_every=2, wire=wires[rank], exchange=exchange
        )
        for _ in range(8):
            optimizer.step()
    assert optimizer.last_report is not None
    return snapshot(optimizer), optimizer.last_report.wire, seen


@pytest.mark.check(MESSAGES, sample="owner")
@pytest.mark.parametrize("exchange", ["gather", "owner"])
def test_rounds_that_mix_three_codecs_have_the_bits_of_one(exchange: str) -> None:
    alike = run_ranks(3, rounds, ("fast", "fast", "fast"), exchange)
    mixed = run_ranks(3, rounds, ("plain", "tight", "fast"), exchange)
    for rank, ((expected, _, _), (got, wire, seen)) in enumerate(zip(alike, mixed, strict=True)):
        assert_same(expected, got)
        assert wire == ("plain", "tight", "fast")[rank]
        assert (Plain.id in seen) == (rank != 0)
    # Frames with an odd number of entries went by the codec that stands in.
    assert {Plain.id, TIGHT.id} <= mixed[2][2]


def chosen(rank: int, slow: tuple[str, ...]) -> list[str]:
    """The codec of each round between sites that take long to code a frame in some codecs."""
    register(Plain())
    for name in slow:
        kind: Any = type(SPARSE[name])

        def slowly(*args: Any, encode: Any = kind.encode) -> Any:
            time.sleep(0.05)
            return encode(*args)

        kind.encode = slowly
    weight = torch.nn.Parameter(torch.full((20_000,), 0.02))
    optimizer = loco.PulseLoCo(torch.optim.SGD([weight], lr=1.0), sync_every=1, exchange="gather")
    found = []
    for _ in range(14):
        weight.grad = torch.zeros_like(weight)
        weight.grad[rank::20] = 1e-3
        optimizer.step()
        assert optimizer.last_report is not None
        found.append(optimizer.last_report.wire)
    return found


def test_auto_tries_every_registered_codec_and_takes_the_quickest() -> None:
    first, second = run_ranks(2, chosen, ("tight", "fast"))
    assert first == second
    assert {"tight", "fast", "plain"} == set(first)
    assert set(first[11:]) == {"plain"}


def test_a_codec_that_can_not_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("SPARSE", "DENSE", "CODECS"):  # as they were, afterwards
        monkeypatch.setattr(f"loco.wire.codecs.{table}", {**getattr(loco.wire.codecs, table)})
    codec = Plain()
    for changes, message in (
        ({"id": FAST.id}, "id must be from 0 to 255 and new, got 1 for 'plain'"),
        ({"id": 256}, "id must be from 0 to 255 and new, got 256"),
        ({"name": "tight"}, "name must be new, got 'tight'"),
        ({"name": "auto"}, "name must be new, got 'auto'"),
        ({"exact": False}, "'plain' of entries must be exact"),
    ):
        for name, value in changes.items():
            monkeypatch.setattr(codec, name, value)
        with pytest.raises(ValueError, match=message):
            register(codec)
        for name in changes:
            monkeypatch.delattr(codec, name)
    register(codec)
    assert loco.wire.codecs.CODECS[9] is codec
    assert 9 not in CODECS
