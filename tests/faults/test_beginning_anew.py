"""After an exception or Ctrl-C the same process begins again, while a traceback holds what it had before."""

import os
import sys
import weakref

import pytest
import torch
from selection import INTERRUPTIONS
from sites import error_of, launch_worlds
from torch import Tensor, nn

import loco

H, ROUNDS = 2, 3


class Notebook:
    """Cells that a user runs: `build` and `train` again after an error, as often as needed."""

    def __init__(self, method: str, struck_at: str) -> None:
        self.is_struck = os.environ["LOCO_SITE"] == "berlin"
        self.struck_at, self.attaches = struck_at, method == "attach"
        self.parameter = nn.Parameter(torch.arange(1003.0) / 100)
        self.inner = torch.optim.AdamW([self.parameter], lr=0.1)

    def build(self) -> loco.PulseLoCo | loco.Attached:
        topology = loco.Sites(dead_after=2.0, patience=60.0)
        if self.attaches:
            optimizer = loco.attach(self.inner, sync_every=H, topology=topology)
        else:
            optimizer = loco.PulseLoCo(self.inner, sync_every=H, topology=topology)
        optimizer.register_round_hook(self.strike)
        return optimizer

    def strike(self, progress: loco.RoundProgress) -> None:
        if progress.number == 2 and progress.phase == self.struck_at and self.is_struck:
            self.is_struck = False
            raise KeyboardInterrupt

    def train(self, optimizer: loco.PulseLoCo | loco.Attached) -> Tensor:
        steps = self.inner if self.attaches else optimizer
        assert isinstance(steps, torch.optim.Optimizer)
        while optimizer.round < ROUNDS:
            if self.struck_at == "inner step" and optimizer.round == 1 and self.is_struck:
                self.is_struck = False
                raise KeyboardInterrupt
            self.parameter.grad = torch.sin(torch.arange(1003.0) * (1 + optimizer.topology.site))
            steps.step()
        return optimizer.outer_state.anchor.clone()


def begins_again(method: str, struck_at: str) -> tuple[str, str, str, Tensor]:
    """-> what the first training raised; what its repeat and its optimizer say after it; θ of the second."""
    notebook = Notebook(method, struck_at)
    first = notebook.build()
    try:
        notebook.train(first)
    except (KeyboardInterrupt, loco.TransportError) as error:
        sys.last_value = error  # as an interactive session does, with all that the frames hold
    raised = type(sys.last_value).__name__
    # One of the two repeats its round, which the other never comes to.
    repeated = error_of(first.sync)[1] if raised == "TransportError" else ""
    before = weakref.ref(first.topology)
    theta = notebook.train(notebook.build())
    assert before() is first.topology
    return raised, repeated, error_of(first.sync)[1], theta


@pytest.mark.check(INTERRUPTIONS)
@pytest.mark.parametrize("struck_at", ["inner step", "received", "voted"])
@pytest.mark.parametrize("method", ["PulseLoCo", "attach"])
def test_both_sites_begin_again_in_the_same_processes(method: str, struck_at: str) -> None:
    [berlin], [paris] = launch_worlds(begins_again, method, struck_at)
    assert berlin[0] == "KeyboardInterrupt"
    assert paris[0] == "TransportError"
    told = "site berlin began anew in the same process: build Sites and optimizer anew here, too"
    assert paris[1].endswith(told)  # which is all there is to do
    for _, _, late, theta in (berlin, paris):
        assert "the sites of this optimizer are closed" in late
        assert torch.equal(theta, berlin[3])
