"""The short version of `python tests/soak.py`; the long one's figures are in docs/failures.md."""

from dataclasses import replace

import pytest
from selection import INTERRUPTIONS
from soak import Plan, soak


@pytest.mark.parametrize("rounds", [15, pytest.param(90, marks=pytest.mark.check(INTERRUPTIONS))])
def test_random_faults_lose_no_bit_and_leave_nothing_behind(rounds: int) -> None:
    plan = Plan(rounds=rounds, seed=3, faults=0.3, stops=2, kills=1)
    hurt = soak(plan)
    clean = soak(replace(plan, faults=0.0, stops=0, kills=0))
    assert sum(sum(one.errors.values()) for one in hurt.values()) > rounds / 5  # something did happen
    for site, one in hurt.items():
        assert one.state == clean[site].state
        assert one.checked >= 2 * rounds / 3  # the rounds since the kill, which comes in the first third
        # A lost link's files and threads go with it. What a moment needs may still be there at either end: a
        # connection to the store in use, a checkpoint being written.
        (_, _, files, threads), (_, _, files_at_the_end, threads_at_the_end) = one.grown[0], one.grown[-1]
        assert files_at_the_end <= files + 4
        assert threads_at_the_end <= threads + 2
