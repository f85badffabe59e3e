"""What overlapped rounds do to the entries that were sent: every build has the reference's bits."""

from typing import Any

import numpy as np
import pytest
import torch
from homes import builds, same_bits
from torch import Tensor

from loco.kernels import Entries, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def state(n: int, seed: int) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """θ, pieces of w, e and some values, of any exponents."""
    rng = np.random.default_rng(seed)

    def some(low: int, high: int) -> Tensor:
        values = rng.standard_normal(n) * 2.0 ** rng.integers(low, high, n)
        return torch.from_numpy(values.astype(np.float32))

    theta = some(-140, 10)
    theta[torch.from_numpy(rng.random(n) < 0.05)] = 0.0
    sizes = [n // 3, 0, n // 2 - n // 3, n - n // 2]
    pieces = [
        t.to(dtype) for t, dtype in zip(some(-140, 10).split(sizes), (*DTYPES[:2], *DTYPES[1:]), strict=True)
    ]
    return theta, pieces, some(-150, 0), some(-150, 0)


@pytest.mark.parametrize("home", builds())
@pytest.mark.parametrize("beta", [0.0, 1.0, 1.3])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 1.0, None])
@pytest.mark.parametrize("n", [0, 1, 63, 1003, 50_000])
def test_what_was_sent_is_sent_off_and_collected_as_by_the_reference(
    home: Any, beta: float, density: float | None, n: int
) -> None:
    found = []
    for ops in (home, reference):
        theta, weights, residual, values = state(n, 7)
        entries = Entries.whole(values)
        if density is not None:
            where = (torch.rand(n, generator=torch.Generator().manual_seed(n)) < density).nonzero().view(-1)
            entries = Entries.at(where, values[where], n)
        squares = ops.send_off(theta, weights, residual, entries, beta)
        sent = [residual.clone(), *(w.clone() for w in weights)]
        for w in weights:
            w.add_(w.abs() * 0.01)
        ops.collect_sent(theta, weights, residual, entries, beta)
        found.append(([*sent, theta, residual, *weights], squares))
    (one, some), (other, expected) = found
    same_bits(one, other)
    assert some == pytest.approx(expected, rel=1e-9)  # another order of additions


def test_entries_go_off_and_come_back_exactly() -> None:
    """With no step between, e is s again and w is cast(θ)."""
    theta, weights, residual, values = state(1003, 3)
    values = residual.clone()  # s − v = 0, which is exact
    reference.write_weights(theta, weights)
    before = residual.clone(), [w.clone() for w in weights]
    entries = Entries.at(torch.arange(0, 1003, 5), values[::5].clone(), 1003)
    reference.send_off(theta, weights, residual, entries, 1.0)
    assert not residual[::5].any()
    reference.collect_sent(theta, weights, residual, entries, 1.0)
    assert not residual[::5].any()  # what is on its way is not in e
    kept = torch.ones(1003, dtype=torch.bool)
    kept[::5] = False
    assert torch.equal(residual[kept], before[0][kept])
    for w, expected in zip(weights, before[1], strict=True):
        assert torch.equal(w, expected)
