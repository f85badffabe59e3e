"""Memory beside the state: below half a byte per parameter, and not counting what is sent."""

import subprocess
import sys
from pathlib import Path

import pytest
from selection import MEMORY

PROGRAM = """
import sys, torch
from experiments.bench.kernels import State, _bytes
from experiments.bench.measuring import peak_bytes
from loco import kernels
from loco.kernels import Entries, Gate, OuterStep, Streamed

numel, density, device = int(sys.argv[1]), float(sys.argv[2]), torch.device(sys.argv[3])
offload = sys.argv[4] == "offload"
state = State(device, numel, density, offload=offload)
streamed = Streamed(kernels.home("cpu"))
home = streamed if offload or sys.argv[4] == "streamed" else kernels.home(device.type)
if sys.argv[4] == "streamed":
    kernels._home_of = lambda *_: streamed
entries = home.encode(state.anchor, state.weights, state.residual, Gate()).entries
own = _bytes(entries)
outer = OuterStep(divisor=1, lr=0.7, momentum=0.9, nesterov=True)
apply = lambda: home.apply(
    state.anchor, state.momentum, state.weights, state.residual, entries, [entries], outer)
encode = lambda: home.encode(state.anchor, state.weights, state.residual, Gate())
apply()  # once, for what stays
state.restore()
print("encode", (peak_bytes(encode, device) - own) / numel)
state.restore()
print("apply", peak_bytes(apply, device) / numel)
del entries
state.restore()
print("round", (peak_bytes(state.optimizer.sync, device) - 2 * own) / numel)
"""


def scratch(numel: int, density: float, device: str, how: str) -> dict[str, float]:
    """Bytes per parameter by pass, in a process of its own."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(numel), str(density), device, how],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {
        name: float(value) for name, _, value in (line.partition(" ") for line in done.stdout.splitlines())
    }


@pytest.mark.check(MEMORY)
@pytest.mark.parametrize("density", [0.01, 0.12])
@pytest.mark.parametrize("how", ["home", "streamed"])
def test_scratch_in_host_memory(density: float, how: str) -> None:
    """32M parameters, of which one byte each would be 32 MiB: far above what a page or a thread costs."""
    found = scratch(1 << 25, density, "cpu", how)
    assert set(found) == {"encode", "apply", "round"}
    assert all(value < 0.5 for value in found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1 << 20, 1 << 25])
@pytest.mark.parametrize("density", [0.01, 0.12])
@pytest.mark.parametrize("how", ["home", "offload"])
def test_scratch_on_a_gpu(numel: int, density: float, how: str) -> None:
    """The GPU's memory. With the state offloaded not even the payload lies there."""
    found = scratch(numel, density, "cuda", how)
    assert all(value < 0.5 for value in found.values()), found
