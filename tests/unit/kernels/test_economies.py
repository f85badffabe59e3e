"""The gate's two economies: a margin, and values in steps of a fraction of θ's BF16 ulp."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from homes import HOMES, use_tiles_of
from hypothesis import given
from hypothesis import strategies as st
from paper import bf16_ulp, in_steps
from scripted import bits
from selection import ALL_VALUES
from torch import Tensor

from loco.kernels import Entries, Gate, OuterStep, reference

STEPS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
# Any finite FP32, each exponent as likely as any other: hypothesis's own floats are seldom near each other.
NUMBERS = st.builds(
    lambda sign, rest: np.uint32(sign << 31 | rest).view(np.float32),
    st.integers(0, 1),
    st.integers(0, 0x7F7FFFFF),
)
ECONOMIES = [(0.25, None), (0.0, 16), (0.25, 16), (0.0, 2), (1.0, 256), (0.5, 1)]
LARGEST = np.finfo(np.float32).max
PLAIN = OuterStep(divisor=1, lr=1.0, momentum=0.0, nesterov=False)


def rounded(theta: float, s: float, value_steps: int) -> float:
    return float(reference.in_steps(torch.tensor([theta]), torch.tensor([s]), value_steps))


def exact_ulp(theta: np.float32) -> Fraction:
    """From the definition: 2^(E − 127 − 7), E the biased exponent, at least 1."""
    exponent = max(int(theta.view(np.uint32)) >> 23 & 0xFF, 1)
    return Fraction(2) ** (exponent - 134)


@given(NUMBERS, NUMBERS, st.integers(-40, 40), st.sampled_from(STEPS))
def test_a_value_is_the_nearest_step_and_what_is_left_is_exact(
    theta: np.float32, s: np.float32, near: int, value_steps: int
) -> None:
    step = exact_ulp(theta) / value_steps
    assert Fraction(float(reference.ulp(torch.tensor([theta])))) == step * value_steps
    for update in (s, np.float32(near * step / 2)):
        v = np.float32(rounded(float(theta), float(update), value_steps))
        nearest = round(Fraction(float(update)) / step) * step  # Python rounds halves to even
        if abs(nearest) == 2**128:
            nearest += step if update < 0 else -step
        assert Fraction(float(v)) == nearest
        left = update - v
        assert Fraction(float(left)) == Fraction(float(update)) - nearest
        assert v + left == update


def test_halves_go_to_the_even_step() -> None:
    step = 2.0**-7 / 16  # θ from 1 to 2 has ulps of 2^-7
    for theta in (1.0, -1.75):
        got = [rounded(theta, k / 2 * step, 16) / step for k in range(-7, 8)]
        assert got == [-4, -3, -2, -2, -2, -1, 0, 0, 0, 1, 2, 2, 2, 3, 4]


@pytest.mark.parametrize(
    ("theta", "ulp"),
    [
        (0.0, 2.0**-133),
        (-0.0, 2.0**-133),
        (1e-45, 2.0**-133),
        (2.0**-126, 2.0**-133),
        (np.nextafter(np.float32(1), np.float32(0)), 2.0**-8),
        (1.0, 2.0**-7),
        (LARGEST, 2.0**120),
    ],
)
def test_the_ulp_is_that_of_the_weights_binade(theta: float, ulp: float) -> None:
    assert float(reference.ulp(torch.tensor([theta], dtype=torch.float32))) == ulp
    assert bf16_ulp(np.array([theta], dtype=np.float32))[0] == ulp


def test_the_largest_numbers_do_not_overflow() -> None:
    largest = float(LARGEST)
    assert rounded(largest, largest, 16) == 2.0**128 - 2.0**116
    assert rounded(largest, -largest, 2) == -(2.0**128 - 2.0**119)
    assert rounded(1.0, largest, 2) == largest  # its neighbours are many steps away


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("value_steps", STEPS)
def test_no_home_overflows_at_the_largest_numbers(home: Any, value_steps: int) -> None:
    theta = torch.tensor([0.9, -0.9, 0.9, 0.5, 2.0**-60, 0.0]) * float(LARGEST)
    s = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0, 1.0]) * float(LARGEST)
    entries = home.encode(theta, [theta], s, Gate(value_steps=value_steps)).entries
    expected = in_steps(s.numpy(), theta.numpy(), value_steps)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(bits(entries.values), bits(expected))


# Of the ties each one, and every 29th, which has every exponent and every kind of tie.
of_ties = pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.check(ALL_VALUES))])


def finite_ties(every: int) -> Tensor:
    """Finite BF16 values with the low halves around a rounding tie."""
    low = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    values = (high[:, None] | low).reshape(-1).view(np.float32)
    return torch.from_numpy(values[np.isfinite(values)][::every].copy())


@of_ties
@pytest.mark.parametrize("value_steps", STEPS)
def test_steps_are_those_of_the_specification_in_numpy(value_steps: int, every: int) -> None:
    theta = finite_ties(every)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(theta.numel())
        near = (theta.view(torch.int32) + torch.from_numpy(order % 5 - 2).int()).view(torch.float32)
        s = torch.where(torch.from_numpy(order % 2 == 0) & near.isfinite(), near, theta[order])
        v = in_steps(s.numpy(), theta.numpy(), value_steps)
        got = reference.in_steps(theta, s, value_steps)
        np.testing.assert_array_equal(got.numpy(), v)  # as values: the sign of a zero is not sent


@pytest.mark.pairs
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    "every",
    [0, 29, pytest.param(1, marks=pytest.mark.check(ALL_VALUES))],
    ids=["usual", "every 29th of all bits", "any-bits"],
)
@pytest.mark.parametrize(("margin", "value_steps"), ECONOMIES)
def test_what_is_not_sent_stays_to_the_last_bit(
    home: Any, every: int, margin: float, value_steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent plus new residual is s; sent are visible, larger than the margin, whole steps, and not zero."""
    use_tiles_of(1 << 14, monkeypatch)
    rng = np.random.default_rng(1)
    if every:
        theta = finite_ties(every)
        s = theta[torch.from_numpy(rng.permutation(theta.numel()))] + 0.0  # no −0, which s never is
    else:
        theta = torch.from_numpy(rng.normal(0, 0.02, 20000).astype(np.float32))
        s = torch.from_numpy(rng.normal(0, 3e-5, 20000).astype(np.float32))
    n = theta.numel()
    gate = Gate(margin=margin, value_steps=value_steps)
    entries = home.encode(theta, [theta], s, gate).entries  # w = θ, so s is the residual
    left = s.clone()
    home.apply(theta.clone(), None, [theta.clone()], left, entries, [], PLAIN)

    where = entries.indices()
    sent = torch.zeros(n)
    sent[where] = entries.values
    np.testing.assert_array_equal(bits(sent + left), bits(s))
    ulp = bf16_ulp(theta.numpy())
    worth_it = reference.visible(theta, s, gate).numpy() & (
        s.abs().numpy() > np.float32(margin) * ulp.astype(np.float32)
    )
    if value_steps is None:
        expected = worth_it
        np.testing.assert_array_equal(bits(entries.values), bits(s[where]))
    else:
        expected = worth_it & (in_steps(s.numpy(), theta.numpy(), value_steps) != 0)
        steps = entries.values.double().numpy() / (ulp[where.numpy()] / value_steps)
        assert (steps == np.rint(steps)).all()
        assert steps.all()
    np.testing.assert_array_equal(sent.numpy() != 0, expected)
    assert 100 < expected.sum() < reference.visible(theta, s, Gate()).sum()


@pytest.mark.parametrize("home", HOMES)
def test_a_margin_past_everything_sends_nothing(home: Any) -> None:
    theta = torch.tensor([1.0, -3.0, float(LARGEST)])
    s = torch.tensor([5.0, 1e30, -float(LARGEST)])
    encoded = home.encode(theta, [theta], s, Gate(margin=2.0**127))
    assert encoded.entries.values.numel() == 0
    assert encoded.first_nonfinite == -1


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_update_is_found_under_both_economies(home: Any, value: float) -> None:
    theta = torch.full((1003,), 0.5)
    s = torch.full((1003,), 0.01)
    s[700] = value
    assert home.encode(theta, [theta], s, Gate(margin=0.5, value_steps=16)).first_nonfinite == 700


@pytest.mark.parametrize("home", HOMES)
def test_an_exact_value_leaves_plus_zero(home: Any) -> None:
    """s − s, where today's rounds wrote 0."""
    s = torch.tensor([1.0, -1.0, 1e-45, float(LARGEST), 0.25])
    own = Entries.at(torch.arange(4), s[:4].clone(), 5)
    left = s.clone()
    home.apply(torch.zeros(5), None, [torch.zeros(5)], left, own, [own], PLAIN)
    np.testing.assert_array_equal(bits(left), bits(torch.tensor([0.0, 0.0, 0.0, 0.0, 0.25])))
