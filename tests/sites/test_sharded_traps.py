"""What goes wrong with sharded parameters when nobody looks: stale copies, moved memory, foreign meshes."""

from typing import Any

import numpy as np
import pytest
import torch
from scripted import bits
from selection import SHARDINGS
from sharded import Tied, batch, build, divide, site_mesh, step_of
from sites import error_of, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

import loco


def seen(model: nn.Module) -> np.ndarray:
    """The weights as a forward pass sees them."""
    with torch.no_grad():
        return bits(model(batch(0, 99)))


def gathered_anew(model: Any) -> np.ndarray:
    model.reshard()
    model.up.reshard()
    return seen(model)


def after_evaluation(rank: int, reshard_after_forward: bool | int | None) -> list[bool]:
    topology = loco.Topology(ranks_per_site=2)
    model = Tied()
    divide(model, site_mesh(), reshard_after_forward=reshard_after_forward)
    inner = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    seen(model)
    optimizer = loco.PulseLoCo(inner, sync_every=2, topology=topology)
    found = []

    def check(before: np.ndarray) -> None:
        after = seen(model)
        found.append(not np.array_equal(before, after) and np.array_equal(after, gathered_anew(model)))

    step_of(model, optimizer, topology.site, 0)
    saved = {**optimizer.state_dict()}
    saved["loco"] = saved["loco"] | {"weights": [w.clone() for w in saved["loco"]["weights"]]}
    before = seen(model)
    optimizer.sync()
    check(before)
    before = seen(model)
    optimizer.load_state_dict(saved)
    check(before)
    return found


@pytest.mark.check(SHARDINGS, sample="None")
@pytest.mark.parametrize("reshard_after_forward", [None, False, 1])
def test_a_round_after_an_evaluation_is_seen_by_the_next_one(
    reshard_after_forward: bool | int | None,
) -> None:
    assert run_ranks(4, after_evaluation, reshard_after_forward) == [[True, True]] * 4


def moved(rank: int) -> list[bool]:
    topology = loco.Topology(ranks_per_site=2)
    model = Tied()
    divide(model, site_mesh())
    optimizer = build(model, "PulseLoCo", topology)
    step_of(model, optimizer, topology.site, 0)
    kept = optimizer.outer_state.parameters.tensors  # so that nothing else comes to lie there
    before = [t.data_ptr() for t in kept if t.numel()]
    model._apply(lambda tensor: tensor.clone())  # as model.to(…) does
    after = [t.data_ptr() for t in optimizer.outer_state.parameters.tensors if t.numel()]
    optimizer.sync()
    params = optimizer.outer_state.parameters.params
    cast = torch.cat([t.reshape(-1) for t in optimizer.outer_state.parameters.tensors])
    wholes = [p.full_tensor() for p in params]
    return [
        not set(before) & set(after),
        torch.equal(cast, optimizer.outer_state.anchor),
        np.array_equal(seen(model), gathered_anew(model)),
        all(torch.equal(whole, p.full_tensor()) for whole, p in zip(wholes, params, strict=True)),
    ]


@pytest.mark.check(SHARDINGS)
def test_shards_whose_memory_has_moved_are_found_again() -> None:
    assert run_ranks(4, moved) == [[True] * 4] * 4


class Quantised(torch.Tensor):
    """As torchao's weights for an FP8 all-gather."""

    def fsdp_pre_all_gather(self, mesh: Any) -> None: ...


class Strange(torch.Tensor): ...


def refused(rank: int) -> list[tuple[str, str]]:
    topology = loco.Topology(ranks_per_site=2)
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))
    mesh = world["shard"]

    def of(param: DTensor) -> Any:
        return loco.PulseLoCo(torch.optim.SGD([nn.Parameter(param)], lr=0.1), topology=topology)

    def over(mesh: DeviceMesh, **options: Any) -> Any:
        model = Tied()
        divide(model, mesh, **options)
        return build(model, "PulseLoCo", topology)

    def held_as(kind: type[torch.Tensor]) -> Any:
        param: Any = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)]))
        param._local_tensor = torch.zeros(2, 2).as_subclass(kind)
        return loco.PulseLoCo(torch.optim.SGD([param], lr=0.1), topology=topology)

    flat = init_device_mesh("cpu", (4,))
    down = nn.Linear(16, 8, bias=False)

    def by_columns() -> Any:
        fully_shard(down, mesh=mesh, shard_placement_fn=lambda p: Shard(topology.site))
        return build(down, "DiLoCo", topology)

    def after_an_evaluation() -> Any:
        model = Tied()
        divide(model, mesh)
        seen(model)
        return build(model, "PulseLoCo", topology)

    def fsdp1(use_orig_params: bool) -> Any:
        model = FullyShardedDataParallel(
            nn.Linear(4, 4, bias=False),
            process_group=topology.site_group,
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        return build(model, "PulseLoCo", topology)

    backwards = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("site", "shard"))["shard"]

    def changed() -> Any:
        model = Tied()
        divide(model, mesh)
        optimizer = build(model, "PulseLoCo", topology)
        p = optimizer.outer_state.parameters.params[0]
        p._local_tensor = p._local_tensor.bfloat16() if rank == 1 else p._local_tensor
        optimizer.sync()

    attempts = [
        lambda: over(flat),
        lambda: over(world),
        lambda: of(DTensor.from_local(torch.zeros(2, 2), mesh, [Partial()])),
        lambda: held_as(Quantised),
        lambda: held_as(Strange),
        by_columns,
        lambda: over(backwards),
        changed,
        after_an_evaluation,
        lambda: fsdp1(False),
        lambda: fsdp1(True),
    ]
    return [error_of(attempt) for attempt in attempts]


@pytest.mark.check(SHARDINGS)
def test_what_cannot_be_exchanged_shard_by_shard_is_refused_with_what_to_do() -> None:
    for rank, errors in enumerate(run_ranks(4, refused)):
        texts = [text for _, text in errors]
        foreign = 2 if rank < 2 else 0
        for text in texts[:2]:
            assert f"is divided or replicated over rank {foreign} of another site" in text
            assert 'mesh["shard"]' in text
        assert "is a partial sum" in texts[2]
        assert "enable_fsdp_float8_all_gather=False" in texts[3]
        assert "holds its shard as a Strange" in texts[4]
        assert {kind for kind, _ in errors[:5]} == {"ValueError"}
        assert errors[5][0] == errors[6][0] == "AgreementError"
        assert texts[5].startswith(
            "the sites differ in parameters (number 0): rank 0 of site 0 has ['weight', [8, 16], "
        )
        assert "['Shard', 0]" in texts[5]
        assert "['Shard', 1]" in texts[5]
        assert texts[6] == (
            "the sites differ in shards (number 0): rank 0 of site 0 has [[[0, 0]], [1]], "
            "rank 2 of site 1 has [[[0, 1]], [1]]"
        )
        for text in texts[9:]:
            assert "is of FullyShardedDataParallel (FSDP1)" in text
        assert errors[8][0] == "ValueError"
        assert texts[8].startswith("parameter scale is a copy that FSDP2 had gathered for a forward pass")
        assert errors[7][0] == ("ValueError" if rank == 1 else "PeerError")


def drift(rank: int, spoil: str) -> tuple[str, str]:
    """A site of two replicas of two shards."""
    topology = loco.Topology(ranks_per_site=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Tied()
    options = {"ignored_params": {model.scale}}
    if spoil == "first" and rank == 2:
        model.scale.data += 1
    divide(model, mesh, **options)
    if spoil == "first":
        return error_of(lambda: build(model, "PulseLoCo", topology))
    optimizer = build(model, "PulseLoCo", topology)
    step_of(model, optimizer, topology.site, 0)
    up: Any = model.up.get_parameter("weight")
    if spoil == "replica" and rank == 3:
        up.detach().to_local()[0, 0] += 1e-3
    if spoil == "whole" and rank == 1:
        model.scale.data += 1e-3
    if spoil == "nan" and rank in (1, 3):
        up.detach().to_local()[0, 0] = float("nan")
    return error_of(optimizer.sync)


@pytest.mark.check(SHARDINGS)
@pytest.mark.parametrize("spoil", ["replica", "whole", "first", "nan"])
def test_copies_inside_a_site_that_differ_stop_the_round_everywhere(spoil: str) -> None:
    for kind, text in run_ranks(4, drift, spoil):
        if spoil == "nan":
            assert kind == "NonFiniteError"
            assert "the update of group0.up.weight" in text or "the update of up.weight" in text
        elif spoil == "first":
            assert kind == "ReplicaError"
            assert text.startswith(
                "ranks 0 of site 0, 1 of site 0, 2 of site 0, 3 of site 0 hold copies of parameter scale"
            )
        else:
            assert kind == "ReplicaError"
            assert text.startswith("round 1, site 0: its ranks hold different weights.")
