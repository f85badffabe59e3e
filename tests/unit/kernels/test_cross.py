"""The boundary of overlapped rounds in one pass: every build has the bits of the separate passes."""

from typing import Any

import numpy as np
import pytest
import torch
from homes import builds, same_bits
from torch import Tensor

from loco.kernels import BLOCK, Entries, Gate, OuterStep, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEP = OuterStep(divisor=3.3, factor=1.37, lr=0.7, momentum=0.9, nesterov=True)
GATES = {
    "bf16": Gate(),
    "fp8, economies": Gate(dtype=torch.float8_e4m3fn, gain=2.0, margin=0.4, value_steps=8),
    "open": None,
}


def some(n: int, seed: int, low: int = -140, high: int = 10) -> Tensor:
    """Values of any exponents."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.standard_normal(n) * 2.0 ** rng.integers(low, high, n)).astype(np.float32))


def entries(n: int, density: float | None, seed: int) -> Entries | None:
    """None: all elements; below 0: no entries at all."""
    values = some(n, seed, -150, 0)
    if density is None:
        return Entries.whole(values)
    if density < 0:
        return None
    where = (torch.rand(n, generator=torch.Generator().manual_seed(seed)) < density).nonzero().view(-1)
    return Entries.at(where, values[where], n)


def state(n: int) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """θ, m, pieces of w and e. w is near cast(θ), as after inner steps."""
    theta = some(n, 7)
    theta[torch.from_numpy(np.random.default_rng(5).random(n) < 0.05)] = 0.0
    moved = theta * (1 + some(n, 8, -12, -6))
    sizes = [n // 3, 0, n // 2 - n // 3, n - n // 2]
    pieces = [
        part.to(dtype) for part, dtype in zip(moved.split(sizes), (*DTYPES[:2], *DTYPES[1:]), strict=True)
    ]
    return theta, some(n, 9, -150, 0), pieces, some(n, 10, -150, -4)


@pytest.mark.parametrize("home", builds())
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("sent", [-1.0, 0.02, 1.0, None])
@pytest.mark.parametrize("n", [0, 1, 1003, 50_000])
def test_a_boundary_is_its_separate_passes(home: Any, gate: str, sent: float | None, n: int) -> None:
    found = []
    contributions = [one for seed in range(2) if (one := entries(n, sent, 20 + seed)) is not None]
    for cross in (home.cross, lambda *args, **kinds: reference.cross(reference, *args, **kinds)):
        theta, m, weights, residual = state(n)
        v, bits = entries(n, sent, 3), []
        for sends in (True, True, False):
            outer = theta, m, weights, residual
            back = [] if sends is False else contributions
            boundary = *outer, v, contributions, STEP, GATES[gate], 1.3
            encoded, norm = cross(*boundary, returned=back, sends=sends)
            v = encoded.entries
            bits += [*v, *(x.clone() for x in (theta, m, residual, *weights))]
            bits += [torch.tensor([encoded.digest - 2**63, encoded.first_nonfinite])]
            assert norm == pytest.approx(
                float(residual.double().norm()), rel=1e-9
            )  # another order of additions
            for w in weights:
                w.add_(w.abs() * 2.0**-7)
                w[5::211] = float("nan")
                w[100::307] = float("-inf")
        found.append([x for x in bits if x is not None])
    same_bits(*found)


@pytest.mark.parametrize("home", [*builds(), pytest.param(reference, id="reference")])
def test_what_is_returned_is_in_e_before_anything_else(home: Any) -> None:
    passes = (home,) * (home is reference)
    returned = [entries(1003, 0.1, 5), entries(1003, None, 6)]
    found = []
    for is_added_before in (True, False):
        theta, m, weights, residual = state(1003)
        for part in returned:
            assert part is not None
            if is_added_before:
                dense = torch.zeros(1003)
                dense[slice(None) if part.starts is None else part.indices()] = part.values
                residual += dense
        boundary = theta, m, weights, residual, None, [], STEP, Gate(), 1.0
        encoded, _ = home.cross(*passes, *boundary, returned=[] if is_added_before else returned)
        found.append([theta, m, residual, *weights, *encoded.entries])
    same_bits(*found)


STILL = OuterStep(divisor=1, lr=0.0, momentum=0.0, nesterov=False)


@pytest.mark.parametrize("home", builds())
def test_where_no_round_has_come_theta_stays(home: Any) -> None:
    theta, _, weights, residual = state(1003)
    before = theta.clone()
    home.cross(theta, None, weights, residual, None, [], STILL, Gate(), 1.0)
    same_bits([theta], [before])


@pytest.mark.parametrize("home", builds())
def test_what_was_sent_is_not_in_e_and_what_was_not_is(home: Any) -> None:
    """s = v + e, bit for bit, and the weights run ahead by what was sent."""
    theta, _, weights, residual = state(1003)
    s = reference.encode(theta, weights, residual, None).entries.values.clone()
    encoded, _ = home.cross(
        theta, None, weights, residual, None, [], STILL, Gate(margin=0.3, value_steps=8), 1.0
    )
    v = torch.zeros(1003)
    v[encoded.entries.indices()] = encoded.entries.values
    assert 0 < encoded.entries.length < 1003
    same_bits([residual], [s - v])
    expected = theta - v
    for w, part in zip(weights, expected.split([w.numel() for w in weights]), strict=True):
        same_bits([w], [reference.cast(part, w.dtype)])


@pytest.mark.parametrize("home", [*builds(), pytest.param(reference, id="reference")])
@pytest.mark.parametrize("sent", [-1.0, 0.02, None])
def test_a_weight_that_was_changed_is_found(home: Any, sent: float | None) -> None:
    n = 4 * BLOCK + 77
    theta, _, weights, _ = state(n)
    v = entries(n, sent, 3)
    dense = torch.zeros(n)
    if v is not None:
        dense[slice(None) if v.starts is None else v.indices()] = v.values
    expected = theta - 1.3 * dense if v is not None else theta
    parts = [part.clone() for part in expected.split([w.numel() for w in weights])]
    weights = [reference.cast(part, w.dtype) for part, w in zip(parts, weights, strict=True)]
    weights[0][weights[0] == 0.0] = -0.0  # the same value
    assert home.first_changed(theta, weights, v, 1.3) == -1
    starts = [0, *torch.tensor([w.numel() for w in weights]).cumsum(0).tolist()]
    for k, at in ((0, 0), (2, 1), (3, weights[3].numel() - 1)):
        old = weights[k][at].clone()
        for value in (old.abs() * 2 + 1, torch.tensor(float("nan"))):
            weights[k][at] = value
            position = home.first_changed(theta, weights, v, 1.3)
            assert starts[k] <= position <= starts[k] + at
        weights[k][at] = old
    assert home.first_changed(theta, weights, v, 1.3) == -1


@pytest.mark.parametrize("home", [*builds(), pytest.param(reference, id="reference")])
def test_a_weight_that_is_not_finite_begins_from_theta_again_and_is_named(home: Any) -> None:
    def cross(*args: Any) -> Any:
        return home.cross(*(home,) * (home is reference), *args)

    theta, _, weights, residual = state(1003)
    e = residual.clone()
    weights[2][3], weights[3][7] = float("nan"), float("inf")
    at = [weights[0].numel() + 3, weights[0].numel() + weights[2].numel() + 7]
    v = Entries.at(torch.tensor(at[:1]), torch.tensor([0.5]), 1003)  # one of them was on its way
    encoded, norm = cross(theta, None, weights, residual, v, [], STILL, Gate(), 1.0)
    assert encoded.first_nonfinite == at[0]
    sent = torch.zeros(1003)
    sent[encoded.entries.indices()] = encoded.entries.values
    same_bits([(residual + sent)[at]], [0.0 + e[at]])
    assert bool(residual.isfinite().all())
    assert norm < float("inf")
    for w, k in ((weights[2], 3), (weights[3], 7)):
        assert bool(w[k].isfinite())
