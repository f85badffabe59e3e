"""Records and frames: entries come back exactly, bytes are pinned, and nothing malformed is taken for one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paper import plain_digest
from scripted import bits
from torch import Tensor

from loco.errors import WireError
from loco.kernels import Entries, Gate, Known
from loco.wire.codecs import CODECS, FAST, TIGHT, WHOLE, Codec
from loco.wire.framing import Frame, Framing
from loco.wire.records import RECORD_BYTES, Announcement, FrameHeader, Kind, Record, Status, Vote

DIGEST = 0xFEDC_BA98_7654_3210

# Site 2 of round 7 sends three of 1,000,000 elements in frame 0; written by hand from docs/wire.md.
GOLDEN_BODY = bytes.fromhex(
    "0000803f"  # 1.0
    "000000c0"  # −2.0
    "01000000"  # the smallest denormal
    "0506"  # elements 5 and 6, in block 0
    "3f"  # element 999,999: 3906 · 256 + 63
    "02" + 3905 * "00" + "01"  # how many each of the 3,907 blocks has
)


def sparse(positions: list[int], values: list[float], numel: int) -> Entries:
    where = torch.tensor(positions, dtype=torch.int64)
    return Entries.at(where, torch.tensor(values, dtype=torch.float32), numel)


def framing(numel: int, codec: Codec = FAST, site: int = 2) -> Framing:
    """Of a run of `numel` elements, as site 2 sends them and site 0 receives them."""
    rng = np.random.default_rng(numel)
    anchor, momentum = (
        torch.from_numpy((0.02 * rng.standard_normal(numel)).astype(np.float32)) for _ in "ab"
    )
    return Framing(site, codec, Known(anchor, momentum, Gate()), round=7, digest=DIGEST)


def send(entries: Entries, numel: int, codec: Codec = FAST) -> Frame:
    return framing(numel, codec).seal(entries, slice(0, numel), 0, Kind.ENTRIES)


def receive(header: FrameHeader, body: Tensor, numel: int, codec: Codec = FAST) -> Entries:
    receiver = framing(numel, codec, site=0)
    header = FrameHeader.unpack(header.pack())
    receiver.check(header, 2, slice(0, numel), 0, Kind.ENTRIES)
    entries = receiver.open(header, body, slice(0, numel))
    assert entries is not None
    return entries


def body_of(codec: Codec, values: Tensor, known: Known) -> Tensor:
    body = codec.encode(Entries.whole(values), known)
    assert body is not None
    return body


def reseal(header: FrameHeader, body: bytes, **changes: int) -> tuple[FrameHeader, Tensor]:
    """A frame with an honest checksum and dishonest contents."""
    tensor = torch.tensor(list(body), dtype=torch.uint8)
    return replace(header, body_bytes=len(body), checksum=plain_digest(body), **changes), tensor


@pytest.mark.parametrize("codec", [FAST, TIGHT])
@given(
    st.sets(st.integers(0, 5000), max_size=60),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=60, max_size=60),
)
def test_entries_come_back_bit_for_bit(codec: Codec, positions: set[int], values: list[float]) -> None:
    sent = sparse(sorted(positions), values[: len(positions)], 5001)
    got = receive(*send(sent, 5001, codec)[:2], 5001, codec)
    assert torch.equal(got.indices(), sent.indices())
    np.testing.assert_array_equal(bits(got.values), bits(sent.values))


@pytest.mark.parametrize("numel", [1, 63, 1003])
@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
def test_a_fast_entry_costs_five_bytes_and_a_block_one(numel: int, density: float) -> None:
    positions = np.flatnonzero(np.random.default_rng(0).random(numel) < density).tolist()
    header, body, _ = send(sparse(positions, [1.0] * len(positions), numel), numel)
    full = density == 1 and numel >= 256
    assert body.numel() == 5 * len(positions) + -(-numel // 256) * (2 if full else 1)
    assert receive(header, body, numel).values.numel() == len(positions)


def test_golden_frame() -> None:
    header, body, _ = send(sparse([5, 6, 999_999], [1.0, -2.0, 2.0**-149], 1_000_000), 1_000_000)
    assert body.numpy().tobytes() == GOLDEN_BODY
    raw = header.pack()
    assert len(raw) == RECORD_BYTES == 64
    assert raw[:12] == b"LOCO" + bytes([11, 3]) + bytes([2, 0, 7, 0, 0, 0])
    assert raw[16:24] == bytes([1, 0, 0, 0, 0, 0, 0, 0])
    fields = [int.from_bytes(raw[k : k + 8], "little") for k in range(24, 64, 8)]
    checksum = plain_digest(body.numpy().tobytes())
    assert fields == [1_000_000, 3, body.numel(), DIGEST, checksum]
    again = receive(header, body, 1_000_000)
    assert again.values.tolist() == [1.0, -2.0, 2.0**-149]


ONE, TWO, INF, NAN = "0000803f", "00000040", "0000807f", "0000c0ff"


@pytest.mark.parametrize(
    ("body", "entries", "message"),
    [
        (ONE + "05" + "0000", 1, "0 positions where the header says 1"),
        (ONE + "05" + "0101", 1, "2 positions where the header says 1"),
        (ONE + TWO + "0505" + "0200", 2, "positions of a block are not in order"),
        (ONE + TWO + "0504" + "0200", 2, "positions of a block are not in order"),
        (ONE + TWO + "0504" + "0101", 2, None),
        (ONE + TWO + "ff2b" + "0101", 2, None),  # elements 255 and 299: the last of each block
        (ONE + TWO + "ff2c" + "0101", 2, "outside a vector of 300 elements"),
        (ONE + "ff" + "0001", 1, "outside a vector of 300 elements"),
        (INF + "00" + "0100", 1, "infinite or NaN"),
        (NAN + "00" + "0100", 1, "infinite or NaN"),
        ("", 1, "0 bytes can't hold 1 of 300 entries"),
        (ONE + "05" + "01000000", 1, "wider than needed"),  # wide counts, and no block full
        (ONE + "05" + "01", 1, "6 bytes can't hold 1 of 300 entries"),
        ("00" * 5, 0, "a frame of 5 bytes for 0 of 300 entries"),
        ("00" * 1507, 301, "a frame of 1507 bytes for 301 of 300 entries"),
        (ONE * 256 + bytes(range(256)).hex() + "00010000", 256, None),  # a full block
        (ONE * 256 + bytes(range(256)).hex() + "ff000100", 256, "wider than needed"),
        (ONE * 257 + bytes(range(256)).hex() + "00" + "01010000", 257, "256 elements with more entries"),
        (ONE * 257 + bytes(range(256)).hex() + "00" + "0001ffff", 257, "256 elements with more entries"),
        (ONE * 256 + bytes(range(255)).hex() + "fe" + "00010000", 256, "not in order"),
    ],
)
def test_malformed_fast_bodies_are_refused_by_name(body: str, entries: int, message: str | None) -> None:
    """Vectors of 300 elements: a block of 256, and one of 44."""
    header, *_ = send(sparse([], [], 300), 300)
    header, tensor = reseal(header, bytes.fromhex(body), entries=entries)
    if message is None:
        assert receive(header, tensor, 300).values.numel() == entries
    else:
        with pytest.raises(WireError, match=message):
            receive(header, tensor, 300)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 0x58, "starts with b'XOCO'"),
        (4, 2, "wire version 2; this site speaks version 11"),
        (5, 1, "CRC does not match"),
        (6, 1, "CRC does not match"),
        (14, 1, "CRC does not match"),
        (30, 1, "CRC does not match"),
        (63, 1, "CRC does not match"),
    ],
)
def test_damaged_headers_are_refused_by_name(at: int, value: int, message: str) -> None:
    header, *_ = send(sparse([5], [1.0], 100), 100)
    raw = bytearray(header.pack())
    raw[at] = value ^ (raw[at] if "CRC" in message else 0)
    with pytest.raises(WireError, match=message):
        FrameHeader.unpack(bytes(raw))
    with pytest.raises(WireError, match="a record of 63 bytes, not 64"):
        FrameHeader.unpack(bytes(raw[:63]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": 0}, "a frame of codec 0"),
        ({"codec": 9}, "a frame of codec 9"),
        ({"site": 3}, "ENTRIES 0 of site 3, round 7"),
        ({"round": 6}, "ENTRIES 0 of site 2, round 6"),  # replayed
        ({"digest": 1}, "θ 0000000000000001 in the place of"),  # of another model
        ({"number": 1}, "ENTRIES 1 of site 2"),
        ({"kind": Kind.SUMS}, "SUMS 0 of site 2"),
        ({"kind": Kind.VOTE}, "kind 2 in the place of entries or slice or sums"),
        ({"numel": 101}, "a frame of 101 elements, not 100"),
        ({"body_bytes": 1 << 50}, "a frame of 1125899906842624 bytes for 1 of 100 entries"),
        ({"entries": 1 << 60}, "of 100 entries"),
        ({"is_missing": True}, "said to be missing, of 6 bytes"),
    ],
)
def test_headers_of_something_else_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    header, body, _ = send(sparse([5], [1.0], 100), 100)
    with pytest.raises(WireError, match=message):
        receive(replace(header, **changes), body, 100)


RECORDS: list[Record] = [
    Announcement(
        site=3, round=9, codec=2, codec_time_ratio=-7, enclosed_bytes=6, norm_bits=5, numel=1 << 40,
        entries=7, payload_bytes=8, sums_bits=9, weight_bits=10, digest=DIGEST,
    ),
    Vote(site=3, round=9, status=Status.REPLICA, subject=1 << 31, numel=1 << 40, entries=5, sent_bytes=3),
    FrameHeader(
        kind=Kind.SUMS, site=3, round=9, number=4, codec=2, is_missing=True, numel=5, entries=6, body_bytes=7,
        digest=DIGEST, checksum=DIGEST - 1,
    ),
]  # fmt: skip


def test_a_record_comes_back_as_it_was_and_is_no_other_kind() -> None:
    for record in RECORDS:
        raw = record.pack()
        assert len(raw) == RECORD_BYTES
        assert type(record).unpack(raw) == record
        for other in RECORDS:
            if other is not record:
                with pytest.raises(WireError, match=f"a record of kind {record.kind:d} in the place of"):
                    type(other).unpack(raw)


def test_unknown_kinds_and_statuses_are_refused() -> None:
    for record in RECORDS:
        for kind in (0, max(Kind) + 1):
            raw = replace(record, kind=kind).pack()  # pyright: ignore[reportArgumentType]
            with pytest.raises(WireError, match=f"a record of kind {kind} in the place of"):
                type(record).unpack(raw)
    raw = Vote(site=3, round=9, status=max(Status) + 1).pack()  # pyright: ignore[reportArgumentType]
    with pytest.raises(WireError, match="a vote of the unknown status 8"):
        Vote.unpack(raw)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_no_body_is_larger_than_its_codec_says(codec: Codec) -> None:
    for numel in (1, 255, 256, 1003):
        for positions in ([], [numel - 1], list(range(numel))):
            values = np.random.default_rng(0).standard_normal(len(positions)).tolist()
            body = codec.encode(sparse(positions, values, numel), framing(numel).known)
            if body is None:
                assert codec is TIGHT  # these are few, or of no pattern
                continue
            assert body.numel() <= codec.most_bytes(len(positions), numel)


def test_whole_vectors_come_back_and_infinities_do_not() -> None:
    values = torch.tensor([1.0, -0.0, 2.0**-149])
    header, body, _ = send(Entries.whole(values), 3, WHOLE)
    np.testing.assert_array_equal(bits(receive(header, body, 3, WHOLE).values), bits(values))
    header, body, _ = send(Entries.whole(torch.tensor([1.0, float("inf"), 0.0])), 3, WHOLE)
    with pytest.raises(WireError, match="infinite or NaN"):
        receive(header, body, 3, WHOLE)


def test_rounding_codecs_round_to_what_they_say() -> None:
    rng = np.random.default_rng(1)
    values = torch.from_numpy((1e-5 * rng.standard_normal(1003)).astype(np.float32))
    known = framing(1003).known
    by_name = {codec.name: codec for codec in CODECS.values()}
    for name, error in (("bfloat16", 2.0**-8), ("int8", 0.5 / 127)):
        codec = by_name[name]
        body = body_of(codec, values, known)
        got = codec.decode(body, 1003, known).values
        largest = values.abs().view(-1) if name == "bfloat16" else values.abs().max()
        # Half a step of the format, and the last bits of computing it.
        assert bool(((got - values).abs() <= 1.0001 * error * largest).all())
        if name == "bfloat16":
            assert torch.equal(body_of(codec, got, known), body)
    zeros = body_of(by_name["int8"], torch.zeros(1003), known)
    assert not by_name["int8"].decode(zeros, 1003, known).values.any()


def test_the_tight_code_gives_way_where_it_is_larger_or_finds_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = sparse([5, 6], [1.0, 2.0], 100)  # whose tables would be longer than they are
    header, body, _ = send(sent, 100, TIGHT)
    assert header.codec == FAST.id
    assert torch.equal(receive(header, body, 100, TIGHT).values, sent.values)
    many = sparse(list(range(100)), 100 * [2.0**-12], 100)
    assert send(many, 100, TIGHT).header.codec == TIGHT.id
    monkeypatch.setattr("loco.kernels.pack", lambda *_: None)
    assert send(many, 100, TIGHT).header.codec == FAST.id


@pytest.mark.parametrize("codec", [FAST, TIGHT])
def test_every_flipped_bit_of_a_frame_is_noticed(codec: Codec) -> None:
    header, body, _ = send(sparse(list(range(100)), 50 * [2.0**-12, -(2.0**-12)], 100), 100, codec)
    assert header.codec == codec.id
    frame = header.pack() + body.numpy().tobytes()
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):  # noqa: PT012
            got = FrameHeader.unpack(bytes(damaged[:RECORD_BYTES]))
            receive(got, torch.tensor(list(damaged[RECORD_BYTES:]), dtype=torch.uint8), 100, codec)


@given(
    st.integers(0, 12).flatmap(
        lambda k: st.tuples(st.just(k), st.binary(min_size=5 * k + 1, max_size=5 * k + 1))
    )
)
def test_arbitrary_fast_bodies_decode_to_valid_entries_or_a_named_error(case: tuple[int, bytes]) -> None:
    entries, body = case
    header, *_ = send(sparse([], [], 100), 100)
    header, tensor = reseal(header, body, entries=entries)
    try:
        got = receive(header, tensor, 100)
    except WireError:
        return
    assert (torch.diff(got.indices()) > 0).all()
    assert send(got, 100)[1].numpy().tobytes() == body  # only one body says it
