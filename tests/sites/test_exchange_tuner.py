"""Which code `wire="auto"` takes, in real rounds."""

import time
from typing import Any

import pytest
import torch
from selection import PRODUCTS
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


def sent(rank: int, options: dict[str, Any]) -> list[tuple[str, float, int]]:
    """By code and density: the code, the share of entries, and the bytes, of a round after some others."""
    found = []
    for wire in ("tight", "fast"):
        for scale in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3):
            torch.manual_seed(0)
            weight = torch.nn.Parameter(torch.randn(1 << 16) * 0.02)
            optimizer = loco.PulseLoCo(torch.optim.SGD([weight], lr=1.0), sync_every=1, wire=wire, **options)
            noise = torch.Generator().manual_seed(rank)
            for _ in range(4):
                weight.grad = torch.randn(weight.shape, generator=noise) * scale
                optimizer.step()
            report = optimizer.last_report
            assert report is not None
            found.append((wire, report.density, report.sent_bytes))
    return found


@pytest.mark.check(PRODUCTS)
@pytest.mark.parametrize("options", [{}, {"value_steps": 16, "gate_margin": 0.2}, {"value_steps": 2}])
def test_the_tight_code_sends_the_fewest_bytes_at_every_density(options: dict[str, Any]) -> None:
    """What docs/wire.md promises to users of metered links."""
    found, _ = run_ranks(2, sent, options)
    shares = [share for _, share, _ in found[:5]]
    assert shares == [share for _, share, _ in found[5:]]
    assert shares[0] < 0.1
    assert shares[-1] > 0.9
    for (_, _, tight), (_, _, fast) in zip(found[:5], found[5:], strict=True):
        assert tight < fast
