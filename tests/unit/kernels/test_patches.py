"""Patches lead from old weights to new ones, bit for bit, in few bytes, which are the same in every home."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from homes import builds, same_bits
from hypothesis import given
from hypothesis import strategies as st
from patch_cases import any_bits, at_order, in_pieces, moved, noisy_step, of_bits, trained
from selection import ALL_VALUES, MEMORY
from torch import Tensor

from loco import kernels
from loco.kernels import Changes, cpu, reference, reference_patch
from loco.kernels.reference_patch import CLASSES, FORMATS, PART, bits_of, ordered, unsigned
from loco.kernels.reserve import reserve

BUILDS = [param.values[0].patches for param in builds() if param.values[0] is not None]
HOMES = [reference_patch, *BUILDS]
MASK = (1 << 64) - 1
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in FORMATS]
IN_FLOAT = [
    pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in (torch.bfloat16, torch.float16)
]


@pytest.fixture(autouse=True)
def threads_again() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# ---- what is asked of all homes ----


def copies(pieces: Sequence[Tensor]) -> list[Tensor]:
    return [bits_of(piece).clone().view(piece.dtype) for piece in pieces]


def check_swap(home: Any, old: Sequence[Tensor], new: Sequence[Tensor], changes: Changes) -> None:
    """The changes make the new weights of the old ones, and a second time the old ones of the new."""
    held, mine = copies(old), Changes(changes.positions, changes.bits.clone())
    for now in (new, old):
        before = [home.digest_bits(piece) for piece in held]
        by = home.swap_bits(held, mine)
        same_bits(held, now)
        after = [reference_patch.digest_bits(piece) for piece in now]
        assert after == [d + change & MASK for d, change in zip(before, by, strict=True)]
    same_bits(mine, changes)


def check(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    *,
    homes: Sequence[Any] = HOMES,
    entries: int | None = None,
    result: Sequence[Tensor] | None = None,
) -> Tensor:
    """All homes find the same changes and write the same patch, which leads to the new weights. -> the patch

    Args:
        result: the new weights in the format of the old ones, if `new` is FP32.
    """
    changes = homes[0].find_changes(old, new)
    body = homes[0].pack_patch(old, changes)
    assert entries is None or changes.positions.numel() == entries
    for home in homes:
        same_bits(home.find_changes(old, new), changes)
        same_bits([home.pack_patch(old, changes)], [body])
        same_bits(home.unpack_patch(old, body), changes)
    check_swap(homes[-1], old, result or new, changes)
    return body


SIZES = [(), (0,), (1, 0, 61), (0, 0, 255, 0, 3, 257)]


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [*SIZES, (70_000, 1, 30_001)])
@pytest.mark.parametrize("shares", [(0.0, 0.5), (0.5, 0.0), (1.0, 1.0), (0.3, 0.3), (0.001, 0.9)])
def test_two_changes_merge_into_the_change_from_the_first_weights_to_the_last(
    dtype: torch.dtype, sizes: tuple[int, ...], shares: tuple[float, float]
) -> None:
    n, rng = sum(sizes), np.random.default_rng(len(sizes))
    weights = [any_bits(n, dtype, rng)]
    for share in shares:  # a quarter of what moves goes back to what it was in the beginning
        fresh = torch.where(torch.from_numpy(rng.random(n) < 0.75), any_bits(n, dtype, rng), weights[0])
        weights.append(torch.where(torch.from_numpy(rng.random(n) < share), fresh, weights[-1]))
    first, second, third = (in_pieces(some, sizes) for some in weights)
    for home in HOMES:
        earlier, later = home.find_changes(first, second), home.find_changes(second, third)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            same_bits(home.merge_changes(first, earlier, later), home.find_changes(first, third))


@pytest.mark.pairs
@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("n", [0, 1, 63, 1003])
@pytest.mark.parametrize("kind", [trained, any_bits], ids=["trained", "any bits"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_format_and_size(
    dtype: torch.dtype, kind: Callable[..., Tensor], n: int, density: float
) -> None:
    rng = np.random.default_rng(n)
    old = kind(n, dtype, rng)
    new = moved(old, density, 8 * FORMATS[dtype].width if kind is any_bits else 3, rng)
    bodies = []
    for sizes in SIZES:
        if sum(sizes) <= n:
            bodies.append(check(in_pieces(old, sizes), in_pieces(new, sizes)))
            same_bits(bodies, bodies[:1] * len(bodies))  # a vector is a vector, in whatever pieces it lies


def test_no_pieces_at_all() -> None:
    for home in HOMES:
        changes = home.find_changes([], [])
        body = home.pack_patch([], changes)
        assert body.numel() == changes.positions.numel() == 0
        same_bits(home.unpack_patch([], body), changes)
        assert home.swap_bits([], changes) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_step_up_to_the_whole_range(dtype: torch.dtype) -> None:
    """From the lowest value and the highest, −NaN and NaN, and from both zeros to every power of two away."""
    width = FORMATS[dtype].width
    half = 1 << 8 * width - 1
    pairs = set[tuple[int, int]]()
    for length in range(8 * width + 1):
        for size in {1 << length, (1 << length) - 1, (3 << length) - 1}:
            pairs |= {(at, at + sign * size) for at in (-half, -1, 0, half - 1) for sign in (1, -1)}
    found = np.array(sorted((a, b) for a, b in pairs if -half <= b < half and a != b))
    assert np.abs(found[:, 1] - found[:, 0]).max() == 2 * half - 1
    rng = np.random.default_rng(0)
    for order in (np.arange(len(found)), rng.permutation(len(found))):
        old, new = (of_bits(at_order(found[order, side], width), dtype) for side in (0, 1))
        check([old], [new], entries=len(found))
        for k in order[:5].tolist():  # alone, a change is at its most expensive
            check([old[k : k + 1]], [new[k : k + 1]], entries=1)


@given(st.data())
def test_any_bits_become_any_others(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(FORMATS)))
    n, seed = data.draw(st.integers(0, 700)), data.draw(st.integers(0, 10**6))
    rng, width = np.random.default_rng(seed), FORMATS[dtype].width
    old = data.draw(st.sampled_from([trained, any_bits]))(n, dtype, rng)
    density = data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    new = moved(old, density, data.draw(st.integers(1, 8 * width)), rng)
    if data.draw(st.booleans()):
        others = torch.from_numpy(rng.random(n) < density)
        bits_of(new)[others] = bits_of(any_bits(n, dtype, rng))[others]
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    sizes = np.diff([0, *cuts]).tolist()
    check(in_pieces(old, sizes), in_pieces(new, sizes))


@given(st.data())
def test_any_few_weights_that_anybody_writes_down(data: st.DataObject) -> None:
    """Shrinks to the smallest example, which a seed does not."""
    dtype = data.draw(st.sampled_from(list(FORMATS)))
    some = st.integers(0, (1 << 8 * FORMATS[dtype].width) - 1)
    pairs = np.array(data.draw(st.lists(st.tuples(some, some), max_size=40)), dtype=np.int64).reshape(-1, 2)
    check([of_bits(pairs[:, 0], dtype)], [of_bits(pairs[:, 1], dtype)])


# ---- parts, threads, large vectors ----


@pytest.mark.check(ALL_VALUES, sample="1048577")
@pytest.mark.parametrize("n", [PART, PART + 1])
def test_sizes_around_a_part(n: int) -> None:
    rng = np.random.default_rng(n)
    old = trained(n, torch.bfloat16, rng)
    new = moved(old, 1e-3, 2, rng)
    bits_of(new)[-1:] ^= 1
    pieces = [in_pieces(some, (1001, 0, 300_000)) for some in (old, new)]
    body = check(*pieces)
    assert (int.from_bytes(body[4:8].numpy().tobytes(), "little") < 24) == (n > PART)  # one change, alone


@pytest.mark.check(ALL_VALUES, sample="bfloat16-0.01")
@pytest.mark.parametrize("density", [1e-6, 0.01, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_writes_the_same_bytes(dtype: torch.dtype, density: float) -> None:
    """In vectors of several parts, which all builds code alike."""
    n, rng = 2 * PART + 70_001, np.random.default_rng(1)
    old = trained(n, dtype, rng)
    new = moved(old, density, 3, rng)
    pieces = [in_pieces(some, (777, PART + 1)) for some in (old, new)]
    bodies = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        bodies += [check(*pieces, homes=BUILDS)] if BUILDS else []
    same_bits(bodies, bodies[:1] * len(bodies))


def test_one_change_in_a_part_of_zeros_and_then_some_in_the_largest_weights() -> None:
    """The mean of the gaps doubles with every class: after a gap of a whole part, to 2^28 and no further."""
    old = torch.zeros(PART, dtype=torch.bfloat16)
    old[:2000] = trained(2000, torch.float32, np.random.default_rng(5)).bfloat16()
    new = old.clone()
    bits_of(new)[[5, 700, 1999, PART - 1]] += 1
    check([old], [new], entries=4)


def test_a_part_without_changes_takes_four_bytes() -> None:
    old = torch.zeros(3 * PART + 5, dtype=torch.uint8)
    new = old.clone()
    new[2 * PART + 7] = 1
    body = check([old], [new], entries=1)
    sizes = body[:16].view(torch.int32).tolist()
    assert sizes == [0, 0, body.numel() - 16, 0]
    assert check([old], [old]).tolist() == [0] * 16


@pytest.mark.check(ALL_VALUES)
def test_some_parts_of_a_patch_are_the_patch_of_these_parts() -> None:
    n, rng = 3 * PART + 1003, np.random.default_rng(2)
    old = trained(n, torch.bfloat16, rng)
    new = moved(old, 1e-4, 2, rng)
    new[PART : 2 * PART] = old[PART : 2 * PART]  # one part is empty
    pack = (BUILDS or HOMES)[-1].pack_patch
    body = pack([old], reference_patch.find_changes([old], [new]))
    for first, last in [(0, n), (0, PART), (PART, 2 * PART), (2 * PART, n), (PART, 3 * PART), (3 * PART, n)]:
        part = pack([old[first:last]], reference_patch.find_changes([old[first:last]], [new[first:last]]))
        same_bits([kernels.split_patch(body, n, first, last)], [part])


@pytest.mark.parametrize("damage", ["cut off", "too long", "no sizes"])
def test_a_patch_whose_sizes_do_not_add_up_is_not_split(damage: str) -> None:
    old = torch.zeros(2 * PART, dtype=torch.uint8)
    new = old.clone()
    new[[1, PART]] = 1
    body = reference_patch.pack_patch([old], reference_patch.find_changes([old], [new]))
    wrong = {"cut off": body[:-1], "too long": torch.cat([body, body[:1]]), "no sizes": body[:7]}[damage]
    with pytest.raises(kernels.MalformedError):
        kernels.split_patch(wrong, 2 * PART, 0, PART)


@pytest.mark.skipif(not BUILDS, reason="no C compiler")
def test_positions_past_2_to_31() -> None:
    """In FP8 weights that are zero, and so take no memory: three changes at the far end of them."""
    n = (1 << 31) + 2 * PART + 11
    old, home = reserve(n, torch.uint8).view(torch.float8_e5m2), BUILDS[-1]
    positions = torch.tensor([(1 << 31) - 1, (1 << 31) + 5, n - 1])
    changes = Changes(positions, torch.tensor([1, 255, 128], dtype=torch.uint8))
    pieces = in_pieces(old, (3, (1 << 31) - 9))
    body = home.pack_patch(pieces, changes)
    same_bits(home.unpack_patch(pieces, body), changes)
    first = n // PART * PART
    small = [old[first:]], Changes(positions[2:] - first, changes.bits[2:])
    same_bits([kernels.split_patch(body, n, first, n)], [reference_patch.pack_patch(*small)])
    fresh, was = changes.bits.clone(), torch.zeros(3, dtype=torch.uint8)
    home.swap_bits(pieces, changes)
    same_bits([bits_of(old)[positions], changes.bits], [fresh, was])
    back = reference_patch.digest_terms(was, positions) - reference_patch.digest_terms(fresh, positions)
    same_bits(home.merge_changes(pieces, changes, Changes(positions, fresh)), (positions[:0], fresh[:0]))
    assert home.swap_bits([old], changes) == [back & MASK]


@pytest.mark.skipif(not BUILDS, reason="no C compiler")
@pytest.mark.check(MEMORY)
def test_changes_are_found_past_2_to_31() -> None:
    n = (1 << 31) + 2 * PART + 11
    try:
        old, new = (reserve(n, torch.uint8) for _ in range(2))
        positions = torch.tensor([0, (1 << 31) - 1, (1 << 31) + 5, n - 1])
        new[positions] = torch.tensor([7, 1, 255, 128], dtype=torch.uint8)
        found = BUILDS[-1].find_changes([old], [new])
    except OSError as error:
        pytest.skip(f"no address space for positions of 2^31 weights: {error}")
    same_bits(found, (positions, new[positions]))
    digest = reference_patch.digest_terms(new[positions], positions)
    digest -= reference_patch.digest_terms(old[positions], positions)
    assert BUILDS[-1].digest_bits(new) - BUILDS[-1].digest_bits(old) & MASK == digest & MASK


# ---- casts ----


@pytest.mark.parametrize("dtype", IN_FLOAT)
def test_fp32_weights_are_cast_before_they_are_compared(dtype: torch.dtype) -> None:
    rng, n = np.random.default_rng(3), 5003
    new = any_bits(n, torch.float32, rng)
    new[:2000] = trained(2000, torch.float32, rng)
    new[2000:2500].view(torch.int32)[:] &= -1 << 12  # ties, of BF16 and of FP16
    new[2000:2500].view(torch.int32)[:] |= 1 << 12
    for old in (any_bits(n, dtype, rng), reference.cast(new, dtype), reference.cast(new * 1.001, dtype)):
        expected = reference_patch.find_changes([old], [reference.cast(new, dtype)])
        for home in HOMES:
            for sizes in ((), (1, 0, 254, 1700)):
                same_bits(home.find_changes(in_pieces(old, sizes), in_pieces(new, sizes)), expected)


@pytest.mark.parametrize("dtype", IN_FLOAT)
def test_some_new_pieces_are_fp32_and_others_are_not(dtype: torch.dtype) -> None:
    """As of a model of BF16 whose norms are FP32, in whichever order they stand."""
    rng, sizes = np.random.default_rng(6), (300, 0, 1, 255, 512, 0, 700, 3)
    old = in_pieces(trained(2000, dtype, rng), sizes)
    cast = in_pieces(moved(torch.cat(old), 0.1, 3, rng), sizes)
    for full in ({0}, {1, 2, 6}, {0, 3, 4, 8}, set(range(1, 9))):
        new = [piece.float() if k in full else piece for k, piece in enumerate(cast)]
        check(old, new, result=cast)


def test_new_weights_and_those_that_are_measured_may_lie_apart() -> None:
    rng = np.random.default_rng(7)
    old, apart = trained(500, torch.bfloat16, rng), trained(1000, torch.bfloat16, rng)[::2]
    check([old], [apart], result=[apart.contiguous()])
    for home in HOMES:
        assert home.digest_bits(apart) == reference_patch.digest_bits(apart.contiguous())


# ---- digests ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 63, 255, 1003, 70_001])
def test_all_homes_have_the_same_digest(n: int, dtype: torch.dtype) -> None:
    weights = any_bits(n, dtype, np.random.default_rng(n))
    expected = reference_patch.digest_bits(weights)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert [home.digest_bits(weights) for home in HOMES] == [expected] * len(HOMES)
    if FORMATS[dtype].width == 4:
        assert expected == reference.digest(weights)
    if n:
        bits_of(weights)[n // 2] ^= 1
        assert reference_patch.digest_bits(weights) != expected


# ---- size ----


def entropy(labels: np.ndarray) -> float:
    """Bits, of how often each of them occurs."""
    counts = np.unique(labels, return_counts=True)[1]
    return float((counts * np.log2(counts.sum() / counts)).sum()) if len(labels) else 0.0


@pytest.mark.check(ALL_VALUES)
@pytest.mark.parametrize(("lr", "steps"), [(1e-6, 40), (1e-6, 160), (3e-6, 80)])
def test_a_change_costs_at_most_0_85_bytes_and_little_more_than_its_entropy(lr: float, steps: int) -> None:
    """Entropy, given the old weights' exponents: of which weights move, and of the steps that they take."""
    n = 1_000_000
    old, new = noisy_step(n, lr, steps)
    changes = kernels.find_changes([old], [new])
    size, count = kernels.pack_patch([old], changes).numel(), changes.positions.numel()
    bits, where = unsigned(bits_of(old)), changes.positions.numpy()
    fields, moves = FORMATS[torch.bfloat16].fields(bits), np.zeros(n, dtype=np.int64)
    moves[where] = ordered(unsigned(changes.bits), 2) - ordered(bits[where], 2)
    least = 0.0
    for field in np.unique(fields):
        of_class = moves[fields == field]
        least += entropy(of_class != 0) + entropy(of_class[of_class != 0])
    assert 0.003 * n < count < 0.1 * n
    assert size <= 0.85 * count
    assert size <= 1.1 * least / 8


def test_the_head_of_a_part_and_few_changes_are_small() -> None:
    """One BF16 weight of a thousand by one ulp: a part's size, its lowest field, 16 counts, the change."""
    old = trained(1003, torch.bfloat16, np.random.default_rng(4))
    new = old.clone()
    bits_of(new)[700] += 1
    assert check([old], [new], entries=1).numel() <= 4 + 1 + CLASSES + 4


# ---- arguments ----


@pytest.mark.parametrize("home", BUILDS, ids=[param.id for param in builds()][: len(BUILDS)])
def test_weights_that_the_kernels_could_not_read_are_refused(home: Any) -> None:
    strided = torch.zeros(20, dtype=torch.bfloat16)[::2]
    nothing = Changes(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int16))
    for call in (lambda: home.pack_patch([strided], nothing), lambda: home.swap_bits([strided], nothing)):
        with pytest.raises(ValueError, match="contiguous tensors in host memory"):
            call()


def test_the_package_uses_the_best_build() -> None:
    if not BUILDS:
        pytest.skip("no C compiler")
    assert isinstance(kernels.home("cpu"), cpu.Compiled)
    old = torch.zeros(5, dtype=torch.bfloat16)
    changes = kernels.find_changes([old], [old + 1])
    body = kernels.pack_patch([old], changes)
    same_bits(kernels.unpack_patch([old], body), changes)
    assert kernels.digest_bits(old) + kernels.swap_bits([old], changes)[0] & MASK == kernels.digest_bits(old)
