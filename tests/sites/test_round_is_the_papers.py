"""Multi-site runs through the library equal the specification (`paper.py`) bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from paper import Paper, to_bf16
from round_cases import CASES, NUMEL, SEED, Case, options_of, paper_of
from scripted import Scripted, bits, flat, move, parameters
from selection import PRODUCTS
from sites import run_ranks

import loco

ROUNDS = 4


def run_library(
    rank: int, cases: list[Case], device: str = "cpu", offload: bool = False
) -> list[list[dict[str, Any]]]:
    histories = []
    for case in cases:
        # Only site 0's initial weights count: the others must receive them.
        params = parameters(SEED if rank == 0 else 99 + rank, NUMEL, case.bf16)
        params = [torch.nn.Parameter(p.detach().to(device)) for p in params]
        optimizer = getattr(loco, case.kind)(
            Scripted(params, SEED, rank), offload=offload, **options_of(case)
        )
        history = []
        for step in range(ROUNDS * case.sync_every):
            optimizer.step()
            if (step + 1) % case.sync_every:
                continue
            outer = optimizer.outer_state
            snapshot = {
                "anchor": bits(outer.anchor.cpu()),
                "weights": bits(flat(params)),
                "entries": optimizer.last_report.entries,
            }
            if outer.momentum is not None:
                snapshot["momentum"] = bits(outer.momentum.cpu())
            if outer.residual is not None:
                snapshot["residual"] = bits(outer.residual.cpu())
            history.append(snapshot)
        histories.append(history)
    return histories


def run_paper(case: Case, sites: int) -> list[list[dict[str, Any]]]:
    """-> [round][site] snapshots"""
    paper = Paper(**paper_of(case, sites))
    rounds = []
    for n in range(ROUNDS):
        weights = []
        for site in range(sites):
            w = paper.cast(paper.anchor)
            for h in range(case.sync_every):
                d = move(SEED, site, n * case.sync_every + h, NUMEL, 3e-5)
                w = paper.cast(w - d)
            weights.append(w)
        sent = paper.round(weights)
        rounds.append(
            [
                {
                    "anchor": bits(paper.anchor),
                    "weights": bits(paper.cast(paper.anchor)),
                    "momentum": bits(paper.momentum),
                    "residual": bits(paper.residuals[site]),
                    "entries": sent[site],
                }
                for site in range(sites)
            ]
        )
    return rounds


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_rounds_on_a_gpu_equal_the_specification_bit_for_bit(offload: bool) -> None:
    assert_equal_the_specification(run_ranks(3, run_library, CASES, "cuda", offload))


@pytest.mark.check(PRODUCTS, sample="2")
@pytest.mark.parametrize("sites", [1, 2, 3, 4])
def test_rounds_equal_the_specification_bit_for_bit(sites: int) -> None:
    assert_equal_the_specification(run_ranks(sites, run_library, CASES))


def assert_equal_the_specification(by_rank: list[list[list[dict[str, Any]]]]) -> None:
    sites = len(by_rank)
    partial = 0
    for k, case in enumerate(CASES):
        for n, expected in enumerate(run_paper(case, sites)):
            for site in range(sites):
                got = by_rank[site][k][n]
                for what, value in got.items():
                    np.testing.assert_array_equal(
                        value, expected[site][what], f"{case}, round {n}, site {site}, {what}"
                    )
                partial += case.kind == "PulseLoCo" and 0 < got["entries"] < NUMEL
    # The comparison means something only where the gate lets some entries through and not others.
    assert partial >= sites * ROUNDS * 10


def test_the_papers_bf16_rounds_to_nearest_even() -> None:
    one, step = np.float32(1), np.float32(2**-7)  # BF16 has 8 significant bits
    x = np.array([1 + step / 2, 1 + 3 * step / 2, 1 + step * np.float32(0.5001), -0.0], dtype=np.float32)
    np.testing.assert_array_equal(to_bf16(x), [one, 1 + 2 * step, 1 + step, 0])
    assert np.isinf(to_bf16(np.array([3.4e38], dtype=np.float32)))[0]
    tiny = np.array([2.0**-133, 2.0**-134, 1.5 * 2.0**-133], dtype=np.float32)
    np.testing.assert_array_equal(to_bf16(tiny), np.array([2.0**-133, 0, 2.0**-132], dtype=np.float32))
