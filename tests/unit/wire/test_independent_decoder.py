"""A decoder written from docs/wire.md alone reads the tight codec's frames, whose bytes are pinned."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import independent_decoder
import pytest
import torch
from selection import ALL_VALUES, HOSTILE
from torch import Tensor

from experiments.noise import simulate
from loco import kernels
from loco.kernels import Entries, Gate, Known, MalformedError, reference_tight

SPECIFICATION = Path(__file__).parents[3] / "docs" / "wire.md"
PART = 1 << 18  # elements


def as_floats(bits: Sequence[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def as_bits(x: Tensor) -> list[int]:
    return (x.view(torch.int32).long() & 0xFFFFFFFF).tolist()


def listed(entries: Entries) -> list[tuple[int, int]]:
    return list(zip(entries.indices().tolist(), as_bits(entries.values), strict=True))


def read(frame: bytes, count: int, known: Known) -> list[tuple[int, int]]:
    """By the library."""
    return listed(kernels.unpack(torch.tensor(list(frame), dtype=torch.uint8), count, known))


def read_independently(frame: bytes, count: int, known: Known) -> list[tuple[int, int]]:
    m = None if known.momentum is None else as_bits(known.momentum)
    return independent_decoder.decode(frame, count, as_bits(known.anchor), m)


def check(entries: Entries, known: Known) -> None:
    body = kernels.pack(entries, known)
    assert body is not None
    frame, sent = body.numpy().tobytes(), listed(entries)
    assert read(frame, len(sent), known) == sent
    assert read_independently(frame, len(sent), known) == sent


@pytest.mark.check(ALL_VALUES, sample=r"(63|1003)-momentum")
@pytest.mark.parametrize("outer_momentum", [0.9, 0.0], ids=["momentum", "plain"])
@pytest.mark.parametrize("numel", [1, 63, 256, 1003, 20_000])
def test_frames_of_noise(numel: int, outer_momentum: float) -> None:
    known, sites = simulate(numel, 3e-6, rounds=3, outer_momentum=outer_momentum)
    for entries in (*sites[:2], kernels.add_up(sites, numel)):
        check(entries, known)


@pytest.mark.check(ALL_VALUES)
def test_frames_of_several_parts() -> None:
    known, sites = simulate(2 * PART + 300, 1e-6, rounds=2, sync_every=2)
    check(sites[0], known)


@pytest.mark.parametrize("margin", [0.0, 0.5])
@pytest.mark.parametrize("gain", [1.0, 0.3, 7.0])
@pytest.mark.parametrize("dtype", list(reference_tight.FORMATS), ids=str)
def test_frames_of_any_gate_and_any_values(dtype: torch.dtype, gain: float, margin: float) -> None:
    """Values that no gate would send, zeros of both signs, and what can't be said in ulps."""
    generator = torch.Generator().manual_seed(0)
    n, gate = 600, Gate(dtype=dtype, gain=gain, margin=margin)
    scale = 2.0 ** -torch.randint(0, 140, (n,), generator=generator)
    anchor = torch.randn(n, generator=generator) * scale
    momentum = torch.randn(n, generator=generator) * scale
    where = torch.arange(0, n, 2)
    values = torch.randn(300, generator=generator) * scale[where] * 2.0**-9
    values[::3] = 0.37 * anchor[where][::3]
    values[:2] = torch.tensor([0.0, -0.0])
    values[::5] = as_floats([1, 0x7F7FFFFF, 0x80000000, 0xFF7FFFFF, 0x3F800000])[torch.arange(60) % 5]
    for m in (momentum, None):
        check(Entries.at(where, values, n), Known(anchor, m, gate))


class Golden(NamedTuple):
    """A frame, and all that it is made of."""

    frame: str
    theta: list[int]
    momentum: list[int] | None
    sent: list[tuple[int, int]]

    def known(self) -> Known:
        momentum = None if self.momentum is None else as_floats(self.momentum)
        return Known(as_floats(self.theta), momentum, Gate())

    def entries(self) -> Entries:
        where, values = zip(*self.sent, strict=True)
        return Entries.at(torch.tensor(where), as_floats(values), len(self.theta))


def numbers(count: int, seed: int, low: int, high: int) -> list[int]:
    """FP32 bits of either sign with these exponents, from a generator that no version of anything changes."""
    found, x = [], seed
    for _ in range(count):
        x = (x * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        field = low + (x >> 56) % (high - low)
        found.append((x >> 32 & 0x807FFFFF) | field << 23)
    return found


GOLDEN = {
    "of the specification": Golden(
        "0782000100000000010301006d0072006c00000000008020ffffffff1004000000000000000000000000000008000802"
        "00000000000000010000000c000400010000000c08040001000000000000800000000000000080000000001a",
        [0x3CA48010, 0xBD000000, 0x3C7F7F00, 0x3C9C4000],
        [0x36A7C5AC, 0x35000000, 0xB727C5AC, 0xB5800000],
        [(0, 0x33200000), (2, 0xB4968000)],
    ),
    "escapes": Golden(
        "0782000100000000050200006d007400000000001900005080ff8080ff01ff0101ff0000000010000000000400000000"
        "015605550555050000000000800000000000000000010008000805000000000000000e0000000209b1fe0b0000008406"
        "3c00030000001480080002000000638b6c000600000001000000a338ccccffffdf9f112a",
        numbers(20, 1, 100, 123),
        None,
        [(0, 1), (3, 0x80000000), (4, 0x3DCCCCCD), (10, 0x7F7FFFFF), (19, 0xB4968000)],
    ),
    "two blocks": Golden(
        "078200010000000000030100710079006b0000000008f83fff626e756e6b696b5d6e6c6fffff80ff8080808dff808088"
        "00000000000000000000000000000100102b00000004000000ac0000002cff6663c6d02a00d169101d05800100897956"
        "0f9daf01003436019994290000344ccd36995087b5fd1d88b57706eb3743f4e935f789c836821a79b70be19835041698"
        "b731223b36ffa7c936a5be2535bdeda2b59067edb697ee3635af69153618a911379394cd3601dd11b6d4fa62b744a8b9"
        "362fb9cbb6147226b595229db59bd03a3521189cb77d1258b67abc66b517f7c2b711e386b7871ff337b0964135c24f99"
        "37d06a61b7acc752376e6e1bb7e3c56435c5eaca35c1573eb6850cccb77d5d14b57c586b37aaccb9366bd61bbf69fd13"
        "ebf0a6f57153ab04da",
        numbers(300, 2, 118, 122),
        numbers(300, 3, 106, 112),
        list(zip(range(3, 300, 7), numbers(43, 4, 106, 112), strict=True)),
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frames(name: str) -> None:
    golden = GOLDEN[name]
    entries, known = golden.entries(), golden.known()
    for pack in (kernels.pack, reference_tight.pack):
        body = pack(entries, known)
        assert body is not None
        assert body.numpy().tobytes().hex() == golden.frame
    assert read_independently(bytes.fromhex(golden.frame), len(golden.sent), known) == golden.sent


def test_the_example_of_the_specification_is_golden() -> None:
    text = SPECIFICATION.read_text().partition("### Example\n")[2]
    blocks = [line[4:].partition("   ")[0] for line in text.splitlines() if line.startswith("    ")]
    assert "".join(blocks).replace(" ", "") == GOLDEN["of the specification"].frame


@pytest.mark.check(HOSTILE, sample="of the specification")
@pytest.mark.parametrize("name", GOLDEN)
def test_both_decoders_refuse_the_same_frames(name: str) -> None:
    """Bits turned, and every length cut: both see a fault, or both read the same other entries."""
    golden = GOLDEN[name]
    frame, known, count = bytes.fromhex(golden.frame), golden.known(), len(golden.sent)
    damaged = [frame[:size] for size in range(len(frame))] + [frame + b"\0"]
    for bit in range(0, 8 * len(frame), 1 if len(frame) < 100 else 5):
        turned = bytearray(frame)
        turned[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(turned))
    refused = 0
    for body in damaged:
        try:
            found = read(body, count, known)
        except MalformedError:
            refused += 1
            with pytest.raises(ValueError, match=", got "):
                read_independently(body, count, known)
        else:
            assert read_independently(body, count, known) == found
    assert refused > len(frame)
