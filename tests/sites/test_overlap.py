"""Rounds that travel beside the inner steps: the bits of a second statement of the algorithm, whatever the
clocks do."""

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paper import OverlappedPaper
from round_cases import CASES, NUMEL, SEED, Case, options_of, paper_of
from scripted import Scripted, bits, flat, move, parameters
from selection import PRODUCTS
from sites import error_of, run_ranks
from states import assert_same, small_model, snapshot, train

import loco

BOUNDARIES = 4
State = dict[str, Any]


def built(
    case: Case, rank: int, beta: float, each: int = 1, **more: Any
) -> tuple[Any, list[torch.nn.Parameter]]:
    """Args: each: ranks of a site."""
    site = rank // each
    params = parameters(99 + site if site else SEED, NUMEL, case.bf16)
    options = options_of(case) | {"overlap": beta, "topology": loco.Topology(ranks_per_site=each)}
    return getattr(loco, case.kind)(Scripted(params, SEED, site), **options | more), params


def state_of(optimizer: Any, params: list[torch.nn.Parameter]) -> State:
    """Of what a rank holds a part of, zeros elsewhere."""
    outer = optimizer.outer_state
    found = {"anchor": outer.anchor, "residual": outer.residual}
    if outer.momentum is not None:
        found["momentum"] = outer.momentum
    state = {name: np.zeros(NUMEL, dtype=np.uint32) for name in found}
    for name, value in found.items():
        state[name][outer.start : outer.stop] = bits(value)
    return state | {"weights": bits(flat(params)), "part": (outer.start, outer.stop)}


def run_library(
    rank: int, cases: list[tuple[Case, float, dict]], each: int, stalls: bool = False
) -> list[list[State]]:
    told = []
    for case, beta, more in cases:
        optimizer, params = built(case, rank, beta, each, **more)
        rng = np.random.default_rng(rank)
        history = []
        for step in range(BOUNDARIES * case.sync_every):
            if stalls:
                time.sleep(0.05 * rng.random())
            optimizer.step()
            if (step + 1) % case.sync_every == 0:
                history.append(state_of(optimizer, params))
        optimizer.sync()
        told.append([*history, state_of(optimizer, params)])
        assert optimizer.round == BOUNDARIES + 1
    return told


def run_paper(case: Case, beta: float, sites: int) -> list[list[State]]:
    """-> [boundary][site], and after the last sync()"""
    paper = OverlappedPaper(**paper_of(case, sites), beta=beta)

    def states() -> list[State]:
        vectors = {"anchor": paper.anchor, "momentum": paper.momentum}
        return [
            {
                name: bits(value)
                for name, value in (
                    vectors | {"residual": paper.residuals[site], "weights": paper.began[site]}
                ).items()
            }
            for site in range(sites)
        ]

    history = []
    for n in range(BOUNDARIES):
        weights = []
        for site in range(sites):
            w = paper.began[site]
            for h in range(case.sync_every):
                w = paper.cast(w - move(SEED, site, n * case.sync_every + h, NUMEL, 3e-5))
            weights.append(w)
        paper.boundary(weights)
        history.append(states())
    paper.sync(paper.began)
    return [*history, states()]


def check(cases: list[tuple[Case, float, dict]], sites: int, *, each: int = 1, stalls: bool = False) -> None:
    told = run_ranks(sites * each, run_library, cases, each, stalls)
    for number, (case, beta, _) in enumerate(cases):
        expected = run_paper(case, beta, sites)
        for rank, site in ((rank, rank // each) for rank in range(sites * each)):
            for boundary, (got, wanted) in enumerate(
                zip(told[rank][number], (of_all[site] for of_all in expected), strict=True)
            ):
                start, stop = got.pop("part")
                for name, value in got.items():
                    held = wanted[name].copy()
                    if name != "weights":
                        held[:start] = held[stop:] = 0
                    where = f"{case}, β {beta}, rank {rank}, boundary {boundary}: {name}"
                    np.testing.assert_array_equal(value, held, err_msg=where)


@pytest.mark.check(PRODUCTS, sample="2")
@pytest.mark.parametrize("sites", [2, 3, 4])
def test_overlapped_rounds_equal_the_specification_bit_for_bit(sites: int) -> None:
    check([(case, 1.0, {}) for case in CASES], sites)


@pytest.mark.parametrize("stalls", [False, True])
def test_the_ranks_of_a_site_share_their_parts_of_the_weights(stalls: bool) -> None:
    # Which site owns a sum, and keeps it, depends on the parts.
    some = [case for case in CASES if case.sync_every > 1 and case.sums_margin is None]
    check([(case, 1.0, {}) for case in (some[:3] if stalls else some)], 2, each=2, stalls=stalls)


def test_a_site_runs_ahead_by_any_multiple_of_what_it_has_sent() -> None:
    some = [case for case in CASES if case.sync_every > 1]
    check([(case, beta, {}) for case in some for beta in (0.0, 0.5, 4.0)], 2)


@pytest.mark.usefixtures("single_site")
@pytest.mark.parametrize(
    ("options", "beta"),
    [
        ({}, 0.7 * 1.9),
        ({"nesterov": False}, 0.7),
        ({"saving": 0.25, "outer_lr": 28.0}, 28.0),
        ({"saving": 0.25}, "auto"),
        ({"overlap": 1}, 1.0),
        ({"overlap": False}, None),
    ],
    ids=str,
)
def test_by_default_it_runs_ahead_as_far_as_the_outer_step_goes(
    options: dict[str, Any], beta: float | str | None
) -> None:
    inner = torch.optim.SGD(small_model().parameters(), lr=1e-6)
    given: dict[str, Any] = {"overlap": True, **options}
    assert loco.PulseLoCo(inner, **given).settings.overlap == beta


def test_every_exchange_and_code_gives_the_same_bits() -> None:
    some = [case for case in CASES if case.kind == "PulseLoCo" and case.sync_every > 1][-3:]
    frames = [{"exchange": way, "wire": wire} for way in ("gather", "owner") for wire in ("fast", "tight")]
    ways = [*frames, {"exchange": "dense"}]
    fits = [
        (case, 1.0, way)
        for case in some
        for way in ways
        if case.sums_margin is None or way["exchange"] == "owner"
    ]
    check(fits, 3)


def test_a_link_and_steps_of_any_speed_give_the_same_bits() -> None:
    check([(case, 1.0, {}) for case in CASES[:3]], 3, stalls=True)


def resumed(rank: int) -> tuple[Any, Any]:
    case = replace(CASES[0], sync_every=2, value_steps=16, gate_margin=0.1)
    whole, _ = built(case, rank, 1.0)
    for _ in range(7):
        whole.step()
    first, _ = built(case, rank, 1.0)
    for _ in range(5):  # a round is in flight, and a step of the next is made
        first.step()
    saved = copy.deepcopy(first.state_dict())
    second, _ = built(case, rank, 1.0)
    second.load_state_dict(saved)
    second.inner.count = 5
    for _ in range(2):
        second.step()
    whole.sync()
    second.sync()
    return snapshot(whole), snapshot(second)


def test_a_run_that_is_resumed_with_a_round_in_flight_equals_one_that_never_stopped() -> None:
    for whole, second in run_ranks(2, resumed):
        assert_same(whole, second)


def saved(rank: int, folder: str) -> tuple[Any, Any]:
    case = replace(CASES[0], sync_every=2, value_steps=16, gate_margin=0.1)
    whole, _ = built(case, rank, 1.0)
    with loco.Checkpoints(folder) as checkpoints:
        for step in range(7):
            whole.step()
            if step == 4:
                checkpoints.save(whole, blocking=True)
        second, _ = built(case, rank, 1.0)
        resumed = checkpoints.load(second)
        assert resumed is not None
        assert resumed.local_step == 1
    second.inner.count = 5
    for _ in range(2):
        second.step()
    whole.sync()
    second.sync()
    return snapshot(whole), snapshot(second)


def resumed_by_fewer(rank: int, folder: str) -> tuple[str, str]:
    second, _ = built(replace(CASES[0], sync_every=2, value_steps=16, gate_margin=0.1), rank, 1.0)
    with loco.Checkpoints(folder) as checkpoints:
        return error_of(lambda: checkpoints.load(second))


def test_a_checkpoint_holds_the_round_in_flight_for_the_sites_that_sent_it(tmp_path: Path) -> None:
    for whole, second in run_ranks(3, saved, str(tmp_path)):
        assert_same(whole, second)
    told = run_ranks(2, resumed_by_fewer, str(tmp_path))
    assert {kind for kind, _ in told} <= {"ValueError", "PeerError"}
    assert (
        "was saved with a round in flight, which all ranks that sent it have to bring to its end"
        in told[0][1]
    )


@pytest.mark.usefixtures("single_site")
def test_every_save_has_a_place_of_its_own_whatever_boundaries_have_applied(tmp_path: Path) -> None:
    """The first boundary applies no round, and one after a sync() neither."""
    optimizer, _ = built(replace(CASES[0], sync_every=4), 0, 1.0)
    with loco.Checkpoints(tmp_path) as checkpoints:
        for step in range(1, 15):
            optimizer.step()
            if step == 9:
                optimizer.sync()
            checkpoints.save(optimizer, {"step": step}, blocking=True)
            resumed = checkpoints.load(optimizer)
            assert resumed is not None
            assert resumed.extra == {"step": step}


@pytest.mark.usefixtures("single_site")
def test_damaged_entries_in_flight_are_refused() -> None:
    case = replace(CASES[0], sync_every=2)
    first, _ = built(case, 0, 1.0)
    for _ in range(3):
        first.step()
    state = copy.deepcopy(first.state_dict())
    good = state["loco"]["ahead"]
    assert good["values"].numel() > 2
    starts, offsets, values = good["starts"], good["offsets"], good["values"]
    bad: list[Any] = [
        7,
        {"values": values},
        good | {"values": values.double()},
        good | {"values": values[1:]},
        good | {"starts": None},
        good | {"starts": starts + 1},
        good | {"starts": starts[:-1]},
        good | {"starts": starts.int()},
        good | {"starts": starts.flip(0)},
        good | {"offsets": offsets.flip(0)},
        good | {"offsets": torch.full_like(offsets, 255)},
        good | {"offsets": None},
    ]
    second, _ = built(case, 0, 1.0)
    before = snapshot(second)
    for ahead in bad:
        damaged = copy.deepcopy(state)
        damaged["loco"]["ahead"] = ahead
        with pytest.raises(ValueError, match="entries in flight are none of a vector of 1003 elements"):
            second.load_state_dict(damaged)
    assert_same(before, snapshot(second))
    second.load_state_dict(state)
    assert_same(snapshot(first), snapshot(second))


def counted(rank: int) -> tuple[list[int], int]:
    optimizer, _ = built(replace(CASES[0], sync_every=2), rank, 1.0)
    reports: list[loco.SyncReport] = []
    optimizer.register_report_hook(reports.append)
    before = optimizer._loop.views.current.bytes_so_far[0]
    for _ in range(9):
        optimizer.step()
    optimizer.sync()
    assert [report.round for report in reports] == [1, 2, 3, 4, 5]
    assert optimizer.is_synced
    norm = float(optimizer.outer_state.residual.double().norm())
    assert optimizer.last_report.residual_norm == pytest.approx(norm, rel=1e-6)
    assert optimizer.metrics()["loco/sent_bytes_total"] == sum(report.sent_bytes for report in reports)
    return [report.sent_bytes for report in reports], optimizer._loop.views.current.bytes_so_far[0] - before


def test_each_report_has_the_bytes_of_its_own_round() -> None:
    for bytes_of_rounds, sent in run_ranks(3, counted):
        assert sum(bytes_of_rounds) == sent
        assert max(bytes_of_rounds) < 2 * min(bytes_of_rounds)


@pytest.mark.usefixtures("single_site")
@pytest.mark.parametrize("how", ["attached", "several", "offloaded"])
def test_however_an_optimizer_is_held_its_overlapped_rounds_have_the_same_bits(how: str) -> None:
    def trained(how: str) -> dict[str, np.ndarray]:
        net, options = small_model(), {"sync_every": 2, "overlap": True}
        inner: Any = torch.optim.AdamW(net.parameters(), lr=1e-4)
        if how == "several":
            inner = [torch.optim.AdamW(net[k].parameters(), lr=1e-4) for k in (0, 2)]
        if how == "attached":
            handle = loco.attach(inner, **options)
            train(net, inner, 0, range(9))
        else:
            handle = loco.PulseLoCo(inner, offload=how == "offloaded", **options)
            train(net, handle, 0, range(9))
        handle.sync()
        return snapshot(handle)

    assert_same(trained("wrapped"), trained(how))
