"""The tight code is lossless, costs what docs/benchmarks.md says, and is the same bytes in every home."""

from collections.abc import Iterator

import numpy as np
import pytest
import tight_cases
import torch
from homes import builds, same_bits
from hypothesis import given
from hypothesis import strategies as st
from selection import ALL_VALUES
from tight_cases import THETAS, VALUES, after_rounds, case

from loco.kernels import BLOCK, Entries, Gate, Known, cpu, reference_tight

BUILDS = [param.values[0] for param in builds() if param.values[0] is not None]
PART = reference_tight.PART
DTYPES = list(reference_tight.FORMATS)
GATES = [Gate(dtype=dtype, gain=gain) for dtype in DTYPES for gain in (1.0, 3.5, 7.0, 0.3)]
MARGINS = [Gate(dtype=dtype, margin=margin) for dtype in DTYPES for margin in (0.25, 1.0)]


@pytest.fixture(autouse=True)
def threads_again() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(entries: Entries, known: Known, *, read_slowly: bool = True) -> torch.Tensor:
    """All homes write the same frame, and read the same entries out of it. -> the frame"""
    expected, only = reference_tight.pack(entries, known), entries.cut(slice(0, known.numel))
    same_bits([reference_tight.pack(entries, known, 64)[64:]], [expected])
    count = only.values.numel()
    assert (expected.numel() == 0) == (count == 0)
    for home in BUILDS:
        same_bits([home.pack(entries, known)], [expected])
        behind = home.pack(entries, known, 64)
        assert behind is not None
        same_bits([behind[64:]], [expected])
        same_bits(home.unpack(expected, count, known), only)
    if read_slowly:
        same_bits(reference_tight.unpack(expected, count, known), only)
    return expected


@pytest.mark.parametrize("momentum", [True, False], ids=["momentum", "plain"])
@pytest.mark.parametrize("density", [0.0, 1e-9, 0.05, 1.0])  # 1e-9: the first and the last
@pytest.mark.parametrize("n", [0, 1, 63, 255, 256, 257, 1003])
def test_every_size_and_density(n: int, density: float, momentum: bool) -> None:
    entries, known = case(n, density, momentum=momentum)
    check(entries, known)


@pytest.mark.check(ALL_VALUES)
@pytest.mark.parametrize("n", [PART - 1, PART, PART + 1, 2 * PART + 300])
def test_sizes_around_a_part(n: int) -> None:
    check(*case(n, 3e-4, momentum=n % 2 == 0, seed=n), read_slowly=n > 2 * PART)


@pytest.mark.check(ALL_VALUES, sample="2048-momentum|32768-plain")
@pytest.mark.parametrize("momentum", [True, False], ids=["momentum", "plain"])
@pytest.mark.parametrize("count", [2047, 2048, 8192, 32768])
def test_the_more_entries_the_more_contexts(count: int, momentum: bool) -> None:
    entries, known = case(count, 1.0, momentum=momentum)
    check(entries, known, read_slowly=count < 8192)


@pytest.mark.check(ALL_VALUES)
def test_the_most_contexts() -> None:
    frame = check(*case(PART + 1000, 0.52, values="sums"), read_slowly=False)
    assert frame[9:11].tolist() == [0, 3]  # all levels, all pulls


@pytest.mark.check(ALL_VALUES, sample=r".*(bfloat16.*gain=1\.0, margin=0\.0.*|bfloat16.*gain=3\.5.*)")
@pytest.mark.parametrize("gate", [*GATES, *MARGINS], ids=str)
@pytest.mark.parametrize("values", VALUES)
def test_any_values_beside_any_weights(gate: Gate, values: str) -> None:
    for seed, theta in enumerate(THETAS):
        check(*case(400, 0.5, theta=theta, values=values, gate=gate, momentum=seed % 2 == 0, seed=seed))


def test_parts_of_larger_vectors() -> None:
    entries, known = case(20_000, 0.1, values="sums")
    for at in (slice(10 * BLOCK, 30 * BLOCK), slice(20 * BLOCK, 20_000)):
        assert entries.part(at).ends[0]
        behind_one_block = slice(at.start - BLOCK, at.stop - BLOCK)
        for part in (known.part(at), known.part(slice(BLOCK, 20_000)).part(behind_one_block)):
            check(entries.part(at), part)


@given(st.data())
def test_any_bits_come_back(data: st.DataObject) -> None:
    n, seed = data.draw(st.integers(1, 1300)), data.draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    anchor, momentum, values = (
        torch.from_numpy(rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)).nan_to_num(1.0)
        for _ in range(3)
    )
    if data.draw(st.booleans()):  # else of any size beside θ
        values = anchor * 2.0 ** data.draw(st.integers(-30, 3))
        values = values.nan_to_num(0.0, posinf=1.0, neginf=-1.0)
    gate = Gate(
        dtype=data.draw(st.sampled_from(DTYPES)),
        gain=data.draw(st.sampled_from([1.0, 1e-9, 0.004, 3.5, 1e9])),
        margin=data.draw(st.sampled_from([0.0, 1e-9, 0.5, 1e9])),
    )
    known = Known(anchor, momentum if data.draw(st.booleans()) else None, gate)
    present = rng.random(n) < data.draw(st.sampled_from([0.01, 0.3, 1.0]))
    where = torch.from_numpy(np.flatnonzero(present))
    check(Entries.at(where, values[where], n), known)


@pytest.mark.parametrize("home", builds())
def test_any_number_of_threads_writes_the_same_bytes(home: cpu.Compiled) -> None:
    entries, known = case(4 * PART + 100, 0.06)
    torch.set_num_threads(1)
    frame = home.pack(entries, known)
    torch.set_num_threads(3)
    same_bits([home.pack(entries, known)], [frame])
    assert frame is not None
    same_bits(home.unpack(frame, entries.values.numel(), known), entries)


@pytest.mark.check(ALL_VALUES)
@pytest.mark.parametrize(("lr", "gain"), [(1e-6, 1.0), (3e-6, 1.0), (1e-6, 7.0)])
def test_an_entry_costs_at_most_2_6_bytes(lr: float, gain: float) -> None:
    if not BUILDS:
        pytest.skip("no C compiler")
    entries, known = after_rounds(BUILDS[-1], 200_000, lr, Gate(gain=gain), rounds=10)
    density = entries.values.numel() / 200_000
    frame = BUILDS[-1].pack(entries, known)
    assert frame is not None
    same_bits(BUILDS[-1].unpack(frame, entries.values.numel(), known), entries)
    assert frame.numel() <= 2.6 * entries.values.numel(), frame.numel() / entries.values.numel()
    if gain == 1:
        assert 0.04 < density < 0.2  # as on real models


@pytest.mark.parametrize("home", builds())
def test_a_part_unlike_all_others_may_find_no_room(home: cpu.Compiled) -> None:
    """Nine parts send everything and the last sends nothing, which the statistics of all make dear."""
    n = 10 * PART
    values = torch.full((9 * PART,), 2.0**-10)
    entries = Entries.at(torch.arange(9 * PART), values, n)
    assert home.pack(entries, Known(torch.full((n,), 0.02), None, Gate())) is None


def test_the_cases_are_what_they_say() -> None:
    """Escapes, zeros, and values that only a coarse step divides do occur."""
    rng = np.random.default_rng(0)
    theta = tight_cases.weights("model", 1000, rng)
    exponents = theta.view(np.uint32) >> 23 & 255

    def multiples(kind: str) -> list[int | None]:
        values = tight_cases.updates(kind, theta, rng)
        return [reference_tight.multiple(float(v), int(e)) for v, e in zip(values, exponents, strict=True)]

    assert None in multiples("floats")
    assert 0 in multiples("sums")
    assert all(m is not None and m % 2**13 == 0 for m in multiples("quantised"))
    assert all(m is not None and m % 2**17 == 0 for m in multiples("BF16 ulps"))
