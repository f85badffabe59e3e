"""What a rank saves of sharded parameters is its own part, and resuming with it equals never stopping."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_checkpoints import save_as_dcp
from scripted import bits
from selection import CHECKPOINTS
from sharded import Tied, assert_equal, build, divide, shard_of_whole, site_mesh, state, step_of
from sites import error_of, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import loco

STEPS, STOP = 7, 3  # in the middle of a round


def fresh(topology: loco.Topology, kind: str, seed: int = 0) -> tuple[Any, Any]:
    model = Tied()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * seed)  # loading must bring the weights too
    divide(model, site_mesh())
    return model, build(model, kind, topology)


def moments(optimizer: Any) -> list[Any]:
    """The inner optimizer's whole state, on this rank."""
    found = []
    for p in optimizer.outer_state.parameters.params:
        for name, value in sorted(optimizer.inner.state[p].items()):
            assert isinstance(value, DTensor) == (name != "step")
            if isinstance(value, DTensor):
                assert (value.placements, value.shape) == (p.placements, p.shape)
                value = value.to_local()
            found.append(bits(value))
    return found


def resumed(rank: int, kind: str, how: str, folder: Path) -> bool:
    topology = loco.Topology(ranks_per_site=2)
    model, optimizer = fresh(topology, kind)
    for step in range(STOP):
        step_of(model, optimizer, topology.site, step)
    stopped, buffer = optimizer.state_dict(), io.BytesIO()
    if how == "state_dict":
        for value in stopped["loco"]["weights"]:
            assert type(value) is torch.Tensor  # the local part
        torch.save(stopped, buffer)
    else:
        with loco.Checkpoints(folder) as checkpoints:
            ema = [p.detach().clone() for p in optimizer.outer_state.parameters.params]
            checkpoints.save(optimizer, {"step": STOP, "ema": ema}, blocking=True)
        if how == "dcp":
            save_as_dcp(folder, rank)
    for step in range(STOP, STEPS):
        step_of(model, optimizer, topology.site, step)
    again, other = fresh(topology, kind, seed=1)
    if how == "state_dict":
        buffer.seek(0)
        other.load_state_dict(torch.load(buffer, weights_only=False))
    else:
        checkpoints = loco.Checkpoints(folder)
        found = checkpoints.load(other)
        assert found is not None
        assert found.extra["step"] == STOP
        for saved, now in zip(found.extra["ema"], other.outer_state.parameters.params, strict=True):
            assert torch.equal(saved.to_local(), now.to_local())
    assert (other.round, other.local_step) == (STOP // 2, STOP % 2)
    for step in range(STOP, STEPS):
        step_of(again, other, topology.site, step)
    assert_equal(state(other), state(optimizer))
    assert_equal({"moments": moments(other)}, {"moments": moments(optimizer)})
    return True


@pytest.mark.check(CHECKPOINTS, sample="PulseLoCo-torch")
@pytest.mark.parametrize(
    ("kind", "how"),
    [("PulseLoCo", "torch"), ("PulseLoCo", "dcp"), ("DiLoCo", "torch"), ("PulseLoCo", "state_dict")],
)
def test_resuming_with_the_same_sharding_equals_never_stopping(kind: str, how: str, tmp_path: Path) -> None:
    assert run_ranks(4, resumed, kind, how, tmp_path) == [True] * 4


def some_sites(rank: int, per_site: int, folder: Path, steps: range, expected: list[Any]) -> Any:
    """Go on from the checkpoint, if there is one, and save another one at the end."""
    topology = loco.Topology(ranks_per_site=per_site)
    model = Tied()
    if per_site > 1:
        divide(model, site_mesh(per_site))
    optimizer = build(model, "PulseLoCo", topology)
    with loco.Checkpoints(folder) as checkpoints:
        checkpoints.load(optimizer)
        for step in steps:
            step_of(model, optimizer, topology.site, step)
        checkpoints.save(optimizer, blocking=True)
    if expected:
        assert_equal(state(optimizer), shard_of_whole(expected[topology.site], optimizer))
    return state(optimizer)


@pytest.mark.check(CHECKPOINTS)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_sites_join_and_leave_as_those_that_are_not_divided(before: int, after: int, tmp_path: Path) -> None:
    expected: list[list[Any]] = []
    for k, (sites, steps) in enumerate([(before, range(STOP)), (after, range(STOP, STEPS))]):
        expected.append(run_ranks(sites, some_sites, 1, tmp_path / "whole", steps, []))
        run_ranks(2 * sites, some_sites, 2, tmp_path / "shards", steps, expected[k])


def other_sharding(rank: int, folder: Path, per_site: int, divided: bool) -> tuple[str, str]:
    topology = loco.Topology(ranks_per_site=per_site)
    model = Tied()
    if divided:
        divide(model, site_mesh(per_site))
    optimizer = build(model, "PulseLoCo", topology)
    before = state(optimizer) if divided else None
    checkpoints = loco.Checkpoints(folder)
    error = error_of(checkpoints.load, optimizer)
    if before is not None:
        assert_equal(state(optimizer), before)
    return error


@pytest.mark.check(CHECKPOINTS)
@pytest.mark.parametrize(
    ("world", "per_site", "divided", "differs"),
    [
        (4, 4, True, "ranks_per_site = 2, this optimizer has 4"),
        (2, 1, False, "ranks_per_site = 2, this optimizer has 1"),
        (
            4,
            2,
            False,
            "parameters = ['scale', [1], 'torch.float32', [['Shard', 0]], [2]], this optimizer has ",
        ),
    ],
)
def test_another_sharding_is_refused_by_name_and_changes_nothing(
    world: int, per_site: int, divided: bool, differs: str, tmp_path: Path
) -> None:
    run_ranks(4, some_sites, 2, tmp_path, range(STOP), [])
    for kind, text in run_ranks(world, other_sharding, tmp_path, per_site, divided):
        assert kind == "ValueError"
        assert f"this state was saved with {differs}" in text
        assert text.endswith("If only the sharding has changed, load(optimizer, reshard=True) loads it")


LAYOUTS = {"whole": (1, ""), "1x4": (4, "shard"), "2x2": (4, "replicate shard"), "halves": (2, "shard")}


def in_layout(rank: int, layout: str, how: str, folder: Path, steps: range, expected: list[Any]) -> Any:
    """One site, or with "halves" two, whose checkpoint was saved in any layout."""
    per_site, names = LAYOUTS[layout]
    topology, model = loco.Topology(ranks_per_site=per_site), Tied()
    if layout == "halves":
        divide(model, site_mesh())
    elif names:
        shape = (2, 2) if layout == "2x2" else (4,)
        divide(model, init_device_mesh("cpu", shape, mesh_dim_names=tuple(names.split())))
    optimizer = build(model, "PulseLoCo", topology)
    with loco.Checkpoints(folder) as checkpoints:
        resumed = checkpoints.load(optimizer, reshard=True)
        assert (resumed is None) == (steps.start == 0)
        for step in steps:
            step_of(model, optimizer, topology.site, step)
        checkpoints.save(optimizer, blocking=True)
    if how == "dcp":
        save_as_dcp(folder, rank)
    if expected:
        assert_equal(state(optimizer), shard_of_whole(expected[topology.site], optimizer))
    return state(optimizer)


@pytest.mark.check(CHECKPOINTS)
@pytest.mark.parametrize(
    ("sites", "layouts", "how"),
    [
        (1, ["2x2", "1x4", "whole", "2x2"], "torch"),
        (1, ["2x2", "1x4", "whole"], "dcp"),
        (2, ["whole", "halves", "whole"], "torch"),
    ],
)
def test_another_sharding_goes_on_with_the_bits_of_a_site_that_is_not_divided(
    sites: int, layouts: list[str], how: str, tmp_path: Path
) -> None:
    for k, layout in enumerate(layouts):
        steps = range(STOP * k, STOP * (k + 1))
        expected = run_ranks(sites, in_layout, "whole", how, tmp_path / "whole", steps, [])
        run_ranks(sites * LAYOUTS[layout][0], in_layout, layout, how, tmp_path / "any", steps, expected)


def in_flight(rank: int, layout: str, folder: Path, steps: int) -> tuple[str, str]:
    """Saves after so many steps, or loads what another layout has saved."""
    per_site, _ = LAYOUTS[layout]
    topology, model = loco.Topology(ranks_per_site=per_site), Tied()
    if layout == "halves":
        divide(model, site_mesh())
    optimizer = build(model, "PulseLoCo", topology, overlap=True)
    with loco.Checkpoints(folder) as checkpoints:
        for step in range(steps):
            step_of(model, optimizer, topology.site, step)
        if steps:
            checkpoints.save(optimizer, blocking=True)
            return "", ""
        before = state(optimizer)
        told = error_of(lambda: checkpoints.load(optimizer, reshard=True))
        assert_equal(state(optimizer), before)
        return told


def test_another_sharding_can_not_go_on_with_a_round_in_flight(tmp_path: Path) -> None:
    """What was sent is of each rank's part."""
    run_ranks(2, in_flight, "whole", tmp_path, STOP)
    for kind, text in run_ranks(4, in_flight, "halves", tmp_path, 0):
        assert kind == "ValueError"
        assert (
            "was saved with a round in flight, which all ranks that sent it have to bring to its end" in text
        )
