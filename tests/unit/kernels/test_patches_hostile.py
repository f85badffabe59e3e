"""Patches that no encoder wrote: they are refused, or read as changes that are valid; nothing else happens.

More cases than the suite runs, for an hour of doubt:
`LOCO_FUZZ_CASES=50000000 python -m pytest --check tests/unit/kernels/test_patches_hostile.py -k fuzz`
"""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import poison
import pytest
import torch
from homes import builds, same_bits
from patch_cases import any_bits, in_pieces, moved, trained
from sanitizing import fuzz
from selection import HOSTILE
from torch import Tensor

from loco.kernels import Changes, MalformedError, reference_patch
from loco.kernels.cpu import library
from loco.kernels.reference_patch import CLASSES, FORMATS, PART, bits_of, split_patch
from loco.kernels.reference_ranked import varint

CASES = int(os.environ.get("LOCO_FUZZ_CASES") or 100_000)  # in `make check`, by each build
FEW = 10_000  # in `make test`, by one that is compiled in a hurry
FUZZER = Path(__file__).with_name("fuzz_patches.c")
COMPILED = [param.values[0].patches for param in builds() if param.values[0] is not None]
HOMES = [reference_patch, *COMPILED]
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in FORMATS]

Unpack = Callable[[Sequence[Tensor], Tensor], Changes]


def outcome(unpack: Unpack, body: bytes, old: Sequence[Tensor]) -> Changes | None:
    """Valid changes, or None for a MalformedError."""
    try:
        changes = unpack(old, torch.from_numpy(np.frombuffer(body, dtype=np.uint8).copy()))
    except MalformedError:
        return None
    numel = sum(piece.numel() for piece in old)
    positions = changes.positions.tolist()
    assert positions == sorted(set(positions))
    assert not positions or 0 <= positions[0] <= positions[-1] < numel
    assert changes.bits.shape == changes.positions.shape
    held = torch.cat([bits_of(piece) for piece in old])
    assert not (held[changes.positions] == changes.bits).any()
    return changes


def all_agree(body: bytes, old: Sequence[Tensor]) -> bool:
    """-> whether every home reads the same changes; else every home refuses"""
    expected = outcome(reference_patch.unpack_patch, body, old)
    for home in COMPILED:
        got = outcome(home.unpack_patch, body, old)
        assert (got is None) == (expected is None)
        same_bits(got or (), expected or ())
    return expected is not None


def a_patch(
    n: int = 60, *, dtype: torch.dtype = torch.bfloat16, density: float = 0.3, seed: int = 0
) -> tuple[bytes, list[Tensor]]:
    """Of a vector of three pieces, some of them empty."""
    rng = np.random.default_rng(seed)
    old = (trained if seed % 2 else any_bits)(n, dtype, rng)
    new = moved(old, density, 8 * FORMATS[dtype].width if seed % 3 else 3, rng)
    body = reference_patch.pack_patch([old], reference_patch.find_changes([old], [new]))
    return body.numpy().tobytes(), in_pieces(old, (0, n // 3))


def of_parts(*parts: bytes) -> bytes:
    return b"".join([*(len(part).to_bytes(4, "little") for part in parts), *parts])


def part(counts: Sequence[int], coded: bytes = b"", low: int = 0) -> bytes:
    """One part's body that changes so many weights of the first classes."""
    whole = [*counts, *[0] * (CLASSES - len(counts))]
    return bytes([low]) + b"".join(map(varint, whole)) + coded


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_truncation_is_refused(dtype: torch.dtype) -> None:
    body, old = a_patch(dtype=dtype)
    assert all_agree(body, old)
    for size in range(len(body)):
        assert not all_agree(body[:size], old)
    assert not all_agree(body + b"\0", old)


def test_every_truncation_that_says_so_ends_well() -> None:
    """With sizes that add up. What ends inside the coded bytes can be a patch of other changes."""
    body, old = a_patch(100)
    for size in range(len(body) - 4):
        all_agree(of_parts(body[4 : 4 + size]), old)
        assert not all_agree(of_parts(body[4:] + bytes(size + 1)), old)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
def test_every_flipped_bit_ends_well(dtype: torch.dtype) -> None:
    body, old = a_patch(70, dtype=dtype, density=0.2, seed=1)
    accepted = 0
    for bit in range(8 * len(body)):
        damaged = bytearray(body)
        damaged[bit // 8] ^= 1 << bit % 8
        accepted += all_agree(bytes(damaged), old)
    assert 0 < accepted < 8 * len(body)


def test_mutated_spliced_and_random_bytes_end_well() -> None:
    draw = random.Random(0)
    dtypes = list(FORMATS)
    samples = [
        a_patch(n, dtype=dtypes[k % len(dtypes)], seed=k, density=draw.choice([0.1, 0.5, 1.0]))
        for k, n in enumerate((1, 2, 30, 61, 90, 100, 150, 200, 300, 301, 302, 303))
    ]
    accepted = 0
    for _ in range(300):
        body, old = draw.choice(samples)
        other = draw.choice(samples)[0][4:]
        raw = bytearray(body[4:])
        cut = draw.randrange(len(raw))
        keep = draw.choice([len(raw), draw.randrange(len(raw))])  # an end that lacks can be read as zeros
        match draw.randrange(5):
            case 0:
                raw[cut : cut + 4] = draw.randbytes(4)
            case 1:
                raw[cut:] = other[draw.randrange(len(other)) :]
            case 2:
                raw[cut:] = draw.randbytes(len(raw) - cut)
            case 3:
                raw[draw.randrange(min(17, len(raw)))] = draw.randrange(256)
            case _:
                raw[cut:] = draw.choice([b"\xff", b"\x80", b"\x7f"]) * draw.randrange(1, 20)
        accepted += all_agree(of_parts(bytes(raw[:keep])), old)
    assert 0 < accepted < 100


def test_another_models_weights_end_well() -> None:
    body, old = a_patch(300, seed=1)
    for seed in range(2, 8):
        _, others = a_patch(300, seed=seed)
        all_agree(body, others)
        all_agree(body, [bits_of(piece).view(torch.float16) for piece in others])
    assert not all_agree(body, [])
    for shorter in (in_pieces(torch.cat(old)[:-1], (3,)), [torch.zeros(300, dtype=torch.bfloat16)]):
        all_agree(body, shorter)


def test_any_lowest_field_ends_well() -> None:
    body, old = a_patch(100, seed=1)
    for low in range(256):
        all_agree(body[:4] + bytes([low]) + body[5:], old)


REFUSED = {
    "no changes at all": of_parts(part([0], b"\x80")),
    "only a lowest field": of_parts(b"\0"),
    "fifteen counts": of_parts(part([1])[:-1]),
    "more changes than weights": of_parts(part([10, 10, 10, 11], b"\x80")),
    "a count of four bytes": of_parts(bytes([0, 129, 128, 128, 0, *[0] * 15, 128])),
    "a count with a zero that need not be there": of_parts(bytes([0, 129, 0, *[0] * 15, 128])),
    "a zero that need not be there at the end": of_parts(part([1], b"\xf0\0")),
    "bytes that were not read": of_parts(part([1], b"\x80\x80\x80\x80\x80\x80\x80\x80\x80")),
    "a gap longer than a part": of_parts(part([1])),
    "a number above all others": of_parts(part([1], b"\xff" * 8)),
    "no sizes": b"\0\0\0",
    "a size too large": b"\1\0\0\0",
    "a size larger than memory": b"\xff" * 4 + part([1], b"\xf0"),
    "a second part": of_parts(part([1], b"\xf0"), b""),
    "nothing": b"",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_encoder_writes_is_refused(what: str) -> None:
    old = [torch.zeros(40, dtype=torch.bfloat16)]
    assert all_agree(of_parts(part([1], b"\xf0")), old)  # of which the refused ones are variations
    assert all_agree(bytes(4), old)
    assert not all_agree(REFUSED[what], old)


@pytest.mark.parametrize("low", [0, 200])
def test_a_change_of_a_weight_that_is_not_there_is_refused(low: int) -> None:
    """Of a class that has fewer weights, or none."""
    old = [torch.full((40,), 1.0, dtype=torch.bfloat16)]
    class_ = min(max(127 - low, 0), CLASSES - 1)
    for k in range(CLASSES):
        assert all_agree(of_parts(part([0] * k + [1], b"\xf0", low)), old) == (k == class_)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lowest", [True, False])
def test_a_step_out_of_the_format_is_refused(dtype: torch.dtype, lowest: bool) -> None:
    """The patch that leads to the lowest value or the highest one, for weights that are there already."""
    top = (1 << 8 * FORMATS[dtype].width - 1) - 1
    last = torch.tensor([-1 if lowest else top] * 5).to(bits_of(torch.empty(0, dtype=dtype)).dtype)
    before = (last - 1).view(dtype)
    changes = Changes(torch.tensor([3]), last[:1])
    body = reference_patch.pack_patch([before], changes).numpy().tobytes()
    assert all_agree(body, [before])
    assert not all_agree(body, [last.view(dtype)])


def test_what_the_largest_number_would_say_is_refused_however_long() -> None:
    """As many ones as a decoder reads, which say "no step, one up" for ever: no range ends with them."""
    old = [torch.zeros(20_000, dtype=torch.bfloat16)]
    assert all_agree(of_parts(part([6000], b"\xff" * 7)), old)
    for count in (1, 6000, 20_000):
        for size in (8, 9, 12, 15, 16, 24):
            assert not all_agree(of_parts(part([count], b"\xff" * size)), old)


def test_split_parts_of_a_damaged_patch_are_refused_by_what_reads_them() -> None:
    body, old = a_patch(100)
    whole = torch.tensor(list(of_parts(body[4:-1], b"")), dtype=torch.uint8)
    same_bits([split_patch(whole, PART + 100, PART, PART + 100)], [torch.zeros(4, dtype=torch.uint8)])
    alone = split_patch(whole, PART + 100, 0, PART).numpy().tobytes()
    assert alone == of_parts(body[4:-1])
    all_agree(alone, old)


def memory(field: str) -> int:
    """Bytes of this process, as its status says."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


@pytest.mark.skipif(not COMPILED, reason="no C compiler")
@pytest.mark.skipif(poison.is_wanted(), reason="memory that is poisoned is taken")
@pytest.mark.parametrize("coded", [b"", b"\xf0", b"\xff" * 6, bytes(range(1, 200))])
def test_a_patch_that_promises_much_takes_no_more_memory_than_it_has_changes(coded: bytes) -> None:
    """A kilobyte that names every weight of 2^24 as changed: 400 MB that are not taken."""
    old = torch.zeros(16 * PART, dtype=torch.bfloat16)
    body = of_parts(*[part([PART], coded)] * 16)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what this process holds
    except OSError as error:
        pytest.skip(f"the peak of memory can't be measured here: {error}")
    before = memory("VmRSS")
    assert outcome(COMPILED[-1].unpack_patch, body, [old]) is None
    assert memory("VmHWM") - before < 8 << 20


VARIANTS = library.builds_for_this_cpu()


@pytest.mark.check(HOSTILE)
@pytest.mark.parametrize(
    ("variant", "cases", "more"),
    [
        pytest.param(VARIANTS[0], FEW, ("-O0",), id="few"),
        *(pytest.param(name, CASES, (), id=name, marks=pytest.mark.check(HOSTILE)) for name in VARIANTS),
    ],
)
def test_fuzzed_patches_end_well_under_the_sanitizers(
    tmp_path: Path, variant: str, cases: int, more: tuple[str, ...]
) -> None:
    (counted, unpacked), what = fuzz(FUZZER, tmp_path, variant, cases, more, kernels=("patch_*.c",))
    assert counted > cases // 4, what
    assert unpacked > cases // 10, what  # damage that goes deep
