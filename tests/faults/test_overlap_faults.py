"""A round in flight that fails is one in which nobody sent anything, and training has gone on meanwhile."""

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fault_site import note
from followed import NUMEL, SEED, Followed
from scripted import Scripted, parameters
from sites import error_of, free_port, hear, run_ranks, tell
from states import Snapshot, assert_same, snapshot

import loco
from loco.exchange.stream import FrameStream
from loco.round.overlap import overlapped
from loco.round.overlap.flight import Flight

STEPS = 2
SETTINGS: dict[str, Any] = {"gate_margin": 0.1, "value_steps": 16}


def built(rank: int, *, repeats: int = 2, **options: Any) -> loco.PulseLoCo:
    topology = loco.Topology(dead_after=2.0, repeats=repeats, patience=30.0)
    inner = Scripted(parameters(SEED, NUMEL), SEED, rank)
    return loco.PulseLoCo(
        inner, sync_every=STEPS, overlap=True, exchange="gather", topology=topology, **SETTINGS, **options
    )


def losing(rank: int, losses: int) -> Any:
    """From now on site 1 loses its links so many times, once entries have arrived."""
    arrived, left = FrameStream.arrived, losses

    def lose(self: FrameStream) -> Any:
        nonlocal left
        frames = arrived(self)
        if rank == 1 and frames and left:
            left -= 1
            raise loco.TransportError("lost a link (injected)")
        return frames

    patch = pytest.MonkeyPatch()
    patch.setattr(FrameStream, "arrived", lose)
    return patch


def run_on(optimizer: loco.PulseLoCo, rank: int, steps: int) -> list[tuple[str, str]]:
    return [error_of(optimizer.step) for _ in range(steps)]


def lost_once(rank: int) -> tuple[list[tuple[str, str]], Snapshot, Snapshot]:
    clean, hurt = built(rank), built(rank)
    run_on(clean, rank, 6)
    clean.sync()
    run_on(hurt, rank, 1)
    patch = losing(rank, 1)
    errors = run_on(hurt, rank, 5)
    hurt.sync()
    patch.undo()
    return errors, snapshot(clean), snapshot(hurt)


def test_a_link_that_is_lost_in_flight_is_built_anew_and_costs_no_bit() -> None:
    for errors, clean, hurt in run_ranks(3, lost_once):
        assert {kind for kind, _ in errors} == {""}
        assert_same(clean, hurt)


def lost_for_good(rank: int) -> dict[str, Any]:
    """The first round in flight fails: its error comes at the boundary at which it should be applied."""
    optimizer = built(rank, repeats=0)
    patch = losing(rank, 1)
    errors = run_on(optimizer, rank, 4)
    failed = snapshot(optimizer)
    patch.undo()
    steps = 0
    while optimizer.round < 1:  # the boundary that failed is crossed by the next step, and two more land it
        errors += run_on(optimizer, rank, 1)
        steps += 1
    optimizer.sync()
    return {"errors": errors, "failed": failed, "steps": steps, "end": snapshot(optimizer)}


def test_a_round_that_fails_is_one_in_which_nobody_has_sent_anything() -> None:
    results = run_ranks(3, lost_for_good)
    paper = Followed(3, SETTINGS["gate_margin"], SETTINGS["value_steps"])
    paper.train(2)
    paper.cross()
    paper.train(2)
    paper.fail()
    for site, result in enumerate(results):
        kinds = [kind for kind, _ in result["errors"]]
        assert kinds[:4] == ["", "", "", "TransportError"]
        assert set(kinds[4:]) == {""}
        assert "What this site had sent goes with the next round" in result["errors"][3][1]
        paper.check(site, result["failed"], "residual", "weights", "anchor")
        assert result["steps"] == 3
    paper.train(1)
    paper.cross()
    paper.train(2)
    paper.cross()
    paper.cross()
    paper.finish()
    for site, result in enumerate(results):
        paper.check(site, result["end"], "anchor", "residual")


def one_is_not_finite(rank: int) -> dict[str, Any]:
    """A weight of site 1 is NaN at the second boundary, which sync() crosses."""
    optimizer = built(rank)
    run_on(optimizer, rank, 3)
    with torch.no_grad():
        if rank == 1:
            optimizer.param_groups[0]["params"][3][5] = float("nan")
    errors = [error_of(optimizer.sync)]
    failed = snapshot(optimizer)
    optimizer.sync()
    return {"error": errors[0], "failed": failed, "end": snapshot(optimizer), "round": optimizer.round}


def test_a_weight_that_is_not_finite_is_told_to_all_and_begins_from_theta_again() -> None:
    results = run_ranks(3, one_is_not_finite)
    paper = Followed(3, SETTINGS["gate_margin"], SETTINGS["value_steps"])
    paper.train(2)
    paper.cross()
    paper.train(1)
    paper.weights[1][13 + 5] = paper.began[1][13 + 5]  # as if the inner step had left it alone
    paper.cross()
    paper.fail()
    for site, result in enumerate(results):
        kind, text = result["error"]
        assert kind == "NonFiniteError"
        assert text.startswith("round 2, site 1: the update of group0.param3 is infinite or NaN")
        paper.check(site, result["failed"], "residual", "anchor", "momentum", "weights")
    paper.cross()
    paper.finish()
    for site, result in enumerate(results):
        assert result["round"] == 2
        paper.check(site, result["end"], "residual", "anchor", "momentum")


@pytest.fixture
def alone(single_site: None, monkeypatch: pytest.MonkeyPatch) -> tuple[loco.PulseLoCo, list[str]]:
    """A single site, and what it does."""
    inner, history = Scripted(parameters(SEED, NUMEL), SEED, 0), list[str]()
    optimizer = loco.PulseLoCo(inner, sync_every=STEPS, overlap=True)
    note(history, inner, "step", monkeypatch.setattr)
    for name in ("cross", "land", "take_back"):
        note(history, overlapped, name, monkeypatch.setattr)
    return optimizer, history


def check_alone(optimizer: loco.PulseLoCo, history: list[str]) -> None:
    paper = Followed(1)
    paper.follow({0: history})
    paper.check(0, snapshot(optimizer))


@pytest.mark.parametrize("counts", [False, True])
def test_a_site_that_can_not_learn_the_verdict_asks_again_before_it_goes_on(
    alone: tuple[loco.PulseLoCo, list[str]], monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    """So it is at the same boundary as sites that knew it."""
    optimizer, history = alone
    views = optimizer._loop.views
    decide, asked = views.decide, []

    def unanswered(vote: str) -> Any:
        asked.append(vote)
        if len(asked) == 2:  # the first question is whether a round is pending
            if counts:
                decide(vote)
            raise loco.TransportError("no answer (injected)", lasting=True)
        return decide(vote)

    monkeypatch.setattr(views, "decide", unanswered)
    assert [kind for kind, _ in run_on(optimizer, 0, 4)] == ["", "", "", "TransportError"]
    optimizer.settle()
    assert history.count("take_back") == (0 if counts else 1)
    assert optimizer.outer_state.on_its_way == (1 if counts else 0)
    optimizer.step()  # crosses the boundary that failed
    assert (optimizer.round, optimizer.outer_state.on_its_way) == ((1, 2) if counts else (0, 1))
    optimizer.sync()
    check_alone(optimizer, history)


def test_what_was_sent_is_taken_back_once_though_ctrl_c_comes_between(
    alone: tuple[loco.PulseLoCo, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, history = alone
    views, take_back = optimizer._loop.views, overlapped.take_back

    def lost(current: Any) -> Any:
        raise loco.TransportError("lost a link (injected)", lasting=True)

    def interrupted(state: Any) -> None:
        take_back(state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(views, "run", lost)
        patch.setattr(overlapped, "take_back", interrupted)
        run_on(optimizer, 0, 3)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert error_of(optimizer.step)[0] == "TransportError"  # which it would have raised
    optimizer.sync()
    assert history.count("take_back") == 1
    check_alone(optimizer, history)


def test_a_flight_travels_once_however_often_it_takes_off() -> None:
    runs, goes_on = [], threading.Event()

    def run() -> Any:
        runs.append(1)
        goes_on.wait(20.0)
        return "come"

    flight = Flight(run)
    flight.take_off()
    while not runs:
        time.sleep(0.01)
    flight._has_taken_off = False  # as if Ctrl-C had come while the thread began
    flight.take_off()
    assert not flight.wait(0.05)
    goes_on.set()
    assert flight.wait()
    assert flight.wait()
    assert (flight.result(), runs) == ("come", [1])


def drifts(rank: int) -> list[tuple[str, str]]:
    """A bit of site 1's θ flips beside the inner steps."""
    optimizer = built(rank)
    run_on(optimizer, rank, 5)
    if rank == 1:
        optimizer.outer_state.anchor.view(torch.int32)[7] ^= 1
    return run_on(optimizer, rank, 3)


def test_a_theta_that_drifts_apart_stops_the_next_round_on_all_sites() -> None:
    for errors in run_ranks(3, drifts):
        kinds = [kind for kind, _ in errors]
        assert kinds == ["", "", "ReplicaError"]
        assert "the sites' anchors differ" in errors[-1][1]


def stands_still(rank: int) -> dict[str, Any]:
    """Site 1 is stopped with a round in flight, until the others have noticed."""
    optimizer = built(rank, repeats=0)
    processes = [0] * 3
    dist.all_gather_object(processes, os.getpid())
    run_on(optimizer, rank, 3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    began, errors = time.monotonic(), [("", "")]
    while rank != 1 and errors[-1][0] == "":
        errors += run_on(optimizer, rank, 1)
        time.sleep(0.2)
    seconds = time.monotonic() - began
    tell(f"{rank} has noticed")
    if rank == 0:
        hear("2 has noticed")
        os.kill(processes[1], signal.SIGCONT)
    hear("0 has noticed")
    while optimizer.round < 4:
        errors.append(error_of(optimizer.sync))
    return {"errors": errors, "seconds": seconds, "round": optimizer.round, "end": snapshot(optimizer)}


def test_a_site_that_is_stopped_with_a_round_in_flight_is_named_and_all_go_on_when_it_is_back() -> None:
    results = run_ranks(3, stands_still)
    for rank in (0, 2):
        first = next(text for kind, text in results[rank]["errors"] if kind)
        assert "no heartbeat from site 1" in first
        assert results[rank]["seconds"] < 20
    for result in results:
        for name in ("anchor", "momentum", "weights"):
            np.testing.assert_array_equal(result["end"][name], results[0]["end"][name])


def shows(rank: int) -> dict[str, Any]:
    optimizer = built(rank)
    run_on(optimizer, rank, 5)
    before = snapshot(optimizer)
    optimizer.eval()
    shown = snapshot(optimizer)
    refused = error_of(optimizer.step)
    optimizer.train()
    after = snapshot(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.adopt_weights()
    adopted = snapshot(optimizer)
    optimizer.load_state_dict(saved)
    loaded = snapshot(optimizer)
    optimizer.sync()
    states = {"before": before, "shown": shown, "after": after, "adopted": adopted, "loaded": loaded}
    return states | {"refused": refused, "end": snapshot(optimizer)}


def test_eval_shows_theta_and_what_is_loaded_or_adopted_takes_the_place_of_a_round_in_flight() -> None:
    results = run_ranks(2, shows)
    for result in results:
        np.testing.assert_array_equal(result["shown"]["weights"], result["shown"]["anchor"])
        assert result["refused"][0] == "ValueError"
        assert_same(result["before"], result["after"])
        assert_same(result["before"], result["loaded"])
        np.testing.assert_array_equal(result["adopted"]["weights"], result["adopted"]["anchor"])
        for name in ("anchor", "weights", "momentum"):
            np.testing.assert_array_equal(result["end"][name], results[0]["end"][name])


@pytest.mark.usefixtures("single_site")
def test_an_update_that_fp32_can_not_hold_is_an_error_and_nothing_of_it_stays() -> None:
    weight = torch.nn.Parameter(torch.full((300,), 3e38))
    optimizer = loco.PulseLoCo(torch.optim.SGD([weight], lr=1.0), sync_every=1, overlap=True, gate_margin=1e9)
    weight.grad = torch.zeros(300)
    weight.grad[299] = 3e38
    assert error_of(optimizer.step) == ("", "nothing was raised")
    before = snapshot(optimizer)
    kind, text = error_of(optimizer.step)  # e holds 3e38, and Δ is as much again
    assert kind == "NonFiniteError"
    assert text.startswith("round 2, site 0: the update of group0.param0 is infinite or NaN")
    assert_same(before, snapshot(optimizer))
    weight.grad.zero_()
    assert error_of(optimizer.step) == ("", "nothing was raised")


ENDS = """
import torch, loco
weight = torch.nn.Parameter(torch.ones(300))
optimizer = loco.PulseLoCo(torch.optim.SGD([weight], lr=1e-3), sync_every=2, overlap=True)
for _ in range(4):
    weight.grad = torch.ones(300)
    optimizer.step()
{end}
"""


def told_at_the_end(end: str) -> str:
    names = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(end=end)],
        env={**os.environ, **names},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stderr


def test_a_program_that_ends_with_a_round_in_flight_is_told_to_sync() -> None:
    told = "the program ends with round 2 in flight, which is in no site's weights: call sync() after"
    assert told in told_at_the_end("")
    assert told not in told_at_the_end("optimizer.sync()")


def moved(rank: int) -> tuple[str, str]:
    optimizer = built(rank)
    run_on(optimizer, rank, 4)
    with torch.no_grad():
        optimizer.param_groups[0]["params"][3][7] += 1.0
    return error_of(optimizer.step)


def test_weights_that_are_changed_after_a_boundary_are_refused() -> None:
    for kind, text in run_ranks(2, moved):
        assert kind == "ValueError"
        assert "was changed from outside since round 1" in text


def spoiled_in_one_slice(rank: int) -> list[tuple[str, str]]:
    topology = loco.Topology(ranks_per_site=2, dead_after=4.0, patience=30.0)
    inner = Scripted(parameters(SEED, NUMEL), SEED, rank // 2)
    optimizer = loco.PulseLoCo(inner, sync_every=STEPS, overlap=True, exchange="gather", topology=topology)
    told = run_on(optimizer, rank, STEPS + 1)
    if rank // 2 == 1:
        with torch.no_grad():
            w = optimizer.param_groups[0]["params"][0]
            w[(0,) * w.dim()] = float("nan")  # which rank 2 exchanges
    return told + run_on(optimizer, rank, 3 * STEPS)


def test_all_ranks_of_a_site_raise_at_one_boundary_where_one_has_a_nan_and_go_on_together() -> None:
    for told in run_ranks(4, spoiled_in_one_slice):
        failed = [(step, kind) for step, (kind, _) in enumerate(told) if kind]
        assert failed == [(3 * STEPS - 1, "NonFiniteError")]
