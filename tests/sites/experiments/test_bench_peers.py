"""The benchmark beside other people's optimizers: its baselines do what they are said to."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from selection import BASELINES

from experiments.bench import others, peers
from experiments.bench.measuring import read
from experiments.processes.sites import Sites

ROUNDS = 3


@pytest.mark.check(BASELINES)
def test_torchfts_diloco_and_ours_learn_the_same() -> None:
    """Their sums differ in the order of additions, and so in the last bits: by less than a thousandth of what
    the rounds have moved."""
    pytest.importorskip("torchft", reason="needs torchft: pip install '.[elastic]'")
    methods = [peers.TORCHFT, "loco.DiLoCo"]
    with ExitStack() as stack:
        lighthouse = others.start_lighthouse(stack, 2)
        sites = stack.enter_context(Sites(2, peers.Contender, 5000, methods, lighthouse))
        before = sites.call("weights", "loco.DiLoCo")[0]
        before = [weight.clone() for weight in before]
        for _ in range(ROUNDS):
            for method in methods:
                sites.call("train", method)
                sites.call("round", method)
        found = {method: sites.call("weights", method) for method in methods}
    for method in methods:
        for mine, theirs in zip(*found[method], strict=True):
            assert torch.equal(mine, theirs)
    moved = [(now - then).norm() for now, then in zip(found["loco.DiLoCo"][0], before, strict=True)]
    apart = [(a - b).norm() for a, b in zip(*(found[method][0] for method in methods), strict=True)]
    assert all(far > 0 and near < 1e-3 * far for far, near in zip(moved, apart, strict=True))


@pytest.mark.check(BASELINES)
def test_post_local_sgd_leaves_the_mean_of_all_weights() -> None:
    method = "PostLocalSGD"
    with Sites(2, peers.Contender, 5000, [method], "") as sites:
        sites.call("train", method)
        before = [[weight.clone() for weight in of_site] for of_site in sites.call("weights", method)]
        sites.call("round", method)
        after = sites.call("weights", method)
    for a, b, *found in zip(*before, *after, strict=True):
        assert not torch.equal(a, b)
        for mean in found:
            assert torch.equal(mean, a / 2 + b / 2)


@pytest.mark.check(BASELINES)
def test_a_row_for_each_method_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="needs torchft: pip install '.[elastic]'")
    peers.main(["--numel", "5000", "--sites", "2", "--rounds", "3", "--warm-up", "2", "--out", str(tmp_path)])
    rows = {row["method"]: row for row in read(tmp_path / "peers.csv")}
    assert list(rows) == peers.USUAL
    assert all(row["p50"] > 0 and row["cpu_s"] > 0 for row in rows.values())
    assert rows[peers.TORCHFT]["over_torchft"] == rows[peers.ALL_REDUCE]["over_all_reduce"] == 1.0
    assert rows["loco.DiLoCo"]["sent_bytes"] > 4 * 5000 > rows["γ 1"]["sent_bytes"] > 0
    assert (tmp_path / "peers.png").exists()


@pytest.mark.check(BASELINES)
def test_groups_of_sites_that_run_at_once_make_one_row(tmp_path: Path) -> None:
    few = ["--numel", "5000", "--sites", "2", "--rounds", "3", "--warm-up", "1", "--processes", "5"]
    peers.main([*few, "--methods", peers.OWNER, "--out", str(tmp_path)])
    (row,) = read(tmp_path / "peers.csv")
    assert (row["sites"], row["groups"], row["exchange"], row["wire"]) == (2, 2, "owner", "fast")
    assert row["cpu_s"] > 0
