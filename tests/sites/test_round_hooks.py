"""The official way to see a round and to step into it."""

from typing import Any

import pytest
import torch
from sites import run_ranks

import loco
from loco.round.hooks import Phase, RoundProgress


def build(rank: int, **options: Any) -> tuple[torch.nn.Parameter, loco.PulseLoCo]:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 600))
    inner = torch.optim.SGD([weight], lr=0.01)
    weight.grad = torch.full_like(weight, rank + 1.0)
    return weight, loco.PulseLoCo(inner, sync_every=1, **options)


def phases_seen(rank: int, exchange: str) -> list[tuple[str, int, int, int]]:
    _, optimizer = build(rank, exchange=exchange)
    seen: list[RoundProgress] = []
    handle = optimizer.register_round_hook(seen.append)
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert all(progress.state is optimizer.outer_state for progress in seen)
    sent = [-1 if p.entries is None else p.entries.values.numel() for p in seen]
    return [(p.phase, p.number, k, len(p.contributions)) for p, k in zip(seen, sent, strict=True)]


@pytest.mark.parametrize(("exchange", "contributions"), [("gather", 2), ("owner", 1)])
def test_a_hook_sees_every_phase_once_and_none_after_it_is_removed(exchange: str, contributions: int) -> None:
    for seen in run_ranks(2, phases_seen, exchange):
        assert [phase for phase, *_ in seen] == list(Phase)
        assert {number for _, number, *_ in seen} == {1}
        entries = seen[1][2]
        assert entries > 0
        assert [k for *_, k, _ in seen] == [-1, *[entries] * 6]
        assert [k for *_, k in seen] == [0, 0, 0, *[contributions] * 4]


def weights_moved_by_a_hook(rank: int) -> torch.Tensor:
    weight, optimizer = build(rank, outer_lr=1.0, outer_momentum=0.0, gate="open")

    @torch.no_grad()
    def reset(progress: RoundProgress) -> None:
        if progress.phase == "begun":
            weight.copy_(progress.state.anchor)

    optimizer.register_round_hook(reset)
    optimizer.step()
    return weight.detach().clone()


def test_what_a_hook_does_to_the_weights_before_a_round_is_what_the_round_sees() -> None:
    for weight in run_ranks(2, weights_moved_by_a_hook):
        assert torch.equal(weight, torch.linspace(-1, 1, 600))


def error_in_phase(rank: int, phase: str) -> tuple[str, str, bool, bool]:
    _, optimizer = build(rank)
    failed = False

    def fail(progress: RoundProgress) -> None:
        nonlocal failed
        if progress.phase == phase and rank == 1 and not failed:
            failed = True
            raise MemoryError("the hook's own")

    optimizer.register_round_hook(fail)
    anchor = optimizer.outer_state.anchor.clone()
    kind, text = "", ""
    try:
        optimizer.step()
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    unchanged = torch.equal(anchor, optimizer.outer_state.anchor)
    optimizer.sync()
    return kind, text, unchanged, not torch.equal(anchor, optimizer.outer_state.anchor)


@pytest.mark.parametrize("phase", ["begun", "encoded", "announced", "received"])
def test_a_hook_that_fails_before_the_last_vote_fails_the_round_everywhere(phase: str) -> None:
    other, own = run_ranks(2, error_in_phase, phase)
    assert own == ("MemoryError", "the hook's own", True, True)
    assert other[0] == "PeerError"
    assert other[2:] == (True, True)
