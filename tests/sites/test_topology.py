"""Sites of several ranks: gradients averaged inside by DDP, each rank exchanging its slice across."""

import io
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from selection import CHECKPOINTS, PRODUCTS
from sites import error_of, run_ranks
from states import Snapshot, assert_same, snapshot
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import loco
from loco.round import inside_site

STEPS, H = 7, 2


def net(width: int = 15) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 3))
    last = model.get_parameter("2.weight")
    last.data = last.data.t().contiguous().t()  # stored by columns: not contiguous
    return model


def gradient_step(model: nn.Module, optimizer: Any, batch: int, step: int) -> None:
    optimizer.zero_grad()
    backward(model, batch, step)
    optimizer.step()


def backward(model: nn.Module, batch: int, step: int) -> None:
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * batch + step))
    model(x).square().mean().backward()


def build(model: nn.Module, kind: str, topology: loco.Topology | None = None) -> Any:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return getattr(loco, kind)(inner, sync_every=H, topology=topology)


def two_by_two(rank: int, kind: str, chunk: int) -> dict[str, Any]:
    inside_site.GATHER_ELEMENTS = chunk  # this process's own
    topology = loco.Topology(ranks_per_site=2)
    assert (topology.site, topology.rank_in_site, topology.num_sites) == (rank // 2, rank % 2, 2)
    model = DistributedDataParallel(net(), process_group=topology.site_group)
    optimizer = build(model, kind, topology)
    for step in range(STEPS):
        gradient_step(model, optimizer, batch=rank, step=step)
    return {"state": snapshot(optimizer), "report": optimizer.last_report}


def one_rank_per_site(rank: int, kind: str) -> dict[str, Any]:
    """The same run on two ranks, each doing by hand what a site of two does."""
    model = net()
    optimizer = build(model, kind)
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in (2 * rank, 2 * rank + 1):
            backward(model, batch, step)
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= 2  # exact, as is DDP's division of each gradient before its sum
        optimizer.step()
    return {"state": snapshot(optimizer), "report": optimizer.last_report}


@pytest.mark.check(PRODUCTS, sample=r"PulseLoCo.*")
@pytest.mark.parametrize(("kind", "chunk"), [("PulseLoCo", 1 << 20), ("DiLoCo", 7)])
def test_two_sites_of_two_ranks_equal_two_sites_of_one(kind: str, chunk: int) -> None:
    sites = run_ranks(2, one_rank_per_site, kind)
    ranks = run_ranks(4, two_by_two, kind, chunk)
    numel = sites[0]["report"].numel
    for rank, result in enumerate(ranks):
        whole, mine = sites[rank // 2]["state"], result["state"]
        half = -(-numel // 2)
        part = slice(0, half) if rank % 2 == 0 else slice(half, numel)
        np.testing.assert_array_equal(mine.pop("weights"), whole["weights"])
        assert_same(mine, {name: whole[name][part] for name in mine})
        # In a site: a digest, a norm and a weight; a refusal, a vote, half of the anchor (the larger one).
        assert result["report"].site_bytes == 20 + 2 * 64 + 4 * half
    for which in (0, 1):
        pair = [ranks[2 * which + place]["report"] for place in (0, 1)]
        assert sum(report.numel for report in pair) == numel
        assert sum(report.entries for report in pair) == sites[which]["report"].entries


def more_ranks_than_elements(rank: int) -> list[float]:
    param = nn.Parameter(torch.arange(2.0))
    topology = loco.Topology(ranks_per_site=3)
    optimizer = loco.DiLoCo(
        torch.optim.SGD([param], lr=1.0), sync_every=1, outer_lr=1.0, outer_momentum=0.0, topology=topology
    )
    param.grad = torch.full((2,), 0.5)
    optimizer.step()
    return param.tolist()


def test_a_rank_may_have_nothing_to_exchange() -> None:
    assert run_ranks(3, more_ranks_than_elements) == [[-0.5, 0.5]] * 3


def no_ddp(rank: int) -> tuple[tuple[str, str], Snapshot, Snapshot]:
    topology = loco.Topology(ranks_per_site=2)
    model = net()
    optimizer = build(model, "PulseLoCo", topology)
    gradient_step(model, optimizer, batch=0, step=0)
    if rank == 3:  # one weight of the last parameter, on one rank of site 1
        model.get_parameter("2.bias").data[-1] += 1e-3
    before = snapshot(optimizer)
    return error_of(optimizer.sync), before, snapshot(optimizer)


def test_a_site_whose_ranks_drift_apart_is_named_everywhere() -> None:
    for (kind, text), before, after in run_ranks(4, no_ddp):
        assert kind == "ReplicaError"
        assert text.startswith("round 1, site 1: its ranks hold different weights. Wrap the model")
        assert_same(before, after)


def no_weight(rank: int) -> tuple[tuple[str, str], Snapshot, Snapshot]:
    topology = loco.Topology(ranks_per_site=2)
    model = net()
    optimizer = build(model, "PulseLoCo", topology)
    gradient_step(model, optimizer, batch=0, step=0)
    if rank == 3:
        optimizer.weight = 3
    before = snapshot(optimizer)
    return error_of(optimizer.sync), before, snapshot(optimizer)


def test_ranks_of_a_site_that_count_differently_are_refused() -> None:
    for rank, ((kind, text), before, after) in enumerate(run_ranks(4, no_weight)):
        assert kind == ("PeerError" if rank < 2 else "ValueError")
        told = "round 1, site 1 failed" if rank < 2 else "the ranks of this site set its weight to 1, 3: set"
        assert text.startswith(told)
        assert_same(before, after)


def bad_slice(rank: int) -> tuple[str, str]:
    """Only one rank of one site can see the problem; all must learn of it."""
    topology = loco.Topology(ranks_per_site=2)
    model = net()
    optimizer = build(model, "PulseLoCo", topology)
    if topology.site == 1:  # both ranks of the site hold the NaN, in the slice of its second rank
        model.get_parameter("2.bias").data[-1] = float("nan")
    return error_of(optimizer.sync)


def test_a_problem_in_one_slice_stops_the_round_on_all_ranks() -> None:
    for kind, text in run_ranks(4, bad_slice):
        assert kind == "NonFiniteError"
        assert text.startswith("round 1, site 1: the update of group0.param3 is infinite or NaN")


def flipped_slice(rank: int) -> tuple[str, str]:
    topology = loco.Topology(ranks_per_site=2)
    optimizer = build(net(), "PulseLoCo", topology)
    if rank == 3:
        optimizer.outer_state.anchor.view(torch.int32)[5] ^= 1
    return error_of(optimizer.sync)


def test_a_drifted_anchor_slice_stops_the_round_on_all_ranks() -> None:
    for rank, (kind, text) in enumerate(run_ranks(4, flipped_slice)):
        assert kind == "ReplicaError"
        if rank % 2:
            assert "the sites' anchors differ (site 0 holds" in text
        else:
            assert "site 1 is in another round or holds another anchor" in text


def resumed_site(rank: int) -> tuple[Snapshot, Snapshot]:
    topology = loco.Topology(ranks_per_site=2)

    def fresh(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = net()
        if seed:
            for p in model.parameters():
                nn.init.normal_(p)
        model = DistributedDataParallel(model, process_group=topology.site_group)
        return model, build(model, "PulseLoCo", topology)

    def go(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            gradient_step(model, optimizer, batch=rank, step=step)

    whole = fresh(0)
    go(*whole, range(STEPS))
    first = fresh(0)
    go(*first, range(3))
    file = io.BytesIO()
    torch.save(first[1].state_dict(), file)
    file.seek(0)
    second = fresh(1)
    second[1].load_state_dict(torch.load(file, weights_only=True))
    go(*second, range(3, STEPS))
    return snapshot(whole[1]), snapshot(second[1])


@pytest.mark.check(CHECKPOINTS)
def test_resuming_a_site_of_two_ranks_equals_never_stopping() -> None:
    for whole, pieced in run_ranks(4, resumed_site):
        assert_same(whole, pieced)


def bad_worlds(rank: int) -> list[tuple[str, str]]:
    return [
        error_of(lambda: loco.Topology(ranks_per_site=2)),
        error_of(lambda: loco.Topology(ranks_per_site=0)),
        error_of(lambda: loco.Topology(timeout=0)),
    ]


def test_worlds_that_do_not_divide_are_refused() -> None:
    for errors in run_ranks(3, bad_worlds):
        assert [text for _, text in errors] == [
            "the world's 3 ranks can't be divided into sites of 2: ranks_per_site must divide the world size",
            "ranks_per_site must be >= 1, got 0",
            "timeout must be > 0 seconds, got 0",
        ]


def test_without_a_process_group_it_says_how_to_launch() -> None:
    assert not dist.is_initialized()
    for kind in (loco.PulseLoCo, loco.DiLoCo):
        with pytest.raises(ValueError, match=r"\(torchrun --nproc-per-node 4 your_script\.py; RANK is"):
            kind(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def sites_of_one_have_a_group(rank: int) -> list[int]:
    topology = loco.Topology()
    sums = torch.tensor([rank + 1])
    dist.all_reduce(sums, group=topology.site_group)
    return [dist.get_world_size(topology.site_group), int(sums)]


def test_the_site_group_of_a_site_of_one_is_that_rank_alone() -> None:
    """None would mean all ranks to DDP, and silently train something else."""
    assert run_ranks(2, sites_of_one_have_a_group) == [[1, 1], [1, 2]]
