"""The short version of the soak (`soak.py`); the long one's figures are in docs/failures.md."""

from dataclasses import replace

import pytest
from lies import LIES
from selection import INTERRUPTIONS
from soak import Plan, soak


@pytest.mark.check(INTERRUPTIONS)
def test_random_faults_lose_no_bit_and_leave_nothing_behind() -> None:
    rounds = 45
    plan = Plan(rounds=rounds, seed=3, faults=0.3, stops=1, kills=1)
    hurt = soak(plan)
    clean = soak(plan.without_faults())
    assert sum(sum(one.errors.values()) for one in hurt.values()) >= plan.least_errors() > 0
    for site, one in hurt.items():
        assert one.state == clean[site].state
        assert one.checked >= 2 * rounds / 3  # the rounds since the kill, which comes in the first third
        # A lost link's files and threads go with it. What a moment needs may still be there at either end: a
        # connection to the store in use, a checkpoint being written.
        (_, _, files, threads), (_, _, files_at_the_end, threads_at_the_end) = one.grown[0], one.grown[-1]
        assert files_at_the_end <= files + 4
        assert threads_at_the_end <= threads + 2


@pytest.mark.check(INTERRUPTIONS)
@pytest.mark.parametrize(
    ("kind", "rounds"),
    [("lies", len(LIES)), ("stops", 10), ("interrupts", 12), ("saving_kills", 8)],
)
def test_one_kind_of_fault_again_and_again_loses_no_bit(kind: str, rounds: int) -> None:
    count = {"lies": 1.0, "stops": 3, "interrupts": 7, "saving_kills": 2}[kind]
    plan = replace(Plan(rounds=rounds).without_faults(), **{kind: count})
    said: list[str] = []
    hurt, clean = soak(plan, said.append), soak(plan.without_faults())
    assert {site: one.state for site, one in hurt.items()} == {site: one.state for site, one in clean.items()}
    kills = said.count("a site was killed: all restart from their checkpoints")
    if kind == "saving_kills":
        assert kills == count
    else:
        assert sum(sum(one.errors.values()) for one in hurt.values()) > 0
    if kind == "lies":
        assert plan.not_named(hurt) == []
        assert all(len(one.lies) == rounds for one in hurt.values())
