"""Every home of the ops gives the reference's bits, at every size, edge, dtype and value.

Only of a NaN that arithmetic makes the bits are not compared.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from homes import HOMES, interpreted, use_tiles_of
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import ALL_VALUES
from torch import Tensor

from loco.kernels import Encoded, Entries, Gate, OuterStep, reference

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GATES = [None, *(Gate(dtype=d) for d in (BF16, FP16, torch.float8_e4m3fn, torch.float8_e5m2))]
TILE = 512
# Blocks have 256 elements, tiles here 512, and an encode has 16 chunks of whole tiles.
EDGES = [0, 1, 63, 255, 256, 257, 511, 512, 513, 1003, 16 * 512, 16 * 512 + 1, 33 * 512 - 1]

pytestmark = pytest.mark.parametrize("home", HOMES[1:])  # all but the reference
# Of the ties each one, and every 29th, which has every exponent and every kind of tie.
of_ties = pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.check(ALL_VALUES))])


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles_of(TILE, monkeypatch)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaNs, so that what an op forgets to write is seen."""

    def poisoned(make: Any) -> Any:
        def full(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 0x7F)

        return full

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


def normal(n: int, seed: int, scale: float) -> Tensor:
    return torch.from_numpy((scale * np.random.default_rng(seed).standard_normal(n)).astype(np.float32))


def state(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Anchor, weights and residual; at γ = 1 about 6% of the updates are visible in BF16."""
    anchor = normal(n, seed, 0.02)
    return anchor, anchor - normal(n, seed + 1, 3e-6), normal(n, seed + 2, 3e-6)


def cut(weights: Tensor, sizes: Sequence[int], dtypes: Sequence[torch.dtype], pad: int = 0) -> list[Tensor]:
    """Pieces with a memory of their own; `pad` elements before each, so that its address is not aligned."""
    pieces = []
    for i, piece in enumerate(weights.split(list(sizes))):
        behind = torch.cat([torch.zeros(pad), piece]).to(dtypes[i % len(dtypes)])
        pieces.append(behind[pad:])
    return pieces


def whole(weights: Tensor, dtype: torch.dtype = FP32) -> list[Tensor]:
    return cut(weights, [weights.numel()], [dtype])


def some(n: int, density: float, seed: int) -> Entries:
    rng = np.random.default_rng(seed)
    where = torch.from_numpy(np.flatnonzero(rng.random(n) < density))
    return Entries.at(where, normal(where.numel(), seed, 1e-5), n)


def same(got: Tensor | None, expected: Tensor | None) -> None:
    if got is None or expected is None:
        assert got is expected
        return
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if not got.numel():
        return
    differ = got.view(torch.uint8) != expected.view(torch.uint8)
    if got.is_floating_point():
        differ = differ.view(-1, got.element_size()).any(1) & ~(got.isnan() & expected.isnan())
    assert not differ.any(), f"{int(differ.sum())} differ, the first at {int(differ.nonzero()[0])}"


def check_encode(
    home: Any,
    anchor: Tensor,
    weights: list[Tensor],
    residual: Tensor | None,
    gate: Gate | None,
    factor: float = 1.0,
) -> Encoded:
    inputs = [anchor, *weights, *([] if residual is None else [residual])]
    before = [t.clone() for t in inputs]
    expected = reference.encode(anchor, weights, residual, gate, factor)
    got = home.encode(anchor, weights, residual, gate, factor)
    assert got[1:] == expected[1:]
    for ours, theirs in zip(got.entries, expected.entries, strict=True):
        same(ours, theirs)
    for old, new in zip(before, inputs, strict=True):
        same(new, old)
    return expected


def check_apply(
    home: Any,
    anchor: Tensor,
    momentum: Tensor | None,
    weights: list[Tensor],
    residual: Tensor | None,
    own: Entries,
    contributions: list[Entries],
    outer: OuterStep,
    returned: Entries | None = None,
) -> None:
    def run(ops: Any) -> tuple[float, list[Tensor | None]]:
        theta, m, e = (None if t is None else t.clone() for t in (anchor, momentum, residual))
        # Cloned by storage: an offset into it, and so an address, may be what is tested.
        pieces = [torch.empty(0, dtype=w.dtype).set_(w.untyped_storage().clone()) for w in weights]  # pyright: ignore
        pieces = [p[w.storage_offset() :][: w.numel()] for p, w in zip(pieces, weights, strict=True)]
        norm = ops.apply(theta, m, pieces, e, own, contributions, outer, returned)
        return norm, [theta, m, e, *pieces]

    norm, results = run(home)
    expected_norm, expected = run(reference)
    assert norm == pytest.approx(expected_norm, rel=1e-6, nan_ok=True)  # in any order of the sum
    for ours, theirs in zip(results, expected, strict=True):
        same(ours, theirs)


def step(divisor: float = 1, mu: float = 0.9, *, nesterov: bool = True, factor: float = 1.0) -> OuterStep:
    return OuterStep(divisor=divisor, factor=factor, lr=0.7, momentum=mu, nesterov=nesterov)


@pytest.mark.check(ALL_VALUES, sample=r"(?!16895|.*triton-int).*|(0|257)-triton-int.*")
@pytest.mark.parametrize("n", EDGES)
def test_a_round_at_every_edge(home: Any, n: int) -> None:
    anchor, weights, residual = state(n)
    pieces = whole(weights)
    own = check_encode(home, anchor, pieces, residual, Gate(), 1.37).entries
    check_encode(home, anchor, pieces, residual, None)
    contributions = [some(n, 0.12, 5), own, Entries.whole(normal(n, 6, 1e-5))]
    outer = step(3.3, factor=1.37)
    check_apply(home, anchor, normal(n, 7, 1e-5), pieces, residual, own, contributions, outer)
    for returned in (some(n, 0.3, 8), Entries.none(n, own.values.device)):
        check_apply(home, anchor, None, pieces, residual, own, [own], step(2, 0.0), returned)
    home.write_weights(anchor, pieces)
    same(pieces[0], anchor)
    assert home.digest(anchor) == reference.digest(anchor)


@pytest.mark.pairs
@pytest.mark.parametrize("gate", GATES, ids=lambda g: "none" if g is None else str(g.dtype))
@pytest.mark.parametrize("gain", [1e-6, 2.5, 1e9])
@pytest.mark.parametrize("keeps", [True, False], ids=["residual", "no-residual"])
def test_gates_and_densities(home: Any, gate: Gate | None, gain: float, keeps: bool) -> None:
    anchor, weights, residual = state(1600)
    if gate is not None:
        gate = Gate(dtype=gate.dtype, gain=gain)
    pieces = whole(weights, BF16 if keeps else FP32)
    entries = check_encode(home, anchor, pieces, residual if keeps else None, gate, 0.73).entries
    density = entries.values.numel() / 1600
    assert density == 1 if gate is None else density < 1e-2 or gain > 1e-6
    if gate is not None and gain == 1e9:
        assert density > 0.5


@pytest.mark.check(ALL_VALUES, sample=r"(?!.*triton-interp).*")
@pytest.mark.parametrize(("scale", "low", "high"), [(0.0, 0.0, 0.0), (4e-7, 0.002, 0.02), (6e-6, 0.05, 0.25)])
def test_densities_of_real_rounds(home: Any, scale: float, low: float, high: float) -> None:
    anchor = normal(8000, 0, 0.02)
    weights = anchor - normal(8000, 1, scale)
    residual = torch.zeros(8000)
    own = check_encode(home, anchor, whole(weights), residual, Gate()).entries
    assert low <= own.values.numel() / 8000 <= high
    others = [own, some(8000, high, 9)]
    check_apply(home, anchor, torch.zeros(8000), whole(weights), residual, own, others, step(2))


@pytest.mark.check(ALL_VALUES, sample=r"(?!.*triton-interp).*|.*unaligned.*float32, .*")
@pytest.mark.pairs
@pytest.mark.parametrize("dtypes", [[FP32], [BF16], [FP16], [FP32, BF16, FP16]], ids=str)
@pytest.mark.parametrize("pieces", ["one", "aligned", "unaligned", "tiny"])
def test_pieces_of_any_dtype_anywhere(home: Any, dtypes: list[torch.dtype], pieces: str) -> None:
    n = 2000
    sizes = {"one": [n], "aligned": [16, 600, 800, 64, 520], "unaligned": [1, 700, 3, 0, 1296]}.get(pieces)
    if sizes is None:
        rng = np.random.default_rng(0)
        ends = np.sort(rng.integers(0, n, 60))
        sizes = np.diff(ends, prepend=0, append=n).tolist()
    anchor, weights, residual = state(n)
    parts = cut(weights, sizes, dtypes, pad=0 if pieces in ("one", "aligned") else 3)
    own = check_encode(home, anchor, parts, residual, Gate(), 1.37).entries
    check_encode(home, anchor, parts, residual, None, 1.37)
    check_apply(home, anchor, normal(n, 7, 1e-5), parts, residual, own, [own], step(factor=1.37))
    expected = [p.clone() for p in parts]
    reference.write_weights(anchor, expected)
    home.write_weights(anchor, parts)
    for ours, theirs in zip(parts, expected, strict=True):
        same(ours, theirs)


def test_a_state_that_is_not_aligned(home: Any) -> None:
    n = 1500
    anchor, weights, residual = (torch.cat([torch.zeros(1), t])[1:] for t in state(n))
    own = check_encode(home, anchor, [weights], residual, Gate()).entries
    sums = Entries.whole(torch.cat([torch.zeros(3), normal(n, 5, 1e-5)])[3:])
    check_apply(home, anchor, normal(n, 7, 1e-5), [weights], residual, own, [own, sums], step(2))


@pytest.mark.check(ALL_VALUES, sample=r"(?!.*triton-interp).*|.*sws.*nesterov.*")
@pytest.mark.pairs
@pytest.mark.parametrize("mu", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
@pytest.mark.parametrize("keeps", [True, False], ids=["residual", "no-residual"])
@pytest.mark.parametrize("mix", ["w", "s", "sws", "wsss", "e"])
def test_every_kind_of_outer_step(home: Any, mu: float, nesterov: bool, keeps: bool, mix: str) -> None:
    """Contributions whole (w), sparse (s) and empty (e); what this site has sent is one of them or not."""
    n = 1100
    anchor, weights, residual = state(n)
    kinds = {"w": lambda i: Entries.whole(normal(n, i, 1e-4)), "s": lambda i: some(n, 0.2, i)}
    kinds["e"] = lambda i: some(n, 0.0, i)
    contributions = [kinds[kind](i) for i, kind in enumerate(mix)]
    momentum = normal(n, 7, 1e-5) if mu else None
    for own in (contributions[-1], some(n, 0.3, 8), Entries.whole(normal(n, 9, 1e-4))):
        check_apply(
            home,
            anchor,
            momentum,
            whole(weights, BF16),
            residual if keeps else None,
            own,
            contributions,
            step(len(mix), mu, nesterov=nesterov),
        )


def ties(every: int) -> Tensor:
    """BF16 values with the low halves around a rounding tie: denormals, infinities and NaNs too."""
    low = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    return torch.from_numpy((high[:, None] | low).reshape(-1)[::every].copy().view(np.float32))


@of_ties
@pytest.mark.parametrize("gate", GATES[1:], ids=lambda g: str(g.dtype))
def test_the_casts_of_all_ties(home: Any, gate: Gate, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """θ is every tie, and θ − γ·s is a neighbour of it, or anything at all."""
    use_tiles_of(1 << 16, monkeypatch)
    anchor = ties(every)
    order = torch.from_numpy(np.random.default_rng(0).permutation(anchor.numel()))
    near = (anchor.view(torch.int32) + torch.arange(anchor.numel()).to(torch.int32) % 5 - 2).view(FP32)
    other = torch.where(order % 2 == 0, near, anchor[order])
    check_encode(home, anchor, [other], torch.zeros_like(anchor), gate)


ECONOMIES = [(0.25, None), (1e-6, None), (1e38, None), (0.0, 2), (0.0, 256), (1.5, 16)]


@of_ties
@pytest.mark.parametrize(("margin", "value_steps"), ECONOMIES)
def test_the_economies_on_all_ties(
    home: Any, margin: float, value_steps: int | None, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """θ is a fifth of all BF16 numbers and ties; s is anything at all, or some halves of a step, or f·ulp(θ),
    or next to one of these."""
    use_tiles_of(1 << 16, monkeypatch)
    gate = Gate(gain=2.0**30, margin=margin, value_steps=value_steps)
    anchor = ties(5 * every)
    n = anchor.numel()
    rng = np.random.default_rng(0)
    unit = reference.ulp(anchor)
    per_ulp = 2 * (value_steps or 1)
    count = torch.from_numpy(rng.integers(-2 * per_ulp, 2 * per_ulp, n).astype(np.float32))
    nudge = torch.from_numpy(rng.integers(-1, 2, n).astype(np.int32))
    sent = 0
    for s in (anchor[torch.from_numpy(rng.permutation(n))], count * (unit / per_ulp), unit * margin):
        update = (s.view(torch.int32) + nudge).view(FP32)
        # w = θ, so that s is the residual.
        sent += check_encode(home, anchor, [anchor.clone()], update, gate).entries.values.numel()
    assert sent > n // 4 or margin == 1e38


@of_ties
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_weights_of_all_ties(
    home: Any, dtype: torch.dtype, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cast of each tie, and the difference from weights of any value, overflow to infinity included."""
    use_tiles_of(1 << 16, monkeypatch)
    anchor = ties(every)
    order = torch.from_numpy(np.random.default_rng(0).permutation(anchor.numel()))
    pieces = whole(anchor[order], dtype)
    check_encode(home, anchor, pieces, None, None)
    expected = [p.clone() for p in pieces]
    reference.write_weights(anchor, expected)
    home.write_weights(anchor, pieces)
    assert torch.equal(pieces[0].view(torch.uint8), expected[0].view(torch.uint8))  # the bits of NaNs too


@of_ties
def test_an_outer_step_on_all_ties(home: Any, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles_of(1 << 16, monkeypatch)
    values = ties(every)
    n = values.numel()
    rng = np.random.default_rng(0)
    m, e, c = (values[torch.from_numpy(rng.permutation(n))] for _ in range(3))
    where = torch.from_numpy(np.flatnonzero(rng.random(n) < 0.1))
    own = Entries.at(where, values[where].flip(0), n)
    with np.errstate(all="ignore"):
        check_apply(home, values, m, whole(values, FP16), e, own, [own, Entries.whole(c), own], step(3))


def test_no_update_is_minus_zero(home: Any) -> None:
    anchor, weights = torch.tensor([-0.0, 0.0, -0.0, 1.0]), torch.tensor([0.0, 0.0, -0.0, 1.0])
    for residual in (None, torch.zeros(4)):
        values = check_encode(home, anchor, [weights], residual, None).entries.values
        assert not values.signbit().any()
    total = Entries.whole(torch.full((4,), -0.0))  # (0 + −0) / 1 is +0, and θ − α · 0 is θ
    check_apply(home, anchor, None, [weights], None, total, [total], step(1, 0.0))


@pytest.mark.pairs
@pytest.mark.parametrize("position", [0, 5, 1600, 1999])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["anchor", "weights", "residual"])
def test_the_first_non_finite_update(home: Any, position: int, value: float, where: str) -> None:
    anchor, weights, residual = state(2000)
    {"anchor": anchor, "weights": weights, "residual": residual}[where][position:] = value
    found = check_encode(home, anchor, whole(weights, BF16), residual, Gate()).first_nonfinite
    assert found == position
    check_encode(home, anchor, whole(weights), residual, None)


@pytest.mark.check(ALL_VALUES, sample=r"(?!.*triton-interp).*")
def test_more_entries_than_the_sample_promised(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile that is counted beforehand is empty, and all the others are not."""
    for package in ("loco.kernels.interpreted", "loco.kernels.triton"):
        monkeypatch.setattr(sys.modules[f"{package}.encoding"], "SAMPLED", 4)
    anchor = normal(40 * TILE + 100, 0, 0.02)
    weights = anchor - normal(anchor.numel(), 1, 1e-4)
    for tile in (0, 10, 20, 30):
        weights[tile * TILE : (tile + 1) * TILE] = anchor[tile * TILE : (tile + 1) * TILE]
    entries = check_encode(home, anchor, whole(weights), None, Gate()).entries
    assert entries.values.numel() > 5 * TILE


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 1003, 4096, 8195])
def test_digests_of_any_bytes(home: Any, n: int) -> None:
    data = torch.from_numpy(np.random.default_rng(n).integers(0, 256, n + 3, dtype=np.uint8))
    for shift in range(4):
        assert home.digest(data[shift : shift + n]) == reference.digest(data[shift : shift + n].clone())


@settings(max_examples=settings().max_examples // 4)  # the interpreter takes a second for each
@given(st.data())
def test_any_round(home: Any, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 1300), label="n")
    seed = data.draw(st.integers(0, 1000), label="seed")
    dtypes = data.draw(st.lists(st.sampled_from([FP32, BF16, FP16]), min_size=1, max_size=3), label="dtypes")
    ends = sorted(data.draw(st.lists(st.integers(0, n), max_size=5), label="borders"))
    sizes = np.diff([0, *ends, n]).tolist()
    gate = data.draw(st.sampled_from(GATES), label="gate")
    if gate is not None:
        margin = data.draw(st.sampled_from([0.0, 0.01, 0.3]), label="margin")
        value_steps = data.draw(st.sampled_from([None, 1, 2, 16, 256]), label="value_steps")
        gate = dataclasses.replace(gate, margin=margin, value_steps=value_steps)
    anchor, weights, residual = state(n, seed)
    pieces = cut(weights, sizes, dtypes, pad=data.draw(st.integers(0, 3), label="pad"))
    own = check_encode(home, anchor, pieces, residual, gate).entries
    density = data.draw(st.sampled_from([0.0, 0.01, 0.12, 1.0]), label="density")
    contributions = [own, some(n, density, seed), Entries.whole(normal(n, seed, 1e-5))]
    contributions = data.draw(st.permutations(contributions), label="order")
    check_apply(home, anchor, normal(n, seed, 1e-5), pieces, residual, own, contributions, step(3))


def test_interpreted_kernels_are_interpreted(home: Any) -> None:
    """Otherwise nothing above has tested them."""
    kernel = sys.modules["loco.kernels.interpreted.encoding"].encode_kernel
    assert type(kernel).__name__ == "InterpretedFunction"
    assert interpreted().encode.__module__ == "loco.kernels.interpreted.encoding"
