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
    "05"  # element 5: 5 unsent before it
    "00"  # element 6
    "b8843d"  # element 999,999: 999,992 = 0b0111101_0000100_0111000 unsent before it
    "0000803f"  # 1.0
    "000000c0"  # −2.0
    "01000000"  # the smallest denormal
)


def sparse(positions: list[int], values: list[float]) -> Entries:
    return Entries(torch.tensor(positions, dtype=torch.int64), torch.tensor(values, dtype=torch.float32))


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
    sent = sparse(sorted(positions), values[: len(positions)])
    numel = (1 << 21) + 1
    got = receive(*send(sent, numel), numel)
    assert got.indices is not None
    assert sent.indices is not None
    assert torch.equal(got.indices, sent.indices)
    np.testing.assert_array_equal(bits(got.values), bits(sent.values))


@pytest.mark.parametrize("numel", [1, 63, 1003])
@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
def test_a_gap_costs_one_byte_where_entries_lie_close(numel: int, density: float) -> None:
    positions = np.flatnonzero(np.random.default_rng(0).random(numel) < density).tolist()
    header, body = send(sparse(positions, [1.0] * len(positions)), numel)
    gaps = np.diff([-1, *positions]) - 1
    assert body.numel() == 5 * len(positions) + int((gaps > 127).sum())
    assert receive(header, body, numel).values.numel() == len(positions)


def test_positions_beyond_2_31() -> None:
    positions = [0, (1 << 31) - 1, 1 << 31, (1 << 33) + 12345]
    numel = (1 << 33) + 12346
    got = receive(*send(sparse(positions, [1.0, 2.0, 3.0, 4.0]), numel), numel)
    assert got.indices is not None
    assert got.indices.tolist() == positions


def test_golden_payload() -> None:
    header, body = send(sparse([5, 6, 999_999], [1.0, -2.0, 2.0**-149]), 1_000_000)
    assert body.numpy().tobytes() == GOLDEN_BODY
    raw = header.pack()
    assert len(raw) == HEADER_BYTES == 64
    assert raw[:20] == b"LOCO" + bytes([1, 1]) + bytes([2, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    fields = [int.from_bytes(raw[k : k + 8], "little") for k in range(24, 64, 8)]
    checksum = plain_digest(body.numpy().tobytes())
    assert fields == [1_000_000, 3, body.numel(), 0xFEDC_BA98_7654_3210, checksum]
    again = receive(header, body, 1_000_000)
    assert again.values.tolist() == [1.0, -2.0, 2.0**-149]


@pytest.mark.parametrize(
    ("body", "entries", "message"),
    [
        ("0500" + "00" * 4, 1, "2 positions where the header says 1"),
        ("8580" + "00" * 4, 1, "0 positions where the header says 1"),
        ("0080" + "00" * 4, 1, "1 positions where the header says 1"),
        ("8500" + "00" * 4, 1, "written longer than needed"),
        ("80800100" + "00" * 8, 2, "a gap of 3 bytes in a vector of 200 elements"),
        ("c801" + "00" * 4, 1, "outside a vector of 200 elements"),
        ("c60100" + "00" * 8, 2, None),  # elements 198 and 199: the last that fit
        ("c70100" + "00" * 8, 2, "outside a vector of 200 elements"),
        ("00" + "0000807f", 1, "infinite or NaN"),
        ("00" + "0000c0ff", 1, "infinite or NaN"),
        ("", 1, "0 bytes can't hold 1 entries"),
        ("808001" + "00" * 4, 1, "7 bytes can't hold 1 entries"),
        ("00" * 5, 0, "5 bytes can't hold 0 entries"),
        ("00" * 1005, 201, "1005 bytes can't hold 201 entries"),
    ],
)
def test_malformed_bodies_are_refused_by_name(body: str, entries: int, message: str | None) -> None:
    header, _ = send(sparse([], []), 200)
    header, tensor = reseal(header, bytes.fromhex(body), entries=entries)
    if message is None:
        got = receive(header, tensor, 200)
        assert got.indices is not None
        assert got.indices.tolist() == [198, 199]
    else:
        with pytest.raises(WireError, match=message):
            receive(header, tensor, 200)


def test_sums_of_gaps_that_leave_int64_are_refused() -> None:
    """Hundreds of thousands of gaps just below 2^49 add up to more than 2^63."""
    count, numel = 1 << 15, (1 << 49) - 1
    gaps = bytes([0xFF] * 6 + [0x7F]) * count
    header, _ = send(sparse([], []), numel)
    header, tensor = reseal(header, gaps + bytes(4 * count), entries=count)
    with pytest.raises(WireError, match="outside a vector"):
        receive(header, tensor, numel)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 0x58, "starts with b'XOCO'"),
        (4, 2, "wire version 2; this site speaks version 1"),
        (5, 1, "CRC does not match"),
        (6, 1, "CRC does not match"),
        (30, 1, "CRC does not match"),
        (63, 1, "CRC does not match"),
    ],
)
def test_damaged_headers_are_refused_by_name(at: int, value: int, message: str) -> None:
    header, _ = send(sparse([5], [1.0]), 100)
    raw = bytearray(header.pack())
    raw[at] = value ^ (raw[at] if "CRC" in message else 0)
    with pytest.raises(WireError, match=message):
        Header.unpack(bytes(raw))
    with pytest.raises(WireError, match="a header of 63 bytes, not 64"):
        Header.unpack(bytes(raw[:63]))


def test_headers_of_something_else_are_refused_by_name() -> None:
    header, _ = send(sparse([5], [1.0]), 100)
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
    header, body = send(Entries(None, values), 3)
    check_header(header, site=2, numel=3, codec=0)
    np.testing.assert_array_equal(bits(decode_payload(header, body).values), bits(values))
    header, body = send(Entries(None, torch.tensor([1.0, float("inf"), 0.0])), 3)
    with pytest.raises(WireError, match="infinite or NaN"):
        decode_payload(header, body)


def test_every_flipped_bit_of_a_payload_is_noticed() -> None:
    header, body = send(sparse([5, 6, 99], [1.0, -2.0, 3.0]), 100)
    payload = header.pack() + body.numpy().tobytes()
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):  # noqa: PT012
            got = Header.unpack(bytes(damaged[:HEADER_BYTES]))
            check_header(got, site=2, numel=100, codec=1)
            decode_payload(got, torch.tensor(list(damaged[HEADER_BYTES:]), dtype=torch.uint8))


@given(st.binary(max_size=60), st.integers(0, 12))
def test_arbitrary_bodies_decode_to_valid_entries_or_a_named_error(body: bytes, entries: int) -> None:
    header, _ = send(sparse([], []), 100)
    header, tensor = reseal(header, body, entries=entries)
    try:
        got = receive(header, tensor, 100)
    except WireError:
        return
    assert got.indices is not None
    assert (torch.diff(got.indices) > 0).all()
    assert send(got, 100)[1].numpy().tobytes() == body  # only one body says it
