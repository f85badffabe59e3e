"""Payloads: they come back exactly, their bytes are pinned, and nothing malformed is taken for one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import bits
from test_kernels import plain_digest
from torch import Tensor

from loco.errors import WireError
from loco.kernels import Entries
from loco.wire import HEADER_BYTES, Header, Status, check_header, decode_payload, encode_payload

# Site 2 of round 7 sends three of 1,000,000 elements; written by hand from the README's table.
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


def send(entries: Entries, numel: int) -> tuple[Header, Tensor]:
    return encode_payload(entries, site=2, round=7, numel=numel, digest=0xFEDC_BA98_7654_3210)


def receive(header: Header, body: Tensor, numel: int) -> Entries:
    header = Header.unpack(header.pack())
    check_header(header, site=2, numel=numel, codec=1)
    return decode_payload(header, body)


def reseal(header: Header, body: bytes, **changes: int) -> tuple[Header, Tensor]:
    """A payload with an honest checksum and dishonest contents."""
    tensor = torch.tensor(list(body), dtype=torch.uint8)
    return replace(header, body_bytes=len(body), checksum=plain_digest(body), **changes), tensor


@given(
    st.sets(st.integers(0, 1 << 21), max_size=60),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=60, max_size=60),
)
def test_entries_come_back_bit_for_bit(positions: set[int], values: list[float]) -> None:
    numel = (1 << 21) + 1
    sent = sparse(sorted(positions), values[: len(positions)], numel)
    got = receive(*send(sent, numel), numel)
    assert torch.equal(got.indices(), sent.indices())
    np.testing.assert_array_equal(bits(got.values), bits(sent.values))


@pytest.mark.parametrize("numel", [1, 63, 1003])
@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
def test_an_entry_costs_five_bytes_and_a_block_one(numel: int, density: float) -> None:
    positions = np.flatnonzero(np.random.default_rng(0).random(numel) < density).tolist()
    header, body = send(sparse(positions, [1.0] * len(positions), numel), numel)
    full = density == 1 and numel >= 256
    assert body.numel() == 5 * len(positions) + -(-numel // 256) * (2 if full else 1)
    assert receive(header, body, numel).values.numel() == len(positions)


def test_positions_beyond_2_31() -> None:
    positions = [0, (1 << 31) - 1, 1 << 31, (1 << 32) + 12345]
    numel = (1 << 32) + 12346
    got = receive(*send(sparse(positions, [1.0, 2.0, 3.0, 4.0], numel), numel), numel)
    assert got.indices().tolist() == positions


def test_golden_payload() -> None:
    header, body = send(sparse([5, 6, 999_999], [1.0, -2.0, 2.0**-149], 1_000_000), 1_000_000)
    assert body.numpy().tobytes() == GOLDEN_BODY
    raw = header.pack()
    assert len(raw) == HEADER_BYTES == 64
    assert raw[:20] == b"LOCO" + bytes([2, 1]) + bytes([2, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    fields = [int.from_bytes(raw[k : k + 8], "little") for k in range(24, 64, 8)]
    checksum = plain_digest(body.numpy().tobytes())
    assert fields == [1_000_000, 3, body.numel(), 0xFEDC_BA98_7654_3210, checksum]
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
        ("", 1, "0 bytes can't hold 1 entries"),
        (ONE + "05" + "01000000", 1, "9 bytes can't hold 1 entries"),  # wide counts, and no block full
        (ONE + "05" + "01", 1, "6 bytes can't hold 1 entries"),
        ("00" * 5, 0, "5 bytes can't hold 0 entries"),
        ("00" * 1507, 301, "1507 bytes can't hold 301 entries"),
        (ONE * 256 + bytes(range(256)).hex() + "00010000", 256, None),  # a full block
        (ONE * 256 + bytes(range(256)).hex() + "ff000100", 256, "wider than needed"),
        (ONE * 257 + bytes(range(256)).hex() + "00" + "01010000", 257, "256 elements with more entries"),
        (ONE * 257 + bytes(range(256)).hex() + "00" + "0001ffff", 257, "256 elements with more entries"),
        (ONE * 256 + bytes(range(255)).hex() + "fe" + "00010000", 256, "not in order"),
    ],
)
def test_malformed_bodies_are_refused_by_name(body: str, entries: int, message: str | None) -> None:
    """Vectors of 300 elements: a block of 256, and one of 44."""
    header, _ = send(sparse([], [], 300), 300)
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
        (4, 3, "wire version 3; this site speaks version 2"),
        (5, 1, "CRC does not match"),
        (6, 1, "CRC does not match"),
        (30, 1, "CRC does not match"),
        (63, 1, "CRC does not match"),
    ],
)
def test_damaged_headers_are_refused_by_name(at: int, value: int, message: str) -> None:
    header, _ = send(sparse([5], [1.0], 100), 100)
    raw = bytearray(header.pack())
    raw[at] = value ^ (raw[at] if "CRC" in message else 0)
    with pytest.raises(WireError, match=message):
        Header.unpack(bytes(raw))
    with pytest.raises(WireError, match="a header of 63 bytes, not 64"):
        Header.unpack(bytes(raw[:63]))


def test_headers_of_something_else_are_refused_by_name() -> None:
    header, _ = send(sparse([5], [1.0], 100), 100)
    for changed, message in (
        (replace(header, codec=0), "codec 0 where this site sends codec 1"),
        (replace(header, site=3), "a header of site 3 on the link of site 2"),
        (replace(header, numel=101), "a vector of 101 elements, not 100"),
        (replace(header, body_bytes=1 << 50), "bytes can't hold 1 entries"),
        (replace(header, entries=1 << 60), "bytes can't hold"),
    ):
        with pytest.raises(WireError, match=message):
            check_header(Header.unpack(changed.pack()), site=2, numel=100, codec=1)
    assert Header.unpack(replace(header, status=Status.REPLICA, subject=9).pack()).subject == 9
    unknown = replace(header, status=max(Status) + 1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(WireError, match="unknown status"):
        Header.unpack(unknown.pack())


def test_whole_vectors_come_back_and_infinities_do_not() -> None:
    values = torch.tensor([1.0, -0.0, 2.0**-149])
    header, body = send(Entries.whole(values), 3)
    check_header(header, site=2, numel=3, codec=0)
    np.testing.assert_array_equal(bits(decode_payload(header, body).values), bits(values))
    header, body = send(Entries.whole(torch.tensor([1.0, float("inf"), 0.0])), 3)
    with pytest.raises(WireError, match="infinite or NaN"):
        decode_payload(header, body)


def test_every_flipped_bit_of_a_payload_is_noticed() -> None:
    header, body = send(sparse([5, 6, 99], [1.0, -2.0, 3.0], 100), 100)
    payload = header.pack() + body.numpy().tobytes()
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):  # noqa: PT012
            got = Header.unpack(bytes(damaged[:HEADER_BYTES]))
            check_header(got, site=2, numel=100, codec=1)
            decode_payload(got, torch.tensor(list(damaged[HEADER_BYTES:]), dtype=torch.uint8))


@given(
    st.integers(0, 12).flatmap(
        lambda k: st.tuples(st.just(k), st.binary(min_size=5 * k + 1, max_size=5 * k + 1))
    )
)
def test_arbitrary_bodies_decode_to_valid_entries_or_a_named_error(case: tuple[int, bytes]) -> None:
    entries, body = case
    header, _ = send(sparse([], [], 100), 100)
    header, tensor = reseal(header, body, entries=entries)
    try:
        got = receive(header, tensor, 100)
    except WireError:
        return
    assert (torch.diff(got.indices()) > 0).all()
    assert send(got, 100)[1].numpy().tobytes() == body  # only one body says it
