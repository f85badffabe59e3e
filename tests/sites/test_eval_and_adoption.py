"""θ shown on all ranks of a site, and weights from outside that become θ on all sites."""

from typing import Any

import numpy as np
import pytest
import torch
from scripted import bits
from selection import CHECKPOINTS
from sites import error_of, hear, run_ranks, tell
from states import Snapshot, assert_same, small_model, snapshot, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import loco


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def built(each: int, seed: int = 0) -> tuple[nn.Module, nn.Module, loco.PulseLoCo]:
    net = small_model(seed)
    topology = loco.Topology(ranks_per_site=each)
    inner = torch.optim.SGD(net.named_parameters(), lr=1e-3)
    optimizer = loco.PulseLoCo(inner, topology=topology, sync_every=3)
    spread = DistributedDataParallel(net, process_group=topology.site_group) if each > 1 else net
    return net, spread, optimizer


def evaluated(rank: int, each: int) -> tuple[np.ndarray, np.ndarray, Snapshot, Snapshot]:
    _, plain, other = built(each)
    train(plain, other, rank, range(8))
    net, spread, optimizer = built(each)
    train(spread, optimizer, rank, range(5))
    kept = flat(net)
    optimizer.eval()
    shown = flat(net)
    optimizer.train()
    assert torch.equal(flat(net), kept)
    assert not torch.equal(shown, kept)
    train(spread, optimizer, rank, range(5, 8))
    return bits(shown), bits(kept), snapshot(other), snapshot(optimizer)


@pytest.mark.check(CHECKPOINTS)
def test_ranks_of_a_site_show_theta_together_and_go_on_as_if_they_had_not() -> None:
    found = run_ranks(4, evaluated, 2)
    for shown, _, other, mine in found:
        np.testing.assert_array_equal(shown, found[0][0])
        assert_same(other, mine)
    assert not np.array_equal(found[0][1], found[2][1])  # the sites differ within a round


def alone(rank: int) -> tuple[bool, tuple[int, int, int], tuple[int, int, int]]:
    """Only site 0 evaluates, while site 1 waits elsewhere: there is nobody to send messages to."""
    net, _, optimizer = built(1)
    train(net, optimizer, rank, range(5))
    view = optimizer._loop.views.current
    assert view is not None
    before = view.bytes_so_far
    if rank == 0:
        optimizer.eval()
        shown = torch.equal(flat(net), optimizer.outer_state.anchor)
        optimizer.state_dict()
        optimizer.train()
        tell("site 0 has evaluated")
    else:
        hear("site 0 has evaluated")
        shown = True
    train(net, optimizer, rank, range(5, 6))
    return shown, before, view.bytes_so_far


def test_a_site_of_one_rank_evaluates_without_messages() -> None:
    (shown, before_0, after_0), (_, before_1, after_1) = run_ranks(2, alone)
    assert shown
    assert np.subtract(after_0, before_0)[0] == np.subtract(after_1, before_1)[1]  # the next round's alone
    assert np.subtract(after_0, before_0)[1] == np.subtract(after_1, before_1)[0]


def adopted(rank: int, each: int, when: int) -> tuple[Any, ...]:
    """Weights are loaded after some steps, other ones on each site; then train on, and compare with a run
    that began there."""
    net, spread, optimizer = built(each)
    train(spread, optimizer, rank, range(when))
    rounds = optimizer.round
    net.load_state_dict(small_model(seed=20 + rank // each).state_dict())
    refused = ("", "") if when % 3 else error_of(optimizer.step)
    optimizer.adopt_weights()
    at = optimizer.round, optimizer.local_step
    theta = flat(net)
    assert optimizer.outer_state.momentum is not None
    assert optimizer.outer_state.residual is not None
    zero = not optimizer.outer_state.momentum.any() and not optimizer.outer_state.residual.any()
    train(spread, optimizer, rank, range(100, 107))
    net, spread, fresh = built(each, seed=20 + rank // each)
    train(spread, fresh, rank, range(100, 107))
    return refused, at, rounds, bits(theta), zero, snapshot(fresh), snapshot(optimizer)


@pytest.mark.check(CHECKPOINTS, sample="5-4-2")
@pytest.mark.parametrize(("world", "each"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("when", [0, 3, 5])
def test_adopted_weights_are_a_new_start_from_site_0s(world: int, each: int, when: int) -> None:
    site_0 = bits(flat(small_model(seed=20)))
    for refused, at, rounds, theta, zero, fresh, mine in run_ranks(world, adopted, each, when):
        since = "round 1" if when else "the optimizer was built"
        if when % 3 == 0:
            assert refused[0] == "ValueError"
            assert f"was changed from outside since {since}" in refused[1]
            assert "call optimizer.adopt_weights() on every rank" in refused[1]
        assert at == (rounds, 0)
        assert rounds == when // 3
        np.testing.assert_array_equal(theta, site_0)
        assert zero
        assert_same(fresh, mine)


def not_adopted(rank: int) -> tuple[tuple[str, str], bool, int]:
    """Site 0's weights can't be adopted: no site changes anything, and all can go on."""
    net, _, optimizer = built(1)
    train(net, optimizer, rank, range(3))
    before, w = snapshot(optimizer), flat(net)
    if rank == 0:
        net.get_parameter("2.bias").data.fill_(float("nan"))
    failed = error_of(optimizer.adopt_weights)
    if rank == 0:
        torch.nn.utils.vector_to_parameters(w, net.parameters())
    same = all(
        np.array_equal(a, b) for a, b in zip(before.values(), snapshot(optimizer).values(), strict=True)
    )
    train(net, optimizer, rank, range(3, 6))
    return failed, same, optimizer.round


def test_weights_that_are_not_finite_are_adopted_by_no_site() -> None:
    (mine, same_0, rounds_0), (other, same_1, rounds_1) = run_ranks(2, not_adopted)
    assert mine == (
        "ValueError",
        "parameter 2.bias is infinite or NaN on the first site: it can't be adopted",
    )
    assert other[0] == "PeerError"
    assert "site 0 can't: parameter 2.bias is infinite or NaN on the first site" in other[1]
    assert (same_0, same_1, rounds_0, rounds_1) == (True, True, 2, 2)


def adopted_alone(rank: int) -> tuple[tuple[str, str], bool, int]:
    """Rank 1 lives, but does not come."""
    net = small_model()
    topology = loco.Topology(patience=2, timeout=20)
    optimizer = loco.PulseLoCo(torch.optim.SGD(net.parameters(), lr=1e-3), topology=topology, sync_every=3)
    train(net, optimizer, rank, range(4))
    before, failed = snapshot(optimizer), ("", "")
    if rank == 0:
        failed = error_of(optimizer.adopt_weights)
        tell("rank 0 has given up")
    else:
        hear("rank 0 has given up")
    after = snapshot(optimizer)
    same = all(np.array_equal(before[name], after[name]) for name in before)
    train(net, optimizer, rank, range(4, 6))
    return failed, same, optimizer.round


def test_weights_that_one_site_alone_wants_to_adopt_are_not() -> None:
    (failed, same_0, rounds_0), (_, same_1, rounds_1) = run_ranks(2, adopted_alone)
    assert failed[0] == "TransportError"
    assert failed[1].startswith("adopting weights after round 1: ")
    assert "no answer from site 1 within 2 s" in failed[1]
    assert (same_0, same_1, rounds_0, rounds_1) == (True, True, 2, 2)


def without_links(rank: int) -> tuple[tuple[str, str], bool, bool]:
    net, spread, optimizer = built(2)
    train(spread, optimizer, rank, range(4))
    kept = flat(net)
    optimizer._loop.views.membership.give_up("")
    failed = error_of(optimizer.eval)
    same = torch.equal(flat(net), kept)
    optimizer.sync()  # which builds new links
    train(spread, optimizer, rank, range(4, 5))
    optimizer.eval()
    return failed, same, not torch.equal(flat(net), kept)


def test_weights_are_given_back_on_all_ranks_if_links_inside_the_site_are_lost() -> None:
    for failed, same, shown in run_ranks(2, without_links):
        assert failed[0] == "TransportError"
        assert same
        assert shown
