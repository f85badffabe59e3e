"""The ops against independent statements of them, at every size and edge, bit for bit."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paper import plain_digest, to_bf16
from scripted import bits
from torch import Tensor

from loco import kernels
from loco.kernels import Entries, Gate, OuterStep, reference

SIZES = [0, 1, 63, 1003]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def every_float_that_matters() -> np.ndarray:
    """All 65,536 BF16 values, each with the low halves around a rounding tie."""
    low = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    return (high[:, None] | low).reshape(-1).view(np.float32)


def state(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Anchor, weights and residual, the update about as large as a BF16 rounding step."""
    rng = np.random.default_rng(seed)
    anchor = 0.02 * rng.standard_normal(n)
    weights = anchor + 3e-5 * rng.standard_normal(n)
    residual = 3e-5 * rng.standard_normal(n)
    return tuple(torch.from_numpy(x.astype(np.float32)) for x in (anchor, weights, residual))  # pyright: ignore


def test_bf16_ties_denormals_overflow_and_zeros() -> None:
    x = every_float_that_matters()
    x = x[~np.isnan(x)]
    cast = reference.cast(torch.from_numpy(x), torch.bfloat16)
    np.testing.assert_array_equal(bits(cast.float()), bits(to_bf16(x)))
    nan = reference.cast(torch.tensor([float("nan")]), torch.bfloat16)
    assert nan.isnan().all()


def test_bf16_rounding_is_torchs_own() -> None:
    x = torch.from_numpy(every_float_that_matters())
    x = x[~x.isnan()]
    assert torch.equal(reference.cast(x, torch.bfloat16).view(torch.int16), x.bfloat16().view(torch.int16))


@given(st.lists(st.tuples(FLOATS, FLOATS), max_size=50), st.sampled_from([0.5, 1.0, 3.5, 7.0]))
def test_visible_compares_two_casts_as_values(pairs: list[tuple[float, float]], gain: float) -> None:
    theta, s = np.array(pairs, dtype=np.float32).reshape(-1, 2).T.copy()
    with np.errstate(over="ignore"):
        moved = theta - np.float32(gain) * s
    expected = to_bf16(theta) != to_bf16(moved)
    got = reference.visible(torch.from_numpy(theta), torch.from_numpy(s), Gate(gain=gain))
    np.testing.assert_array_equal(got.numpy(), expected)


def test_plus_and_minus_zero_are_one_value() -> None:
    theta, s = torch.tensor([0.0, -0.0, 1e-45]), torch.tensor([1e-45, -1e-45, 2e-45])
    assert not reference.visible(theta, s, Gate()).any()


@pytest.mark.parametrize("gain", [1e-9, 1.0, 1e9])
def test_what_is_returned_stays_in_the_residual_too(gain: float) -> None:
    n = 1003
    anchor, weights, residual = state(n)
    s = ((anchor - weights) + residual).numpy()
    own = kernels.encode(anchor, [weights], residual, Gate(gain=gain)).entries
    where = torch.arange(5, n, 3)  # what this site sent, and what it did not
    returned = Entries.at(where, torch.from_numpy(s)[where] * 1.7, n)
    kernels.apply(anchor.clone(), None, [weights.clone()], residual, own, [own], outer(1), returned)
    sent = np.zeros(n, dtype=np.float32)
    sent[own.indices().numpy()] = own.values.numpy()
    sent[where.numpy()] -= returned.values.numpy()
    np.testing.assert_array_equal(bits(residual.numpy()), bits(s - sent))


@pytest.mark.parametrize(
    ("n", "chunk"), [(0, 64), (1, 1), (63, 1), (63, 64), (1003, 64), (1003, 1003), (1003, 1 << 18)]
)
@pytest.mark.parametrize("gain", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_unsent_mass_stays_in_the_residual(
    n: int, chunk: int, gain: float, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent plus new residual is s, bit for bit; the gains make the density 0, partial and (nearly) 1."""
    monkeypatch.setattr(reference, "CHUNK", chunk)
    anchor, weights, residual = state(n)
    s = ((anchor - weights) * factor + residual).numpy()
    cut = n // 3
    pieces = [weights[:cut].clone(), weights[cut:cut], weights[cut:].clone()]
    encoded = kernels.encode(anchor, pieces, residual, Gate(gain=gain), factor)
    sent = encoded.entries
    before = residual.clone()
    norm = kernels.apply(anchor.clone(), None, pieces, residual, sent, [sent], outer(1, factor))
    rebuilt = residual.numpy().copy()
    assert norm == pytest.approx(float(np.linalg.norm(rebuilt.astype(np.float64))))  # any order of the sum
    assert not rebuilt[sent.indices().numpy()].any()
    rebuilt[sent.indices().numpy()] = sent.values.numpy()
    np.testing.assert_array_equal(bits(rebuilt), bits(s))
    if gain == 1e-9:
        assert sent.values.numel() == 0
    elif gain == 1e9:
        assert sent.values.numel() == np.count_nonzero(s)
    elif n > 63:
        assert 0 < sent.values.numel() < n
        assert not torch.equal(before, residual)


def test_a_dense_update_is_never_minus_zero() -> None:
    """s = Δ + e with e = 0, so that what is sent does not depend on whether a residual is kept."""
    anchor, weights = torch.tensor([-0.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 1.0])
    for residual in (None, torch.zeros(3)):
        encoded = kernels.encode(anchor, [weights], residual, None)
        np.testing.assert_array_equal(bits(encoded.entries.values), np.zeros(3, dtype=np.uint32))


def test_encode_writes_nothing() -> None:
    tensors = state(1003)
    before = [t.clone() for t in tensors]
    anchor, weights, residual = tensors
    kernels.encode(anchor, [weights], residual, Gate())
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@pytest.mark.parametrize("position", [0, 5, 1002])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_first_non_finite_update_is_found(
    position: int, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "CHUNK", 100)
    anchor, weights, residual = state(1003)
    assert kernels.encode(anchor, [weights], residual, Gate()).first_nonfinite == -1
    weights[position:] = value
    assert kernels.encode(anchor, [weights], residual, Gate()).first_nonfinite == position
    assert kernels.encode(anchor, [weights], None, None).first_nonfinite == position


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("mu", "nesterov"), [(0.9, True), (0.9, False), (0.0, True)])
def test_apply_sums_in_site_order_and_divides_by_sites(n: int, mu: float, nesterov: bool) -> None:
    """Four sites, of which one sends nothing and one sends all; order and divisor decide the bits."""
    anchor, weights, _ = state(n)
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(n).astype(np.float32) for _ in range(3))
    some, others = (np.flatnonzero(rng.random(n) < 0.6) for _ in range(2))
    contributions = [
        Entries.at(torch.from_numpy(some), torch.from_numpy(a[some]), n),
        Entries.at(torch.arange(0), torch.empty(0), n),
        Entries.whole(torch.from_numpy(b)),
        Entries.at(torch.from_numpy(others), torch.from_numpy(c[others]), n),
    ]
    m = rng.standard_normal(n).astype(np.float32)
    total = np.zeros(n, dtype=np.float32)
    total[some] += a[some]
    total += b
    total[others] += c[others]
    g = total / np.float32(4)
    if n > 63:
        backwards = np.zeros(n, dtype=np.float32)
        backwards[others] += c[others]
        backwards += b
        backwards[some] += a[some]
        assert (backwards != total).any()
    new_m = np.float32(mu) * m + g
    direction = g if mu == 0 else g + np.float32(mu) * new_m if nesterov else new_m
    expected = anchor.numpy() - np.float32(0.7) * direction

    momentum = torch.from_numpy(m.copy()) if mu else None
    step = OuterStep(divisor=4, lr=0.7, momentum=mu, nesterov=nesterov)
    low = weights.bfloat16()
    kernels.apply(anchor, momentum, [low], None, contributions[2], contributions, step)
    np.testing.assert_array_equal(bits(anchor), bits(expected))
    if momentum is not None:
        np.testing.assert_array_equal(bits(momentum), bits(new_m))
    np.testing.assert_array_equal(bits(low.float()), bits(to_bf16(expected)))


def test_three_sites_are_divided_by_three_not_multiplied_by_a_third() -> None:
    """x / 3 and x · (1/3) differ in the last bit for a third of all x: the division must be a division."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(1000).astype(np.float32))
    quotient = x.numpy() / np.float32(3)
    assert (quotient != x.numpy() * np.float32(1 / 3)).mean() > 0.1
    anchor = torch.zeros(1000)
    kernels.apply(anchor, None, [torch.zeros(1000)], None, Entries.whole(x), [Entries.whole(x)], outer(3))
    np.testing.assert_array_equal(bits(anchor), bits(-quotient))


@given(st.binary(max_size=200))
def test_the_digest_is_the_documented_sum(data: bytes) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    assert kernels.digest(tensor) == plain_digest(data)
    # A view that starts at an odd byte has the same bytes, and so the same digest.
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), tensor])[1:]
    assert kernels.digest(shifted) == plain_digest(data)


def test_the_digest_does_not_depend_on_chunks_and_notices_what_replicas_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    anchor, _, _ = state(1003)
    whole = kernels.digest(anchor)
    monkeypatch.setattr(reference, "CHUNK", 17)
    assert kernels.digest(anchor) == whole
    words = anchor.view(torch.int32)
    seen = {whole}
    for bit in range(32):  # any one flipped bit, two exchanged elements, an ulp moved from one to another
        words[500] ^= 1 << bit if bit < 31 else -(1 << 31)
        seen.add(kernels.digest(anchor))
        words[500] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert kernels.digest(anchor) == whole
    anchor[[3, 4]] = anchor[[4, 3]]
    seen.add(kernels.digest(anchor))
    words[10] += 1
    words[11] -= 1
    seen.add(kernels.digest(anchor))
    assert len(seen) == 35


def test_one_digest_of_several_tensors_depends_on_order_and_borders() -> None:
    anchor, weights, _ = state(1003)
    both = hashlib.blake2b(digest_size=8)
    for tensor in (anchor, weights):
        both.update(plain_digest(tensor.numpy().tobytes()).to_bytes(8, "little"))
    assert kernels.digest_of_all([anchor, weights]) == both.digest()
    joined = torch.cat([anchor, weights])
    others = ([weights, anchor], [joined], [joined[:1000], joined[1000:]], [anchor, weights, joined[:0]])
    assert len({kernels.digest_of_all(tensors) for tensors in ([anchor, weights], *others)}) == 5


def test_a_digest_as_text_has_all_its_digits() -> None:
    assert kernels.digest_hex(torch.tensor([0x1234], dtype=torch.int32)) == "0000000000001234"


def outer(sites: int, factor: float = 1.0) -> OuterStep:
    return OuterStep(divisor=sites, factor=factor, lr=1.0, momentum=0.0, nesterov=False)
