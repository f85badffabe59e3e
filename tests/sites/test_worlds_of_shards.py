"""FSDP2 inside sites that each have a world of their own, and evaluations of θ between its steps."""

from typing import Any

import numpy as np
import pytest
import torch
from scripted import bits
from selection import SHARDINGS
from sharded import Tied, assert_equal, batch, build, divide, shard_of_whole, site_mesh, state, step_of
from sites import run_ranks, run_worlds
from torch.distributed.device_mesh import init_device_mesh

import loco

STEPS = 5


def trained(topology: loco.SiteTopology, model: Tied) -> Any:
    optimizer = build(model, "PulseLoCo", topology)
    for step in range(STEPS):
        step_of(model, optimizer, topology.site, step)
    return optimizer


def whole(rank: int) -> Any:
    return state(trained(loco.Topology(), Tied()))


def in_a_world_of_shards(rank: int, expected: list[Any]) -> tuple[int, int]:
    topology, model = loco.Sites(), Tied()
    divide(model, init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    optimizer = trained(topology, model)
    assert_equal(state(optimizer), shard_of_whole(expected[topology.site], optimizer))
    return optimizer.outer_state.numel, optimizer.last_report.site_bytes


@pytest.mark.check(SHARDINGS)
def test_worlds_of_two_shards_equal_sites_that_are_not_divided() -> None:
    expected = run_ranks(2, whole)
    told = run_worlds(["berlin", "paris"], 2, in_a_world_of_shards, expected)
    numel = sum(p.numel() for p in Tied().parameters())
    for site in told:
        assert sum(held for held, _ in site) == numel
        assert all(inside < 1024 for _, inside in site)  # norms and votes, and no weights


def outputs(model: Tied) -> np.ndarray:
    with torch.no_grad():
        return bits(model(batch(9, 9)))


def evaluated(rank: int, shows: bool) -> Any:
    """A training with an evaluation in the middle of a round, or without."""
    topology, model = loco.Topology(ranks_per_site=2), Tied()
    divide(model, site_mesh())
    optimizer = build(model, "PulseLoCo", topology)
    seen = []
    for step in range(STEPS):
        step_of(model, optimizer, topology.site, step)
        if shows and step == 2:
            before = outputs(model)
            optimizer.eval()
            seen = [outputs(model)]
            optimizer.train()
            np.testing.assert_array_equal(outputs(model), before)
            assert not np.array_equal(seen[0], before)
    return state(optimizer), seen


@pytest.mark.check(SHARDINGS)
def test_an_evaluation_shows_one_theta_on_all_sites_and_costs_a_sharded_training_nothing() -> None:
    told, undisturbed = run_ranks(4, evaluated, True), run_ranks(4, evaluated, False)
    for (found, seen), (expected, _) in zip(told, undisturbed, strict=True):
        assert_equal(found, expected)
        np.testing.assert_array_equal(seen[0], told[0][1][0])
