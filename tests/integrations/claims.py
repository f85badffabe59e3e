"""What every framework's test claims of its sites."""

from collections.abc import Sequence

import torch
from tiny import Told
from torch import Tensor


def same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(
        a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )


def learned_separately(berlin: Told, paris: Told) -> None:
    """Between rounds each site went its own way: averaged gradients would make these norms equal."""
    assert berlin.reports
    for here, there in zip(berlin.reports, paris.reports, strict=True):
        assert here.update_norms == there.update_norms
        assert len(set(here.update_norms)) == len(here.update_norms) == 2
    assert berlin.steps[0] != paris.steps[0]


def ended_alike(berlin: Told, paris: Told) -> None:
    for name in ("anchor", "momentum"):
        assert same_bits([berlin.outer[name]], [paris.outer[name]])
    assert same_bits(berlin.weights, paris.weights)


def sent_its_rounds_only(berlin: Told, paris: Told, rounds: int) -> None:
    """Every round has its bytes, and what one site sent is what the other received."""
    assert [report.round for report in berlin.reports] == list(range(1, rounds + 1))
    for here, there in zip(berlin.reports, paris.reports, strict=True):
        assert 0 < here.payload_bytes < here.sent_bytes == there.received_bytes
        assert here.received_bytes == there.sent_bytes


def same_training(found: Told, expected: Told) -> None:
    """Every step and every round, bit for bit."""
    assert found.steps == expected.steps
    assert same_bits(found.weights, expected.weights)
    for name in ("anchor", "momentum", "residual"):
        assert same_bits([found.outer[name]], [expected.outer[name]])
    assert [r.entries for r in found.reports] == [r.entries for r in expected.reports]
    assert [r.sent_bytes for r in found.reports] == [r.sent_bytes for r in expected.reports]


def resumed(again: Told, whole: Told, *, after: int) -> None:
    """What was resumed after some steps went on as what never stopped."""
    assert again.steps == whole.steps[after:]
    assert same_bits(again.weights, whole.weights)
    for name in ("anchor", "momentum", "residual"):
        assert same_bits([again.outer[name]], [whole.outer[name]])
    assert again.reports[-1].round == whole.reports[-1].round
    assert again.reports[-1].entries == whole.reports[-1].entries


def evaluated_theta(told: Told) -> None:
    """And not the site's own weights, which a round has yet to bring together."""
    assert told.shown
    assert set(told.shown) == {(True, False)}
