"""Frames that no encoder wrote: they are refused, or read as entries that are valid; nothing else happens.

More cases than the suite runs, for an hour of doubt:
`LOCO_FUZZ_CASES=50000000 python -m pytest --check tests/unit/kernels/test_tight_hostile.py -k fuzz`
"""

import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import builds, same_bits
from sanitizing import fuzz
from selection import HOSTILE, MEMORY
from tight_cases import case
from torch import Tensor

from loco.kernels import Entries, Gate, Known, MalformedError, reference_entries, reference_tight
from loco.kernels.cpu import library

CASES = int(os.environ.get("LOCO_FUZZ_CASES") or 1_200_000)  # in `make check`, by all builds
FEW = 50_000  # in `make test`, by one that is compiled in a hurry
FUZZER = Path(__file__).with_name("fuzz_tight.c")
HOMES = [pytest.param(reference_tight, id="reference"), *builds()]
COMPILED = [param.values[0] for param in HOMES[1:] if param.values[0] is not None]

Unpack = Callable[[Tensor, int, Known], Entries]


def outcome(unpack: Unpack, body: bytes | Tensor, count: int, known: Known) -> Entries | None:
    """Valid entries, or None for a MalformedError."""
    if not isinstance(body, Tensor):
        body = torch.from_numpy(np.frombuffer(body, dtype=np.uint8).copy())
    try:
        entries = unpack(body, count, known)
    except MalformedError:
        return None
    assert entries.starts is not None
    assert entries.offsets is not None
    assert entries.values.numel() == count
    if count:
        written = reference_entries.write_blocks(entries, 0)
        same_bits(reference_entries.read_blocks(written, count, known.numel), entries)
    else:
        same_bits([entries.starts], [Entries.none(known.numel, entries.starts.device).starts])
    return entries


def all_agree(body: bytes, count: int, known: Known) -> bool:
    """-> whether every home reads the same entries; else every home refuses"""
    expected = outcome(reference_tight.unpack, body, count, known)
    for home in COMPILED:
        got = outcome(home.unpack, body, count, known)
        assert (got is None) == (expected is None)
        same_bits(got or (), expected or ())
    return expected is not None


def small(n: int = 60, **how: Any) -> tuple[bytes, int, Known]:
    entries, known = case(n, 0.3, values="half ulps", **how)
    frame = reference_tight.pack(entries, known)
    return frame.numpy().tobytes(), entries.values.numel(), known


@pytest.mark.parametrize("momentum", [True, False], ids=["momentum", "plain"])
def test_every_truncation_is_refused(momentum: bool) -> None:
    frame, count, known = small(momentum=momentum)
    assert all_agree(frame, count, known)
    for size in range(len(frame)):
        assert not all_agree(frame[:size], count, known)
    assert not all_agree(frame + b"\0", count, known)


@pytest.mark.parametrize("values", ["half ulps", "floats"])
def test_every_flipped_bit_ends_well(values: str) -> None:
    entries, known = case(40, 0.3, values=values)
    frame = reference_tight.pack(entries, known).numpy()
    count, accepted = entries.values.numel(), 0
    for bit in range(8 * len(frame)):
        damaged = frame.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        accepted += all_agree(damaged.tobytes(), count, known)
    assert 0 < accepted < 4 * len(frame)  # a bit of a value is as good as another


def test_mutated_spliced_and_random_bytes_end_well() -> None:
    draw = random.Random(0)
    samples = [small(n, momentum=n % 2 == 0, seed=n) for n in (1, 30, 61, 90, 300)]
    for _ in range(400):
        frame, count, known = draw.choice(samples)
        other = draw.choice(samples)[0]
        raw, cut = bytearray(frame), draw.randrange(len(frame))
        match draw.randrange(4):
            case 0:
                raw[cut : cut + 4] = draw.randbytes(4)
            case 1:
                raw[cut:] = other[draw.randrange(len(other)) :]
            case 2:
                raw[cut:] = draw.randbytes(len(raw) - cut)
            case _:
                raw[draw.randrange(20)] = draw.randrange(256)
        all_agree(bytes(raw), count, known)


@pytest.mark.parametrize("home", HOMES)
def test_another_count_is_refused(home: Any) -> None:
    frame, count, known = small()
    for wrong in (-1, 0, 1, count - 1, count + 1, known.anchor.numel(), known.anchor.numel() + 1, 1 << 40):
        assert outcome(home.unpack, frame, wrong, known) is None
    assert outcome(home.unpack, b"", count, known) is None
    assert outcome(home.unpack, b"", 0, known) is not None


@pytest.mark.parametrize("home", HOMES)
def test_another_models_weights_end_well(home: Any) -> None:
    frame, count, known = small(300)
    for theta in ("model", "odd", "on a border"):
        _, others = case(300, 0.0, theta=theta, seed=9)
        outcome(home.unpack, frame, count, others)
        outcome(home.unpack, frame, count, Known(others.anchor, known.momentum, others.gate))
    shorter = Known(known.anchor[:-1], None if known.momentum is None else known.momentum[:-1], known.gate)
    outcome(home.unpack, frame, count, shorter)


@pytest.mark.parametrize("home", HOMES)
def test_a_frame_that_needs_a_momentum_says_so(home: Any) -> None:
    frame, count, known = small()
    body = torch.tensor(list(frame), dtype=torch.uint8)
    with pytest.raises(MalformedError, match="outer momentum, which there is not"):
        home.unpack(body, count, Known(known.anchor, None, known.gate))


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_is_refused(home: Any, value: float) -> None:
    entries, known = case(300, 0.3)
    entries.values[7] = value
    body = reference_tight.pack(entries, known)
    with pytest.raises(MalformedError, match="infinite or NaN"):
        home.unpack(body, entries.values.numel(), known)


@pytest.mark.parametrize("home", HOMES)
def test_a_value_that_another_models_exponents_make_infinite_is_refused(home: Any) -> None:
    """The same mantissas, 2^140 times as large, and a head that says so."""
    anchor = torch.full((9,), 1.1 * 2.0**-30)
    entries = Entries.at(torch.arange(9), anchor * 2.0**20, 9)
    raw = reference_tight.pack(entries, Known(anchor, None, Gate()))
    head = struct.unpack_from("<2h", raw.numpy().tobytes(), 12)
    raw[12:16] = torch.tensor(list(struct.pack("<2h", *(x + 140 for x in head))), dtype=torch.uint8)
    with pytest.raises(MalformedError, match="infinite or NaN"):
        home.unpack(raw, 9, Known(anchor * 2.0**70 * 2.0**70, None, Gate()))


@pytest.mark.parametrize("home", HOMES)
def test_an_entry_of_a_level_without_symbols_is_refused(home: Any) -> None:
    frame, count, known = small()
    contexts = 2 * reference_tight.PLACES  # of few entries: one level, two pulls
    used = 2 * sum(byte.bit_count() for byte in frame[20 : 20 + contexts // 8])
    table = 20 + contexts // 8 + used
    symbols = sum(byte.bit_count() for byte in frame[table : table + 15])
    without = frame[:table] + bytes(15) + frame[table + 15 + 2 * symbols :]
    with pytest.raises(MalformedError, match="a level that has no symbols"):
        home.unpack(torch.tensor(list(without), dtype=torch.uint8), count, known)


BOUNDED = """
import resource, torch
from loco.kernels import BLOCK, Gate, Known, MalformedError, cpu

n = 1 << 24
anchor = torch.full((n,), 0.02)
home = cpu.best()
frame = torch.tensor(list(bytes.fromhex(input())), dtype=torch.uint8)
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
torch.zeros(1 << 22)  # the peak is now what this process holds
before = used()
for count in (1, 1000, n):
    try:
        home.unpack(frame, count, Known(anchor, None, Gate()))
    except MalformedError:
        pass
print(used() - before)
"""


@pytest.mark.check(MEMORY)
def test_a_frame_that_promises_much_takes_no_more_memory_than_it_has_entries() -> None:
    """A few hundred bytes that name as many entries as there are elements: 80 MB that are not taken."""
    if not COMPILED:
        pytest.skip("no C compiler")
    entries, known = case(60, 0.3, momentum=False)
    raw = reference_tight.pack(entries, known).numpy().tobytes()
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED], input=raw.hex(), capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 8 << 20


VARIANTS = library.builds_for_this_cpu()


@pytest.mark.parametrize(
    ("variant", "cases", "more"),
    [
        pytest.param(VARIANTS[-1], FEW, ("-O0",), id="few"),
        *(
            pytest.param(name, -(-CASES // len(VARIANTS)), (), id=name, marks=pytest.mark.check(HOSTILE))
            for name in VARIANTS
        ),
    ],
)
def test_fuzzed_frames_and_counts_end_well_under_the_sanitizers(
    tmp_path: Path, variant: str, cases: int, more: tuple[str, ...]
) -> None:
    (unpacked, checked), what = fuzz(
        FUZZER, tmp_path, variant, cases, more, kernels=("pack.c", "unpack.c", "entries.c")
    )
    assert unpacked > cases // 50, what  # damage that goes deep
    assert checked > cases // 50, what
