"""Memory that lives as long as the run."""

from pathlib import Path

import pytest
import torch

import loco
from loco.kernels.reserve import lasting_zeros

MIB = 1 << 20
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(address: int) -> set[str]:
    """Of the mapping that holds this address, as the kernel abbreviates them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return set(rest.split())
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.parametrize("numel", [0, 1003, MIB - 1, 2 * MIB + 5])
def test_zeros_that_can_be_written(numel: int) -> None:
    zeros = lasting_zeros(numel, torch.float32)
    assert zeros.shape == (numel,)
    assert not zeros.any()
    zeros += 1.0
    assert zeros.sum().item() == numel


@pytest.mark.skipif(
    not HUGE.exists() or "[never]" in HUGE.read_text(), reason="needs large pages, which are off"
)
@pytest.mark.usefixtures("single_site")
def test_the_state_of_a_large_model_asks_for_large_pages() -> None:
    weight = torch.nn.Parameter(torch.zeros(4 * MIB))
    outer = loco.PulseLoCo(torch.optim.SGD([weight], lr=1.0)).outer_state
    for tensor in (outer.anchor, outer.momentum, outer.residual):
        assert tensor is not None
        assert "hg" in flags_of(tensor.data_ptr() + 4 * MIB)
