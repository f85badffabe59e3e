"""An outer step that finds its own length where there is more than one rank: all of them find one α."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from round_cases import NUMEL, SEED
from scripted import Scripted, parameters
from sites import error_of, run_ranks
from states import assert_same, small_model, snapshot, train

import loco

OPTIONS: dict[str, Any] = {"sync_every": 1, "saving": 0.25, "sums_margin": 2.0**-20}
ECONOMIES: dict[str, Any] = {"gate_margin": 0.1, "value_steps": 4, "sums_margin": 0.5}


def built(rank: int, **options: Any) -> Any:
    return loco.PulseLoCo(Scripted(parameters(SEED, NUMEL), SEED, rank), **OPTIONS | options)


def found(rank: int, ranks_per_site: int, rounds: int) -> list[float]:
    topology = loco.Topology(ranks_per_site=ranks_per_site)
    # The ranks of a site have the same weights: DDP gives them the same gradients.
    inner = Scripted(parameters(SEED, NUMEL), SEED, topology.site)
    optimizer = loco.PulseLoCo(inner, topology=topology, **OPTIONS)
    lengths = []
    for _ in range(rounds):
        optimizer.step()
        lengths.append(optimizer.outer_state.outer_lr)
    return lengths


def test_the_ranks_of_a_site_find_what_a_site_of_one_rank_does() -> None:
    (expected,) = {tuple(each) for each in run_ranks(2, found, 1, 8)}
    assert len(set(expected)) > 2
    assert {tuple(each) for each in run_ranks(4, found, 2, 8)} == {expected}


@pytest.mark.parametrize("options", [{}, ECONOMIES, {"overlap": True}, {"overlap": 1.0}])
def test_a_resumed_run_equals_one_that_never_stopped(options: dict[str, Any]) -> None:
    for ends in run_ranks(2, resumed, options):
        assert_same(*ends)


def resumed(rank: int, options: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    optimizer = built(rank, **options)
    for _ in range(5):
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["loco"]["step_length"]["eighths"] != 0
    again = built(rank, **options)
    again.load_state_dict(saved)
    ends = []
    for one in (optimizer, again):
        one.inner.count = 5
        for _ in range(4):
            one.step()
        one.sync()
        ends.append(snapshot(one))
    return ends


def test_exchanges_codes_and_what_is_held_back_change_no_bit() -> None:
    kinds = [(wire, exchange) for wire in ("tight", "fast") for exchange in ("gather", "owner")]
    kinds.append(("auto", "dense"))
    for told in run_ranks(3, ends_of, kinds):
        for end in told[1:]:
            assert_same(end, told[0])


def ends_of(rank: int, kinds: list[tuple[str, str]]) -> list[dict[str, np.ndarray]]:
    ends = []
    for wire, exchange in kinds:
        optimizer = built(rank, wire=wire, exchange=exchange)
        for _ in range(6):
            optimizer.step()
        ends.append(snapshot(optimizer))
    return ends


def test_with_another_number_of_sites_a_run_goes_on_with_the_length_that_it_had(tmp_path: Path) -> None:
    (saved,) = set(run_ranks(2, trained_and_saved, tmp_path))
    (resumed,) = set(run_ranks(3, loaded, tmp_path))
    assert resumed[0] == saved
    assert resumed[1] != saved


def trained_and_saved(rank: int, folder: Path) -> float:
    net, optimizer = trainee(rank)
    train(net, optimizer, rank, range(12))
    with loco.Checkpoints(folder) as checkpoints:
        checkpoints.save(optimizer, blocking=True)
    return optimizer.outer_state.outer_lr


def loaded(rank: int, folder: Path) -> tuple[float, float]:
    net, optimizer = trainee(rank)
    with loco.Checkpoints(folder) as checkpoints:
        checkpoints.load(optimizer, sites=[0, 1, None])
    before = optimizer.outer_state.outer_lr
    train(net, optimizer, rank, range(12, 18))
    return before, optimizer.outer_state.outer_lr


def trainee(rank: int) -> tuple[torch.nn.Module, loco.PulseLoCo]:
    net = small_model()
    inner = torch.optim.AdamW(net.parameters(), lr=1e-5)
    options: dict[str, Any] = OPTIONS | {"sync_every": 2}
    return net, loco.PulseLoCo(inner, **options)


def unlike(rank: int, damage: dict[str, Any]) -> tuple[str, str]:
    optimizer = built(rank)
    for _ in range(5):
        optimizer.step()
    state = optimizer.state_dict()
    if rank:
        state["loco"]["step_length"] |= damage
    optimizer.load_state_dict(state)
    optimizer.inner.count = 5

    def rounds() -> None:
        for _ in range(3):
            optimizer.step()

    return error_of(rounds)


@pytest.mark.parametrize("damage", [{"eighths": -3}, {"before": None}])
def test_sites_that_would_go_on_with_different_lengths_are_refused(damage: dict[str, Any]) -> None:
    for kind, text in run_ranks(2, unlike, damage):
        assert kind == "ReplicaError"
        assert "the sites' anchors differ" in text


@pytest.mark.usefixtures("single_site")
def test_a_state_from_before_it_was_there_is_loaded() -> None:
    optimizer = built(0, outer_lr=2.0)
    optimizer.step()
    state = optimizer.state_dict()
    del state["loco"]["step_length"], state["loco"]["settings"]["finds_outer_lr"]
    built(0, outer_lr=2.0).load_state_dict(state)


def test_how_far_a_site_runs_ahead_is_agreed_on() -> None:
    for kind, text in run_ranks(2, ahead_by):
        assert kind == "AgreementError"
        assert "overlap" in text


def ahead_by(rank: int) -> tuple[str, str]:
    return error_of(lambda: built(rank, overlap=(True, 1.0)[rank]))
