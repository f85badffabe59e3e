"""Several sites' entries added up, written, and checked: in C as the reference does it, error for error."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from homes import builds, same_bits
from hypothesis import given
from hypothesis import strategies as st
from selection import ALL_VALUES
from torch import Tensor

from loco import kernels
from loco.kernels import Entries, MalformedError, cpu, reference_entries

SIZES = [0, 1, 63, 255, 256, 257, 1003, 64 * 256 + 5, 70_001]
KINDS = ["random", "zeros", "no entries", "all", "one block", "random and a full block"]

homes = pytest.mark.parametrize("home", builds())


@pytest.fixture(autouse=True)
def threads_again() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def some(n: int, kind: str, seed: int) -> Entries:
    rng = np.random.default_rng(seed)
    chances = [0.1, 0.3, 0.0, 1.0, 0.0, 0.1]
    present = rng.random(n) < chances[KINDS.index(kind)]
    if "block" in kind:
        present[n // 2 // 256 * 256 :][:256] = True
    where = torch.from_numpy(np.flatnonzero(present))
    values = rng.standard_normal(len(where)).astype(np.float32)
    if kind == "zeros":  # of both signs, and pairs that cancel
        values = np.sign(values) * (rng.random(len(where)) < 0.5).astype(np.float32)
    return Entries.at(where, torch.tensor(values.tolist()), n)


@pytest.mark.check(ALL_VALUES, sample=r"(.*-)?\d+-3-.*")
@homes
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n", SIZES)
def test_a_sum_has_the_references_bits(home: cpu.Compiled, n: int, threads: int) -> None:
    torch.set_num_threads(threads)
    for sites in (1, 2, 5):
        for first in range(len(KINDS)):
            given = [some(n, KINDS[(first + i) % len(KINDS)], i) for i in range(sites)]
            same_bits(home.add_up(given, n), reference_entries.add_up(given, n))
            whole = [Entries.whole(torch.randn(n) * (torch.rand(n) > 0.5)) for _ in range(sites)]
            same_bits(home.add_up(whole, n), reference_entries.add_up(whole, n))


@pytest.mark.check(ALL_VALUES, sample=r"(.*-)?\d+-3-.*")
@pytest.mark.pairs
@homes
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("margin", [0.5, 0.3, 8.0])
def test_sums_are_split_as_by_the_reference(home: cpu.Compiled, margin: float, n: int, threads: int) -> None:
    torch.set_num_threads(threads)
    chance = torch.Generator().manual_seed(n)
    anchor = torch.randn(n, generator=chance) * 10.0 ** torch.randint(-42, 38, (n,), generator=chance)
    anchor[::7] = 0.0
    ulps = kernels.reference.ulp(anchor)
    for sites in (1, 2, 3):
        for first in range(len(KINDS)):
            given = [some(n, KINDS[(first + i) % len(KINDS)], i) for i in range(sites)]
            # Multiples of an eighth of an ulp: some sums are the margin itself.
            given = [one._replace(values=(one.values * 8).round() / 8 * ulps[one.indices()]) for one in given]
            for found, expected in zip(
                home.add_and_split(given, anchor, margin),
                reference_entries.add_and_split(given, anchor, margin),
                strict=True,
            ):
                same_bits(found, expected)


@homes
def test_a_sum_of_minus_zeros_is_plus_zero(home: cpu.Compiled) -> None:
    minus = torch.full((300,), -0.0)
    for one in (Entries.whole(minus), Entries.at(torch.arange(300), minus, 300)):
        assert not home.add_up([one, one], 300).values.signbit().any()


@homes
def test_a_sum_may_take_the_place_of_what_is_added(home: cpu.Compiled) -> None:
    for of in (home, reference_entries):
        given = [
            Entries.whole(torch.randn(1003, generator=torch.Generator().manual_seed(k))) for k in range(3)
        ]
        expected = reference_entries.add_up(given, 1003)
        found = of.add_up(given, 1003, given[1].values)
        assert found.values.data_ptr() == given[1].values.data_ptr()
        same_bits(found, expected)


@homes
def test_parts_of_larger_vectors_add_up_too(home: cpu.Compiled) -> None:
    """Their `starts` begin anywhere, each site's somewhere else."""
    n, at = 20_000, slice(10 * 256, 50 * 256)
    given = [some(n, kind, i).part(at) for i, kind in enumerate(("random", "zeros", "random"))]
    assert len({int(e.starts[0]) for e in given if e.starts is not None}) == 3
    got = home.add_up(given, at.stop - at.start)
    same_bits(got, reference_entries.add_up(given, at.stop - at.start))
    for site in given:
        assert set(site.indices().tolist()) <= set(got.indices().tolist())


def test_a_cut_is_placed_where_it_was() -> None:
    n, at = 20_000, slice(10 * 256, 50 * 256)
    whole = some(n, "random", 1)
    placed = whole.cut(at).placed(at, n)
    indices = whole.indices()
    inside = (indices >= at.start) & (indices < at.stop)
    assert torch.equal(placed.indices(), indices[inside])
    assert torch.equal(placed.values, whole.values[inside])


def test_tensors_in_host_memory_go_to_the_compiled_home() -> None:
    if not kernels.packs_fast():
        pytest.skip("no C compiler")
    assert isinstance(kernels._entries_home(torch.zeros(1)), cpu.Compiled)
    assert kernels._entries_home(torch.zeros(1, device="meta")) is reference_entries


@pytest.mark.check(ALL_VALUES, sample=r"(.*-)?\d+-3-.*")
@homes
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n", SIZES)
def test_entries_and_parts_of_them_are_written_as_by_the_reference(
    home: cpu.Compiled, n: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    blocks = -(-n // 256)
    for kind in KINDS:
        entries = some(n, kind, 0)
        for first, last in ((0, blocks), (blocks // 3, blocks), (blocks // 3, blocks // 2), (blocks, blocks)):
            part = entries.part(slice(min(first * 256, n), min(last * 256, n)))
            counts = counts_of(part)
            assert counts.numel() == last - first
            for ahead in (0, 64):
                written = home.write_blocks(part, ahead)
                same_bits([written[ahead:]], [reference_entries.write_blocks(part, ahead)[ahead:]])
            width = 2 if counts.numel() and int(counts.max()) == 256 else 1
            assert written.numel() == 64 + 5 * part.length + width * counts.numel()


def outcome(ops: Any, body: Tensor, k: int, n: int) -> Entries | str:
    try:
        return ops.read_blocks(body, k, n)
    except MalformedError as error:
        return str(error)


def one_outcome(home: cpu.Compiled, body: Tensor, k: int, n: int) -> str:
    """-> the error's words, or none"""
    got, expected = outcome(home, body, k, n), outcome(reference_entries, body, k, n)
    if isinstance(got, str) or isinstance(expected, str):
        assert got == expected
        return str(got)
    same_bits(got, expected)
    return ""


def counts_of(entries: Entries) -> Tensor:
    assert entries.starts is not None
    return entries.starts.diff().to(torch.int16)


def body_of(counts: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
    return torch.cat([part.contiguous().view(torch.uint8) for part in (values, offsets, counts)])


@pytest.mark.check(ALL_VALUES, sample=r"(.*-)?\d+-3-.*")
@homes
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n", SIZES)
def test_what_an_encoder_wrote_is_found_whole(home: cpu.Compiled, n: int, threads: int) -> None:
    torch.set_num_threads(threads)
    for kind in KINDS:
        entries = some(n, kind, 0)
        body = home.write_blocks(entries, 0)
        for ops in (home, reference_entries):
            same_bits(ops.read_blocks(body, entries.length, n), entries)


@homes
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_wrong_is_said_in_the_references_words(home: cpu.Compiled, threads: int) -> None:
    torch.set_num_threads(threads)
    n = 200 * 256 + 7
    entries = some(n, "random and a full block", 0)
    assert entries.offsets is not None
    k, offsets, values = entries.values.numel(), entries.offsets, entries.values
    last = int(counts_of(entries).nonzero()[-1])

    def damaged(x: Tensor, at: int, value: float) -> Tensor:
        x = x.clone()
        x[at] = value
        return x

    counts = counts_of(entries)
    moved = damaged(damaged(counts, 70, int(counts[70]) - 1), 150, int(counts[150]) + 1)
    first_of_70 = int(counts[:70].sum())
    cases = {
        "a block of 256 elements with more entries": (damaged(counts, 3, 257), offsets, values),
        "with more entries than that": (damaged(counts, 199, -1), offsets, values),
        f"{k + 1} positions where": (damaged(counts, 9, int(counts[9]) + 1), offsets, values),
        f"{5 * k + 2 * 201 - 1} bytes can't hold {k} of {n} entries": (counts, offsets[1:], values),
        "wider than needed": (counts.clamp(max=255), offsets, values),
        "not in order": (moved, offsets, values),
        "of a block are not in order": (
            counts,
            damaged(offsets, first_of_70 + 1, int(offsets[first_of_70])),
            values,
        ),
        f"outside a vector of {n} elements": (
            torch.cat([counts[:last], torch.zeros(200 - last, dtype=torch.int16), counts[last:][:1]]),
            damaged(offsets, k - 1, 255),
            values,
        ),
        "is infinite": (counts, offsets, damaged(values, k - 1, float("inf"))),
        "or NaN": (counts, offsets, damaged(values, 5, float("nan"))),
    }
    for words, case in cases.items():
        assert words in one_outcome(home, body_of(*case), k, n)
    too_many = torch.zeros(5 * 257 + 1, dtype=torch.uint8)
    assert one_outcome(home, too_many, 257, 256) == "1286 bytes can't hold 257 of 256 entries"


@homes
@given(st.data())
def test_any_counts_and_offsets_have_one_outcome(home: cpu.Compiled, data: st.DataObject) -> None:
    """Of few different bytes, so that some are entries."""
    n = data.draw(st.integers(0, 1100))
    blocks = -(-n // 256)
    dtype = data.draw(st.sampled_from([torch.uint8, torch.int16]))
    numbers = st.sampled_from([0, 0, 1, 2, 3, 255] + ([256, 300, -1, -32768] if dtype == torch.int16 else []))
    counts = data.draw(st.lists(numbers, min_size=blocks, max_size=blocks))
    k = data.draw(st.sampled_from([max(0, min(sum(counts), 2000)), 0, 3]))
    step = data.draw(st.integers(0, 3))
    offsets = [(i * step + j) % 256 for i, j in enumerate(data.draw(st.lists(st.integers(0, 2), max_size=8)))]
    offsets = torch.tensor((offsets + [i * step % 256 for i in range(2000)])[:k], dtype=torch.uint8)
    values = torch.zeros(k)
    one_outcome(home, body_of(torch.tensor(counts, dtype=dtype), offsets, values), k, n)


@pytest.mark.parametrize("numel", [0, 1, 7, 1000, 1_000_003])
def test_one_infinity_or_nan_is_found_and_large_values_are_none(numel: int) -> None:
    values = torch.full((numel,), 3e38)  # whose sum is infinite
    assert kernels.all_finite(values)
    for k in {0, numel // 2, numel - 1} if numel else ():
        for bad in (float("inf"), -float("inf"), float("nan")):
            values[k] = bad
            assert not kernels.all_finite(values)
            values[-1 - k] = -bad
            assert not kernels.all_finite(values)
            values[k] = values[-1 - k] = 0.0
            assert kernels.all_finite(values)
