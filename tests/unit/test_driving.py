"""What lies between a training step and the round that it runs."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import loco
from loco.round.round import Round

pytestmark = pytest.mark.usefixtures("single_site")
LOCO = str(Path(loco.__file__).parent)


def calls_to_a_round(monkeypatch: pytest.MonkeyPatch, step: Any) -> list[str]:
    """The functions of loco on the stack when `step` comes to `Round.run`, from the outermost one."""
    found: list[str] = []
    run = Round.run

    def watched(self: Round) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(LOCO):
                found.insert(0, frame.f_code.co_qualname)
            frame = frame.f_back
        run(self)

    monkeypatch.setattr(Round, "run", watched)
    step()
    return found


def inner_optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    return torch.optim.SGD([weight], lr=0.1)


@pytest.mark.parametrize("kind", [loco.PulseLoCo, loco.DiLoCo])
def test_a_wrappers_step_comes_to_a_round_in_four_calls(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = kind(inner_optimizer(), sync_every=1)
    calls = calls_to_a_round(monkeypatch, optimizer.step)
    assert calls == [
        "LowCommunicationOptimizer.step",
        "OuterLoop.after_step",
        "OuterLoop.run_round",
        "Views.run",
    ]
    assert optimizer.round == 1


def test_the_hook_of_an_attached_optimizer_comes_to_a_round_in_four_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = inner_optimizer()
    handle = loco.attach(optimizer, sync_every=1)
    calls = calls_to_a_round(monkeypatch, optimizer.step)
    assert calls[1:] == ["OuterLoop.after_step", "OuterLoop.run_round", "Views.run"]
    assert handle.round == 1
