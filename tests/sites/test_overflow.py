"""What the sites' updates add up to must be finite, and the answer must not depend on the exchange."""

from typing import Any

import pytest
import torch
from sites import error_of, run_ranks

import loco


def huge(rank: int, options: dict[str, Any], size: float) -> tuple[tuple[str, str], bool, int]:
    weight = torch.nn.Parameter(torch.full((600,), -size if rank < 2 else 0.0))
    with torch.no_grad():
        anchor = torch.zeros(600)
        moved = weight.clone()
        weight.copy_(anchor)
    optimizer = loco.PulseLoCo(torch.optim.SGD([weight], lr=1.0), outer_lr=0.1, outer_momentum=0.0, **options)
    with torch.no_grad():
        weight.copy_(moved)
    error = error_of(optimizer.sync)
    unchanged = bool((optimizer.outer_state.anchor == 0).all()) and torch.equal(weight.detach(), moved)
    with torch.no_grad():
        weight.zero_()
    optimizer.outer_state.residual.zero_()  # pyright: ignore[reportOptionalMemberAccess]
    return error, unchanged, optimizer.sync().round


@pytest.mark.parametrize("exchange", ["gather", "owner", "dense"])
def test_finite_updates_that_add_up_to_infinity_are_refused_by_every_exchange(exchange: str) -> None:
    for (kind, text), unchanged, rounds in run_ranks(3, huge, {"exchange": exchange}, 2.5e38):
        assert kind == "NonFiniteError"
        assert "the sites' updates add up to an infinite one" in text
        assert unchanged
        assert rounds == 1


@pytest.mark.parametrize("exchange", ["gather", "owner"])
def test_large_updates_whose_sum_is_finite_pass(exchange: str) -> None:
    for (kind, _), unchanged, rounds in run_ranks(3, huge, {"exchange": exchange}, 1e38):
        assert (kind, unchanged, rounds) == ("", False, 2)
