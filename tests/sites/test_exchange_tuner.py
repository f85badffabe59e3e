"""Which code `wire="auto"` takes, in real rounds."""

import time
from typing import Any

import pytest
import torch
from sites import run_ranks

import loco
from loco.wire import codecs

NUMEL, CODING = 20_000, 0.05


def wires(rank: int, slow: str) -> list[str]:
    """Of ten rounds between sites that take long to code a frame. There is one."""
    kind: Any = type(codecs.SPARSE[slow])
    encode = kind.encode

    def slowly(*args: Any) -> Any:
        time.sleep(CODING)
        return encode(*args)

    kind.encode = slowly
    weight = torch.nn.Parameter(torch.full((NUMEL,), 0.02))
    optimizer = loco.PulseLoCo(
        torch.optim.SGD([weight], lr=1.0), sync_every=1, wire="auto", exchange="gather"
    )
    found = []
    for _ in range(10):
        weight.grad = torch.zeros_like(weight)
        weight.grad[rank::20] = 1e-3  # few enough that entries are sent
        optimizer.step()
        assert optimizer.last_report is not None
        found.append(optimizer.last_report.wire)
    return found


@pytest.mark.parametrize(("slow", "taken"), [("tight", "fast"), ("fast", "tight")])
def test_the_time_of_an_exchange_counts_the_coding_of_its_first_frame(slow: str, taken: str) -> None:
    first, second = run_ranks(2, wires, slow)
    assert first == second
    assert {"tight", "fast"} == set(first)  # both are tried
    assert set(first[7:]) == {taken}
