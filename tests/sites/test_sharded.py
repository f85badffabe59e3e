"""Parameters of FSDP2, HSDP and tensor parallelism: each rank exchanges its own shards, and the bits are
those of sites that are not divided."""

from typing import Any

import pytest
import torch
from selection import SHARDINGS
from sharded import Tied, as_bf16, assert_equal, build, divide, shard_of_whole, site_mesh, state, step_of
from sites import run_ranks
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import loco

STEPS = 7
CASES: dict[str, dict[str, Any]] = {
    "PulseLoCo": {},
    "DiLoCo": {"kind": "DiLoCo"},
    "owner": {"exchange": "owner", "wire": "fast"},
    "accumulation and clipping": {"parts": 2, "clip": 1e-9},
    "offload": {"policy": "offload"},
    "offloaded state": {"offload": True},
    "bf16 forward": {"policy": "mixed"},
    "overlap": {"overlap": True},
    "DiLoCo, overlap": {"kind": "DiLoCo", "overlap": True},
}


def training(rank: int, per_site: int, case: dict[str, Any]) -> Any:
    """2 sites of `per_site` ranks."""
    case = dict(case)
    kind, policy = case.pop("kind", "PulseLoCo"), case.pop("policy", "")
    steps = {name: case.pop(name) for name in ("parts", "clip") if name in case}
    model, topology = Tied(), loco.Topology(ranks_per_site=per_site)
    if per_site > 1:
        options: dict[str, Any] = {}
        if policy == "mixed":
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        if policy == "offload":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        divide(model, site_mesh(per_site), **options)
    elif policy == "mixed":
        steps["forward"] = as_bf16
    optimizer = build(model, kind, topology, **case)
    reports = []
    for step in range(STEPS):
        step_of(model, optimizer, topology.site, step, **steps)
        reports.append(optimizer.last_report)
    return optimizer, state(optimizer), reports


def whole(rank: int, case: dict[str, Any]) -> Any:
    _, found, reports = training(rank, 1, case)
    return found, reports


def sharded(rank: int, case: dict[str, Any], expected: list[Any]) -> Any:
    optimizer, found, reports = training(rank, 2, case)
    site = optimizer.topology.site
    if expected:
        assert_equal(found, shard_of_whole(expected[site][0], optimizer))
    outer = optimizer.outer_state
    held = sum(t.numel() * 4 for t in (outer.anchor, outer.momentum, outer.residual) if t is not None)
    return held, outer.parameters.numel, reports


@pytest.mark.check(SHARDINGS, sample="PulseLoCo")
@pytest.mark.parametrize("name", CASES)
def test_two_sites_of_two_shards_equal_two_sites_that_are_not_divided(name: str) -> None:
    case = CASES[name]
    expected = run_ranks(2, whole, case)
    results = run_ranks(4, sharded, case, expected)
    for site in (0, 1):
        pair, alone = results[2 * site : 2 * site + 2], expected[site][1][-1]
        sizes = [numel for _, numel, _ in pair]
        assert sum(sizes) == alone.numel
        assert sizes[0] != sizes[1]
        for held, numel, reports in pair:
            keeps_e = "kind" not in case or "overlap" in case  # what is sent may come back
            assert held == (12 if keeps_e else 8) * numel
            # A norm and two votes travel inside the site; no weights and no θ.
            assert reports[-1].site_bytes == 12 + 2 * 64
            assert reports[-1].update_norms == pytest.approx(alone.update_norms, rel=1e-6)
        assert sum(reports[-1].entries for _, _, reports in pair) == alone.entries > 0
