"""The poisoned run (`make poison`) really fills memory, in this process and in those that it starts."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import poison
import pytest
import torch
from selection import C_BUILDS, COMMANDS
from sites import run_ranks

TUNABLES = re.findall(r"GLIBC_TUNABLES=(\S+)", (Path(__file__).parents[2] / "Makefile").read_text())


def first_is_nan(_: int) -> bool:
    return math.isnan(float(torch.empty(64)[0]))


@pytest.mark.check(C_BUILDS)
def test_malloc_returns_negative_numbers_in_a_child() -> None:
    program = "import torch; print(float(torch.empty(1 << 16).max()), int(torch.empty(8, dtype=int).max()))"
    child = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"GLIBC_TUNABLES": TUNABLES[0]},
        capture_output=True,
        text=True,
        check=True,
    )
    largest_float, largest_int = map(float, child.stdout.split())
    assert largest_float < -1e38
    assert largest_int < 0


@pytest.mark.check(COMMANDS)
def test_torch_returns_nan_here_and_on_a_rank() -> None:
    poison.fill_tensors(True)
    try:
        assert first_is_nan(0)
        assert run_ranks(2, first_is_nan) == [True, True]
    finally:
        poison.fill_tensors(False)
