"""An exchange holds what has arrived, since nothing is applied before all confirmed it, and little else."""

from typing import Any

import pytest
import torch
from selection import MEMORY
from sites import run_ranks

import loco
from experiments.bench.measuring import peak_bytes, resident_bytes

NUMEL = 1 << 25


def peak_of_a_round(rank: int, options: dict[str, Any]) -> tuple[float, float]:
    """-> bytes per parameter that a round takes at its peak, and that this site's entries take"""
    generator = torch.Generator().manual_seed(1)
    param = torch.nn.Parameter(0.02 * torch.randn(NUMEL, generator=generator))
    optimizer = loco.PulseLoCo(torch.optim.SGD([param], lr=1.0), sync_every=100, gate_gain=1.0, **options)
    generator.manual_seed(rank + 2)
    for part in param.data.split(1 << 20):
        part += 3e-6 * torch.randn(part.numel(), generator=generator)
    weights = param.data.clone()
    optimizer.sync()  # once, for what stays
    param.data.copy_(weights)
    peak = peak_bytes(optimizer.sync, torch.device("cpu"))
    assert optimizer.last_report is not None
    return peak / NUMEL, 5 * optimizer.last_report.entries / NUMEL


@pytest.mark.check(MEMORY)
@pytest.mark.parametrize("wire", ["fast", "tight"])
@pytest.mark.parametrize("exchange", ["gather", "owner"])
def test_an_exchange_holds_entries_and_frames(exchange: str, wire: str) -> None:
    sites = 2
    for peak, own in run_ranks(sites, peak_of_a_round, {"exchange": exchange, "wire": wire}):
        assert 0.1 < own < 1.0
        # This site's entries; those of the other site, or of the sums, which are no more than both sites';
        # these once more while they are joined. Then half a byte for everything else.
        arrived = own if exchange == "gather" else sites * own
        assert peak < own + 2 * arrived + 0.5


def memory_after_rounds(rank: int, exchange: str) -> list[float]:
    """-> bytes per parameter that the process holds after each round, beyond those after the third"""
    generator = torch.Generator().manual_seed(1)
    param = torch.nn.Parameter(0.02 * torch.randn(NUMEL, generator=generator))
    options: dict[str, Any] = {"exchange": exchange, "wire": "fast", "gate_gain": 1.0}
    optimizer = loco.PulseLoCo(torch.optim.SGD([param], lr=1.0), sync_every=100, **options)
    generator.manual_seed(rank + 2)
    held = []
    for _ in range(12):
        noise = 3e-6 * torch.randn(1 << 20, generator=generator)
        for part in param.data.split(noise.numel()):
            part += noise
        optimizer.sync()
        held.append(resident_bytes() / NUMEL)
    return [now - held[2] for now in held[3:]]


@pytest.mark.check(MEMORY)
@pytest.mark.parametrize("exchange", ["gather", "owner"])
def test_rounds_hold_no_more_memory_as_they_go_on(exchange: str) -> None:
    """Each leaves its memory to the next. A tenth of a byte is for rounds that have some more entries."""
    for beyond in run_ranks(2, memory_after_rounds, exchange):
        assert max(beyond) < 0.1
