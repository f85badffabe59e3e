"""The defence against a site gone wild: it is left out of the round on all sites alike, and loses nothing."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scripted import Scripted, parameters
from selection import PRODUCTS
from sites import error_of, run_ranks
from states import assert_same, snapshot

import loco
from loco.round.announcements import outliers
from loco.wire.records import Announcement, fp32_bits


@pytest.mark.parametrize(
    ("norms", "factor", "expected"),
    [
        ([1.0, 1.0, 1.0, 1e6], 10.0, (3,)),
        ([1.0, 1.0, 1.0, 9.9], 10.0, ()),
        ([1.0, 1.0, 1.0, 10.1], 10.0, (3,)),
        ([1e6, 1.0, 2.0, 1e7], 10.0, (0, 3)),  # the median of the others is a good one's, or their mean
        ([1.0, 1e6], 10.0, (1,)),
        ([1.0, 1.0, 1.0, 1e-6], 10.0, ()),  # small is harmless
        ([1.0, 1.0, math.inf], 10.0, (2,)),
        ([1.0, 1.0, math.nan], 10.0, (2,)),
        ([0.0, 0.0, 1.0], 10.0, ()),  # the others have sent nothing: no measure of too much
        ([5.0], 10.0, ()),
        ([1.0, 1.0, 1e6], None, ()),
    ],
)
def test_an_outlier_is_far_above_the_median_of_the_others(
    norms: list[float], factor: float | None, expected: tuple[int, ...]
) -> None:
    assert outliers([announced(norm) for norm in norms], factor) == expected


def announced(norm: float, weight: float = 1.0) -> Announcement:
    return Announcement(site=0, round=1, norm_bits=fp32_bits(norm), weight_bits=fp32_bits(weight))


def test_a_site_that_counts_more_is_no_outlier_for_that() -> None:
    assert outliers([announced(1.0), announced(1.0), announced(12.0, 12.0)], 10.0) == ()
    assert outliers([announced(1.0), announced(1.0), announced(12.0, 1.0)], 10.0) == (2,)


class Wild(Scripted):
    """One site's second round is a million times too large."""

    def step(self, closure: Any = None) -> Any:
        self.scale = 30.0 if self.site == 1 and self.count in (2, 3) else 3e-5
        return super().step(closure)


def defended(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    def build(optimizer_class: type[Scripted], site: int, **more: Any) -> loco.PulseLoCo:
        inner = optimizer_class(parameters(3, 1003), 3, site)
        return loco.PulseLoCo(inner, sync_every=2, outer_momentum=0.0, **options, **more)

    hurt = build(Wild, rank, outlier_factor=20.0)
    calm = build(Scripted, rank, outlier_factor=20.0)
    reports: list[loco.SyncReport] = []
    before, after = snapshot(hurt), snapshot(hurt)
    for step in range(6):
        if step == 3:
            hurt.inner.step()
            before = snapshot(hurt)
            reports.append(hurt.sync())
            after = snapshot(hurt)
        else:
            hurt.step()
        calm.step()
    assert calm.last_report is not None
    return {
        "left_out": reports[0].left_out,
        "norms": reports[0].update_norms,
        "entries": reports[0].entries,
        "before": before,
        "after": after,
        "end": snapshot(hurt),
        "calm left out": calm.last_report.left_out,
        "text": str(reports[0]),
    }


@pytest.mark.check(PRODUCTS, sample="options0")
@pytest.mark.parametrize(
    "options", [{"exchange": "gather"}, {"exchange": "owner", "wire": "tight"}, {"exchange": "dense"}]
)
def test_a_wild_site_is_left_out_and_keeps_its_update(options: dict[str, Any]) -> None:
    results = run_ranks(3, defended, options)
    for result in results:
        assert result["left_out"] == ("1",)
        assert result["calm left out"] == ()
        assert result["norms"] == results[0]["norms"]  # all sites were told the same
        assert result["norms"][1] > 1000 * max(result["norms"][0], result["norms"][2])
        assert "without site 1" in result["text"]
        np.testing.assert_array_equal(result["after"]["anchor"], results[0]["after"]["anchor"])
        moved = np.abs(_fp32(result["after"]["anchor"]) - _fp32(result["before"]["anchor"])).max()
        assert 0 < moved < 1e-2  # by the other two
    wild = results[1]
    assert wild["entries"] == 0
    before = wild["before"]
    kept = (_fp32(before["anchor"]) - _fp32(before["weights"])) + _fp32(before["residual"])
    np.testing.assert_array_equal(_fp32(wild["after"]["residual"]), kept)  # s, whole, bit for bit


def _fp32(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float32)


def of_two_ranks(rank: int) -> dict[str, Any]:
    """Sites of two ranks; only one rank's slice of site 1 has run wild."""
    topology = loco.Topology(ranks_per_site=2)
    inner = Scripted(parameters(3, 2003), 3, topology.site)
    optimizer = loco.PulseLoCo(inner, sync_every=1, topology=topology, outlier_factor=20.0)
    inner.step()
    if topology.site == 1:
        inner.param_groups[0]["params"][0].data.add_(100.0)  # lies in the first half of the vector
    report = optimizer.sync()
    return {"left_out": report.left_out, "norms": report.update_norms, "entries": report.entries}


@pytest.mark.check(PRODUCTS)
def test_a_site_of_several_ranks_is_left_out_whole() -> None:
    results = run_ranks(6, of_two_ranks)
    for rank, result in enumerate(results):
        assert result["left_out"] == ("1",)
        assert result["norms"] == results[0]["norms"]
        assert (result["entries"] == 0) == (rank in (2, 3))


def without_defence(rank: int) -> dict[str, Any]:
    runs = []
    for factor in (None, 1e30):
        inner = Scripted(parameters(3, 1003), 3, rank)
        optimizer = loco.PulseLoCo(inner, sync_every=2, outlier_factor=factor)
        for _ in range(4):
            optimizer.step()
        runs.append(snapshot(optimizer))
    return {"off": runs[0], "never": runs[1]}


def test_a_defence_that_leaves_nobody_out_changes_nothing() -> None:
    for result in run_ranks(3, without_defence):
        assert_same(result["off"], result["never"])


def refused(rank: int) -> list[tuple[str, str]]:
    def build(**options: Any) -> Any:
        return loco.PulseLoCo(torch.optim.SGD(parameters(3, 100), lr=0.1), **options)

    return [
        error_of(lambda: build(outlier_factor=1.0)),
        error_of(lambda: build(outlier_factor=10.0, gate="open")),
    ]


def test_a_factor_that_makes_no_sense_is_refused() -> None:
    small, open_gate = run_ranks(1, refused)[0]
    assert small == ("ValueError", "outlier_factor must be None or > 1, got 1.0")
    assert open_gate[0] == "ValueError"
    assert open_gate[1].startswith("outlier_factor leaves a site's update in its residual, and with gate=")
