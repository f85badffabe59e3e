"""The Triton home of patches gives the reference's bits: of every format, size, piece and kind of change."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from homes import PATCH_OPS, interpreted, on_the_gpu, same_bits, use_tiles_of
from hypothesis import given, settings
from hypothesis import strategies as st
from patch_cases import any_bits, in_pieces, moved, trained
from selection import ALL_VALUES
from torch import Tensor

from loco import kernels
from loco.kernels import Changes, MalformedError, reference, reference_patch
from loco.kernels.reference_patch import FORMATS, bits_of

TILE = 512
PACKAGES = ("loco.kernels.interpreted", "loco.kernels.triton")
MASK = (1 << 64) - 1
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in FORMATS]

pytestmark = pytest.mark.parametrize(
    "home",
    [
        pytest.param(interpreted(PATCH_OPS), id="triton-interpreted"),
        pytest.param(on_the_gpu(PATCH_OPS), id="triton-gpu", marks=pytest.mark.gpu),
    ],
)


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles_of(TILE, monkeypatch)
    for package in PACKAGES:
        monkeypatch.setattr(sys.modules[f"{package}.ranking"], "LANES", 32)
        monkeypatch.setattr(sys.modules[f"{package}.classes"], "SAMPLES", 64)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full, so that what an op forgets to write is seen."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(0x7F))


def use_parts_of(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the reference, too: the interpreter takes minutes for a part of the usual size."""
    for package in PACKAGES:
        for name in ("ranking", "classes"):
            monkeypatch.setattr(sys.modules[f"{package}.{name}"], "PART", elements)
    for module in ("reference_patch", "reference_ranked"):
        monkeypatch.setattr(sys.modules[f"loco.kernels.{module}"], "PART", elements)


def check(home: Any, old: Sequence[Tensor], new: Sequence[Tensor]) -> Changes:
    """All ops, one after the other, on what the reference gives them."""
    old = list(old)
    changes = reference_patch.find_changes(old, new)
    same_bits(home.find_changes(old, list(new)), changes)
    ranked = reference_patch.rank_changes(old, changes)
    same_bits(home.rank_changes(old, changes), ranked)
    same_bits(home.place_ranked(old, ranked), changes)

    held = [bits_of(piece).clone().view(piece.dtype) for piece in old]
    mine = Changes(changes.positions, changes.bits.clone())
    before = [home.digest_bits(piece) for piece in held]
    assert before == [reference_patch.digest_bits(piece) for piece in old]
    by = home.swap_bits(held, mine)
    assert [home.digest_bits(piece) for piece in held] == [
        d + b & MASK for d, b in zip(before, by, strict=True)
    ]
    same_bits(reference_patch.find_changes(held, old)[:1], changes[:1])
    same_bits(home.find_changes(old, held), changes)
    assert home.swap_bits(held, mine) == [-b & MASK for b in by]
    same_bits([*held, *mine], [*old, *changes])
    return changes


@pytest.mark.check(ALL_VALUES, sample=r".*-(0|513)-[^-]*-triton.*")
@pytest.mark.pairs
@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("n", [0, 1, 63, 511, 512, 513, 1003, 3 * 512])
@pytest.mark.parametrize("sizes", [(), (0, 16, 0, 32), (1, 0, 30)], ids=["one", "aligned", "unaligned"])
@pytest.mark.parametrize("kind", [trained, any_bits], ids=["trained", "any bits"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_format_size_and_piece(
    home: Any, dtype: torch.dtype, kind: Any, sizes: tuple[int, ...], n: int, density: float
) -> None:
    rng = np.random.default_rng(n)
    old = kind(n, dtype, rng)
    new = moved(old, density, 8 * FORMATS[dtype].width if kind is any_bits else 3, rng)
    if sum(sizes) <= n:
        changes = check(home, in_pieces(old, sizes), in_pieces(new, sizes))
        assert (changes.positions.numel() > 0) == (density > 0 and n > 0) or n < 100


@pytest.mark.check(ALL_VALUES, sample=r"(?!.*triton-interp).*")
@pytest.mark.parametrize("n", [4 * 1024, 4 * 1024 + 1, 5 * 1024 - 3])
def test_several_parts_of_which_some_do_not_change(
    home: Any, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_parts_of(1024, monkeypatch)
    rng = np.random.default_rng(1)
    old = trained(n, torch.bfloat16, rng)
    old[1024:2048] *= 2.0**20  # each part has a lowest field of its own
    new = moved(old, 0.05, 3, rng)
    new[2048:3072] = old[2048:3072]
    bits_of(new)[-1] ^= 1
    ranked = reference_patch.rank_changes(
        [old], check(home, in_pieces(old, (350, 1500)), in_pieces(new, (350, 1500)))
    )
    assert ranked.counts.any(1).tolist() == [True, True, False, *[True] * (len(ranked.lowest) - 3)]
    assert len(set(ranked.lowest.tolist())) > 2


@pytest.mark.check(ALL_VALUES, sample=r"(?!.*triton-interp).*")
def test_a_dense_class_and_an_empty_one(home: Any) -> None:
    """All weights of a few tiles of one class, every other one changed, and one change in a tile alone."""
    old = torch.full((4 * TILE + 5,), 1.5, dtype=torch.bfloat16)
    old[-9:] = 0.0
    new = old.clone()
    bits_of(new)[: 2 * TILE : 2] += 1
    bits_of(new)[-2] += 1
    check(home, [old], [new])


@pytest.mark.check(ALL_VALUES, sample=r"(?!.*triton-interp).*|.*unaligned.*bfloat.*|.*bfloat.*unaligned.*")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(16, 512, 1024), (1, 0, 254, 1000)], ids=["aligned", "unaligned"])
def test_fp32_weights_are_cast_before_they_are_compared(
    home: Any, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    """All new pieces, or some of them: ties, infinities and NaNs among them."""
    rng = np.random.default_rng(3)
    full = any_bits(2500, torch.float32, rng)
    full[:1000] = trained(1000, torch.float32, rng)
    full[1000:1500].view(torch.int32)[:] &= -1 << 12  # ties, of BF16 and of FP16
    full[1000:1500].view(torch.int32)[:] |= 1 << 12
    for old in (any_bits(2500, dtype, rng), reference.cast(full, dtype)):
        cast = in_pieces(reference.cast(full, dtype), sizes)
        expected = reference_patch.find_changes(in_pieces(old, sizes), cast)
        for every in (1, 2):
            new = [
                f if k % every == 0 else c
                for k, (f, c) in enumerate(zip(in_pieces(full, sizes), cast, strict=True))
            ]
            same_bits(home.find_changes(in_pieces(old, sizes), new), expected)


@settings(max_examples=settings().max_examples // 4)  # the interpreter takes a second for each
@given(st.data())
def test_any_changes(home: Any, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(FORMATS)))
    n, rng = data.draw(st.integers(0, 1300)), np.random.default_rng(data.draw(st.integers(0, 1000)))
    old = data.draw(st.sampled_from([trained, any_bits]))(n, dtype, rng)
    density = data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    new = moved(old, density, data.draw(st.integers(1, 8 * FORMATS[dtype].width)), rng)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    sizes = np.diff([0, *cuts]).tolist()
    check(home, in_pieces(old, sizes), in_pieces(new, sizes))


@pytest.mark.check(ALL_VALUES, sample=r"(?!.*triton-interp).*")
def test_ranks_and_steps_that_do_not_fit_the_weights_are_refused(home: Any) -> None:
    rng = np.random.default_rng(0)
    old = [any_bits(1300, torch.bfloat16, rng)]
    changes = reference_patch.find_changes(old, [moved(old[0], 0.1, 3, rng)])
    ranked = reference_patch.rank_changes(old, changes)
    beyond = ranked._replace(ranks=ranked.ranks + 1300)
    for steps in (1 << 16, -1 << 32):
        too_long = ranked._replace(steps=ranked.steps.index_fill(0, torch.tensor([7]), steps))
        for wrong, what in ((beyond, "more weights of a class"), (too_long, "a step leads out")):
            for place in (reference_patch.place_ranked, home.place_ranked):
                with pytest.raises(MalformedError, match=what):
                    place(old, wrong)


def test_weights_that_the_kernels_could_not_read_are_refused(home: Any) -> None:
    one, strided = torch.zeros(20, dtype=torch.bfloat16), torch.zeros(40, dtype=torch.bfloat16)[::2]
    changes = Changes(torch.tensor([3]), torch.tensor([1], dtype=torch.int16))
    for call in (home.rank_changes, home.swap_bits):
        for weights in ([strided], [one, one.half()]):
            with pytest.raises(ValueError, match="contiguous tensors of one dtype on one device"):
                call(weights, changes)
    with pytest.raises(ValueError, match="as many as the old ones"):
        home.find_changes([one], [one[1:]])
    with pytest.raises(ValueError, match=r"must be torch\.bfloat16 or torch\.float32"):
        home.find_changes([one], [one.half()])
    same_bits(home.find_changes([one], [strided]), reference_patch.find_changes([one], [strided]))


@pytest.mark.check(ALL_VALUES, sample=r"(?!.*triton-interp).*")
def test_patches_of_weights_on_a_device_are_those_of_weights_in_host_memory(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads the weights runs on the device, and the coder on the host."""
    rng = np.random.default_rng(0)
    old = [trained(3000, torch.bfloat16, rng)]
    new = [moved(old[0], 0.05, 3, rng)]
    changes = reference_patch.find_changes(old, new)
    monkeypatch.setattr(kernels.patches, "_device_patches", lambda _: home)
    same_bits(kernels.find_changes(old, new), changes)
    body = kernels.pack_patch(old, changes)
    same_bits([body], [reference_patch.pack_patch(old, changes)])
    same_bits(kernels.unpack_patch(old, body), changes)
    before = kernels.digest_bits(old[0])
    change = kernels.swap_bits(old, changes)[0]
    same_bits(old, new)
    assert kernels.digest_bits(old[0]) == before + change & MASK


def test_other_devices_are_refused(home: Any) -> None:
    with pytest.raises(ValueError, match="weights on cpu or cuda, got weights on meta"):
        kernels.digest_bits(torch.zeros(3, device="meta"))


def test_no_pieces_at_all(home: Any) -> None:
    changes = home.find_changes([], [])
    same_bits(changes, reference_patch.find_changes([], []))
    ranked = home.rank_changes([], changes)
    same_bits(ranked, reference_patch.rank_changes([], changes))
    same_bits(home.place_ranked([], ranked), changes)
    assert home.swap_bits([], changes) == []
