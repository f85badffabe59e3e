"""One world whose sites are a dimension of a DeviceMesh: other ranks, the same bits."""

import os
import re
import signal
import subprocess
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scripted import Scripted, parameters
from selection import SHARDINGS
from sharded import Tied, assert_equal, build, divide, shard_of_whole, state, step_of
from sites import error_of, run_ranks
from states import Snapshot, assert_same, snapshot
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import loco
from loco.members import one_world

STEPS, ROUNDS = 2, 3
Layout = tuple[tuple[str, ...], tuple[int, ...]]
FIRST = ("site", "shard"), (2, 2)
LAST = ("shard", "site"), (2, 2)
THREE_SITES = ("shard", "site"), (2, 3)
MIDDLE = ("replicate", "site", "shard"), (2, 2, 2)


def mesh_of(layout: Layout) -> DeviceMesh:
    names, shape = layout
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def trained(topology: loco.Topology) -> tuple[int, int, list[int], Snapshot]:
    """-> this rank's site, its number in it, torch's numbers of the ranks in `site_group`, and the state."""
    optimizer = loco.PulseLoCo(
        Scripted(parameters(7, 2003), 3, topology.site), sync_every=STEPS, topology=topology
    )
    for _ in range(STEPS * ROUNDS):
        optimizer.step()
    ranks = dist.get_process_group_ranks(topology.site_group) if topology.site_group else []
    return topology.site, topology.rank_in_site, ranks, snapshot(optimizer)


def consecutive(rank: int, per_site: int) -> Any:
    return trained(loco.Topology(ranks_per_site=per_site))


def in_mesh(rank: int, layout: Layout) -> Any:
    return trained(loco.Topology(mesh=mesh_of(layout)["site"]))


@pytest.mark.check(SHARDINGS)
@pytest.mark.parametrize(
    ("layout", "sites"),
    [
        pytest.param(FIRST, [[0, 1], [2, 3]], id="site first"),
        pytest.param(LAST, [[0, 2], [1, 3]], id="site last"),
        pytest.param(THREE_SITES, [[0, 3], [1, 4], [2, 5]], id="three sites"),
        pytest.param(MIDDLE, [[0, 1, 4, 5], [2, 3, 6, 7]], id="site in the middle"),
    ],
)
def test_sites_of_a_mesh_train_as_consecutive_ranks_do(layout: Layout, sites: list[list[int]]) -> None:
    world, per_site = len(sites) * len(sites[0]), len(sites[0])
    expected = run_ranks(world, consecutive, per_site)
    for rank, (site, rank_in_site, group, found) in enumerate(run_ranks(world, in_mesh, layout)):
        assert group == sites[site]
        assert sites[site][rank_in_site] == rank
        assert_same(found, expected[site * per_site + rank_in_site][3])


def by_torchs_groups(rank: int) -> Any:
    """In an order of ranks that is not torch's, over process groups as NCCL's links are."""
    one_world.group_device = lambda *_: torch.device("cpu")
    return trained(
        loco.Topology(mesh=DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("site", "shard"))["site"])
    )


@pytest.mark.check(SHARDINGS)
def test_links_by_torchs_groups_connect_the_same_ranks() -> None:
    expected = run_ranks(4, consecutive, 2)
    told = run_ranks(4, by_torchs_groups)
    assert [(site, number) for site, number, *_ in told] == [(1, 1), (0, 0), (1, 0), (0, 1)]
    for site, number, group, found in told:
        assert group == ([1, 3], [0, 2])[site]
        assert_same(found, expected[2 * site + number][3])


def whole(rank: int) -> Any:
    return state(sharded_training(loco.Topology(), Tied()))


def sharded_training(topology: loco.Topology, model: Tied) -> Any:
    optimizer = build(model, "PulseLoCo", topology)
    for step in range(5):
        step_of(model, optimizer, topology.site, step)
    return optimizer


def sharded(rank: int, layout: Layout, expected: list[Any]) -> None:
    mesh, model = mesh_of(layout), Tied()
    divide(model, mesh[tuple(name for name in layout[0] if name != "site")])
    optimizer = sharded_training(loco.Topology(mesh=mesh["site"]), model)
    assert optimizer.topology.site == mesh.get_local_rank("site")
    assert_equal(state(optimizer), shard_of_whole(expected[optimizer.topology.site], optimizer))


@pytest.mark.check(SHARDINGS, sample="site last")
@pytest.mark.parametrize(
    "layout",
    [pytest.param(LAST, id="site last"), pytest.param(MIDDLE, id="site in the middle, with replicas")],
)
def test_shards_of_a_mesh_equal_sites_that_are_not_divided(layout: Layout) -> None:
    run_ranks(4 if layout == LAST else 8, sharded, layout, run_ranks(2, whole))


def refusals(rank: int) -> list[tuple[str, str]]:
    mesh, odd = mesh_of(FIRST), rank == 1
    attempts: list[dict[str, Any]] = [
        {"mesh": mesh},
        {"mesh": mesh["site"], "ranks_per_site": 2},
        {"mesh": (2, 2)},
        {"mesh": mesh if odd else mesh["site"]},
        {"mesh": mesh["shard"] if odd else mesh["site"]},
        {"ranks_per_site": 2} if odd else {"mesh": mesh["shard"]},
        {"ranks_per_site": 4} if odd else {"mesh": mesh["site"]},
    ]
    return [error_of(lambda a=a: loco.Topology(**a)) for a in attempts]


def test_ranks_that_do_not_agree_on_a_mesh_all_learn_it() -> None:
    two = "mesh has 2 dimensions, which are ['site', 'shard']: pass mesh['site'], the one that goes "
    two += "across the sites"

    def disagree(odd: int) -> tuple[str, str]:
        return (
            "AgreementError",
            f"the ranks do not agree on the sites: not all peers that rank {odd} of 4 has across them say "
            'so, too. Give all ranks the same mesh["site"], or the same ranks_per_site',
        )

    for rank, told in enumerate(run_ranks(4, refusals)):
        assert told == [
            ("ValueError", two),
            ("ValueError", "a mesh says how many ranks a site has: give mesh or ranks_per_site, not both"),
            (
                "ValueError",
                "mesh must be the dimension of a DeviceMesh that goes across the sites, such as "
                'mesh["site"], got tuple',
            ),
            ("ValueError", two)
            if rank == 1
            else ("AgreementError", "rank 1 of 4 can't say which ranks form a site: see its error"),
            disagree(1),
            disagree(0),
            ("AgreementError", "ranks_per_site differs: rank 0 has 2, rank 1 of 4 has 4"),
        ]


def stopped_for_a_while(rank: int) -> tuple[int, str, str]:
    """torch's rank 2, which is rank 1 of site 0, is stopped for as long as the others need to notice."""
    topology = loco.Topology(mesh=mesh_of(LAST)["site"], dead_after=1.0, repeats=0)
    optimizer = loco.PulseLoCo(Scripted(parameters(7, 2003), 3, topology.site), topology=topology)
    if rank == 2:
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    return topology.site, *error_of(optimizer.sync)


def test_a_silent_rank_of_a_mesh_is_named_by_its_site() -> None:
    (_, *of_its_site), (_, *of_its_peers_site), _, (_, *of_its_peer) = run_ranks(4, stopped_for_a_while)
    for kind, text in (of_its_site, of_its_peer, of_its_peers_site):
        assert kind == "TransportError", text
    assert "no heartbeat from rank of this site 1 " in of_its_site[1]
    assert "no heartbeat from site 0 " in of_its_peer[1]
    assert re.search("(lost|no heartbeat from) site 0|site 0 has left", of_its_peers_site[1])
