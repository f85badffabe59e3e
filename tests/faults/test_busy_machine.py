"""A machine with more to do than cores is slow, and no site is taken for dead because of it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from scripted import Scripted, bits, parameters
from selection import INTERRUPTIONS
from sites import run_ranks

import loco

ROUNDS = 40


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def many_rounds(rank: int) -> bytes:
    """The first loss that is noticed, rightly or not, is an error."""
    inner = Scripted(parameters(3, 1003), 3, rank)
    optimizer = loco.PulseLoCo(inner, sync_every=2, topology=loco.Topology(repeats=0))
    for _ in range(2 * ROUNDS):
        optimizer.step()
    assert optimizer.round == ROUNDS
    return bits(optimizer.outer_state.anchor).tobytes()


@pytest.mark.check(INTERRUPTIONS)
def test_eight_ranks_beside_four_busy_loops_raise_no_false_alarm() -> None:
    with busy_loops(4):
        anchors = run_ranks(8, many_rounds)
    assert len(set(anchors)) == 1
