"""Sites that are not alike: each makes a number of inner steps of its own in a round, and counts by its own
weight."""

import copy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from paper import OverlappedPaper
from round_cases import NUMEL, SEED, Case, options_of, paper_of
from scripted import Scripted, bits, move, parameters
from sites import error_of, run_ranks, run_worlds
from states import assert_same, snapshot

import loco

STEPS = {0: 1, 1: 3, 2: 2}
ROUNDS = 4
CASES = [
    Case("PulseLoCo", gate_margin=0.1, value_steps=16, gate_gain=3.5),
    Case("PulseLoCo", value_steps=16, sums_margin=0.5, bf16=True),
    Case("DiLoCo"),
]
KINDS = list(product(CASES, (False, True), (False, True)))  # whether rounds overlap, and sites have weights


def weight(site: int, round: int) -> float:
    return (0.3, 1.0, 2.7)[(site + round) % 3]


def built(rank: int, case: Case, overlap: bool, steps: Any) -> Any:
    inner = Scripted(parameters(SEED, NUMEL, case.bf16), SEED, rank)
    return getattr(loco, case.kind)(inner, **options_of(case) | {"sync_every": steps, "overlap": overlap})


def at_the_beginning(optimizer: Any, rank: int, progress: loco.RoundProgress) -> None:
    if progress.phase == "begun":
        optimizer.weight = weight(rank, progress.number - 1)


def run_library(rank: int) -> list[dict[str, Any]]:
    ends = []
    for case, overlap, has_weights in KINDS:
        optimizer = built(rank, case, overlap, STEPS)
        assert optimizer.sync_every == STEPS[rank]
        by_hook = has_weights and not overlap and case.kind == "DiLoCo"
        if by_hook:
            optimizer.register_round_hook(partial(at_the_beginning, optimizer, rank))
        for round in range(ROUNDS):
            if has_weights and not by_hook:
                optimizer.weight = weight(rank, round)
            for _ in range(STEPS[rank]):
                optimizer.step()
        if overlap:
            optimizer.sync()
        ends.append(snapshot(optimizer))
    return ends


def test_each_site_makes_its_own_number_of_steps_and_the_bits_are_the_specifications() -> None:
    told = run_ranks(3, run_library)
    for number, (case, overlap, has_weights) in enumerate(KINDS):
        paper = OverlappedPaper(**paper_of(case, 3))
        made = [0, 0, 0]
        for round in range(ROUNDS):
            if has_weights:
                paper.counts = [weight(site, round) for site in range(3)]
            weights = []
            for site, began in enumerate(paper.began if overlap else [paper.cast(paper.anchor)] * 3):
                w = began
                for _ in range(STEPS[site]):
                    w = paper.cast(w - move(SEED, site, made[site], NUMEL, 3e-5))
                    made[site] += 1
                weights.append(w)
            if overlap:
                paper.boundary(weights)
            else:
                paper.round(weights)
        if overlap:
            paper.sync(paper.began)
        for site, ends in enumerate(told):
            expected = {"anchor": paper.anchor, "momentum": paper.momentum}
            expected["weights"] = paper.cast(paper.anchor)
            if "residual" in ends[number]:
                expected["residual"] = paper.residuals[site]
            assert_same(ends[number], {name: bits(vector) for name, vector in expected.items()})


def resumed(rank: int) -> list[dict[str, Any]]:
    """With a round in flight, which is sent again with the weight that it had."""
    optimizer = built(rank, CASES[1], True, 1)
    optimizer.weight = weight(rank, 0)
    optimizer.step()
    optimizer.weight = weight(rank, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    again = built(rank, CASES[1], True, 1)
    again.load_state_dict(saved)
    assert again.weight == optimizer.weight
    for one in (optimizer, again):
        one.inner.count = 1
        one.step()
        one.sync()
    return [snapshot(optimizer), snapshot(again)]


def test_a_weight_stays_with_the_round_that_was_sent_with_it() -> None:
    for ends in run_ranks(3, resumed):
        assert_same(*ends)


def refused(rank: int) -> list[tuple[str, str]]:
    each = [[{0: 2, 1: 3}, {0: 2, 1: 4}], [2, {0: 2, 1: 3}]]
    return [error_of(lambda steps=steps: built(rank, CASES[0], False, steps[rank])) for steps in each]


def test_all_sites_must_say_the_same() -> None:
    for kind, text in (error for errors in run_ranks(2, refused) for error in errors):
        assert kind == "AgreementError"
        assert text.startswith("the sites differ in ")


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ({"berlin": 2, "paris": 3}, "sync_every says .* the sites berlin, paris make: give site 0 a number"),
        ({0: 0.5}, "sync_every must be a whole number >= 1, got 0.5"),
        ({}, "sync_every names no site: give each site's number of inner steps"),
    ],
)
@pytest.mark.usefixtures("single_site")
def test_a_site_without_a_number_is_refused(steps: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        built(0, CASES[0], False, steps)


def of_names(rank: int, folder: Path) -> tuple[int, str]:
    """Saved inside a round, where sites are at different steps, and after one."""
    topology = loco.Sites(patience=30.0, dead_after=5.0)
    inner = Scripted(parameters(SEED, NUMEL), SEED, topology.site)
    optimizer = loco.PulseLoCo(inner, sync_every={"a": 2, "b": 4}, topology=topology)
    with loco.Checkpoints(folder / topology.name) as checkpoints:
        for _ in range(optimizer.sync_every // 2):
            optimizer.step()
        _, text = error_of(lambda: checkpoints.save(optimizer, blocking=True))
        while optimizer.round < 2:
            optimizer.step()
        checkpoints.save(optimizer, blocking=True)
        saved = snapshot(optimizer)
        optimizer.sync()
        checkpoints.load(optimizer)
        assert_same(snapshot(optimizer), saved)
    return optimizer.sync_every, text


def test_sites_go_by_their_names_and_save_after_a_round(tmp_path: Path) -> None:
    told = [one[0] for one in run_worlds(["a", "b"], 1, of_names, tmp_path)]
    assert [steps for steps, _ in told] == [2, 4]
    for _, text in told:
        assert "save() and load() belong at one place on all ranks, but came" in text
