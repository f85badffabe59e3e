"""Small sums stay with their owner: `sums_margin`, which `paper.py` states bit for bit."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scripted import Scripted, parameters
from selection import PRODUCTS
from sites import run_ranks
from torch import Tensor

import loco
from loco import kernels
from loco.kernels import reference
from loco.wire.framing import slices_of

NUMEL, ROUNDS, SITES = 1700, 6, 3  # slices of 768, 768 and 164 elements
ECONOMIES: dict[str, Any] = {"gate_gain": 2.0, "gate_margin": 0.1, "value_steps": 4}
Exact = list[Fraction]


def exact(values: Tensor) -> Exact:
    return [Fraction(float(value)) for value in values]


def dense(entries: kernels.Entries, numel: int = NUMEL) -> Tensor:
    found = torch.zeros(numel)
    found[entries.indices()] = entries.values
    return found


def plus(a: Exact, b: Exact) -> Exact:
    return [x + y for x, y in zip(a, b, strict=True)]


def run(rank: int, margin: float | None) -> dict[str, Any]:
    """-> what came in at this site, what all sites were sent, what stayed here, and the bytes received"""
    inner = Scripted(parameters(5, NUMEL), 5, rank)
    options = ECONOMIES | {"outer_lr": 4.0, "outer_momentum": 0.0, "sync_every": 2}
    optimizer = loco.PulseLoCo(inner, sums_margin=margin, exchange="owner", **options)
    outer = optimizer.outer_state
    assert outer.residual is not None
    brought, moved = exact(torch.zeros(NUMEL)), exact(torch.zeros(NUMEL))
    kept = torch.zeros(NUMEL, dtype=torch.bool)  # what was ever more than this site's own
    received = 0

    def count(progress: loco.RoundProgress) -> None:
        nonlocal brought, moved
        if progress.phase == "encoded":
            assert outer.residual is not None
            with outer.parameters.pieces(outer.start, outer.stop) as weights:
                s = reference.encode(outer.anchor, weights, outer.residual, None).entries.values
            # Its own Δ: s = Δ + e, of which no bit was lost.
            brought = plus(brought, [a - b for a, b in zip(exact(s), exact(outer.residual), strict=True)])
            of_site.append(s)
        if progress.phase == "committed":
            assert progress.entries is not None
            contributions = [dense(one) for one in progress.contributions]
            moved = plus(moved, exact(torch.stack(contributions).double().sum(0)))
            entries.append(dense(progress.entries))

    of_site: list[Tensor] = []
    entries: list[Tensor] = []
    optimizer.register_round_hook(count)
    for _ in range(ROUNDS):
        optimizer.step()
        optimizer.step()
        own = of_site[-1] - entries[-1]
        kept |= outer.residual != own
        assert optimizer.last_report is not None
        received += optimizer.last_report.received_bytes
    return {
        "brought": brought,
        "moved": moved,
        "left": exact(outer.residual),
        "kept": kept.numpy(),
        "anchor": outer.anchor.clone().numpy(),
        "received": received,
    }


@pytest.mark.check(PRODUCTS)
def test_no_bit_is_lost_and_only_the_owner_keeps_a_sum() -> None:
    found = run_ranks(SITES, run, 0.3)
    total = [exact(torch.zeros(NUMEL))] * 2
    for site in found:
        total = [plus(total[0], site["brought"]), plus(total[1], site["left"])]
        np.testing.assert_array_equal(site["anchor"], found[0]["anchor"])
        assert site["moved"] == found[0]["moved"]
    assert total[0] == plus(found[0]["moved"], total[1])
    for site, mine in zip(found, slices_of(NUMEL, SITES), strict=True):
        assert site["kept"].sum() > 0.05 * (mine.stop - mine.start)
        assert not np.delete(site["kept"], range(mine.start, mine.stop)).any()


@pytest.mark.check(PRODUCTS)
def test_fewer_sums_come_back() -> None:
    every, some = run_ranks(SITES, run, None), run_ranks(SITES, run, 0.3)
    assert not any(site["kept"].any() for site in every)
    for before, after in zip(every, some, strict=True):
        assert after["received"] < 0.9 * before["received"]


def alone(rank: int, margin: float) -> tuple[Any, Any]:
    found = run(rank, margin)
    return found["brought"], plus(found["moved"], found["left"])


def test_a_site_that_is_alone_keeps_small_sums_too() -> None:
    ((brought, accounted),) = run_ranks(1, alone, 1.0)
    assert brought == accounted


@pytest.mark.parametrize("is_whole", [False, True], ids=["some entries", "all elements"])
def test_a_sum_of_the_margin_itself_stays(is_whole: bool) -> None:
    anchor = torch.tensor([1.0, 1.0, 1.0, 1.0, -3.0, 0.0, 1.0])  # a BF16 ulp of 1 is 2^-7, of 3 it is 2^-6
    values = torch.tensor([2.0**-8, 2.0**-8 + 2.0**-20, -(2.0**-8), -(2.0**-7), 2.0**-7, 2.0**-140, 0.0])
    sums = kernels.Entries.whole(values.clone())
    if not is_whole:
        sums = kernels.Entries.at(torch.arange(7), values, 7)
    leave, stay = kernels.add_and_split([sums], anchor, 0.5)
    expected = torch.tensor([0.0, 2.0**-8 + 2.0**-20, 0.0, -(2.0**-7), 0.0, 0.0, 0.0])
    assert torch.equal(leave.values if is_whole else dense(leave, 7), expected)
    assert torch.equal(dense(stay, 7), values - expected)
    assert torch.equal(sums.values, values)  # it is read only
