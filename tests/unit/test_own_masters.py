"""An optimizer that keeps masters is told from one whose steps are small, large, or none."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masters import Sites, WithMasters
from torch import nn

# Classes of somebody else's, of which nothing is known: torch's own are not watched.
KINDS: list[Any] = [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
SGD, ADAMW, RMSPROP, ADAGRAD = (type(kind.__name__, (kind,), {}) for kind in KINDS)
OTHERS = [(SGD, {}), (SGD, {"momentum": 0.9, "nesterov": True}), (ADAMW, {}), (RMSPROP, {}), (ADAGRAD, {})]

few = settings(max_examples=settings().max_examples // 3)  # each trains some models


@few
@given(
    st.sampled_from(OTHERS),
    st.floats(-7, -1.5),
    st.sampled_from([1, 2, 3, 8]),
    st.integers(1, 3),
    st.sampled_from([(0.7, 0.9), (0.1, 0.9), (0.5, 0.0), (1.0, 0.0), (0.05, 0.0), (7.0, 0.0)]),
)
def test_no_optimizer_without_masters_is_blamed(
    inner: Any, exponent: float, steps: int, sites: int, outer: tuple[float, float]
) -> None:
    kind: Any = inner[0]
    options = inner[1]
    lr = 10**exponent * (100 if kind is SGD else 1)
    run = Sites(
        lambda net: kind(net.parameters(), lr=lr, **options),
        sites=sites,
        outer_lr=outer[0],
        outer_momentum=outer[1],
    )
    for _ in range(6):
        run.run_round(steps)
    assert run.undone() == [""] * sites


def frozen_half(net: nn.Module) -> Any:
    next(net.parameters()).requires_grad_(False)
    return ADAMW(net.parameters(), lr=1e-5)


@pytest.mark.parametrize(
    "build",
    [lambda net: SGD(net.parameters(), lr=0.0), lambda net: SGD(net.parameters(), lr=1e-9), frozen_half],
    ids=["lr 0", "steps that round to nothing", "frozen"],
)
def test_one_that_does_not_move_its_parameters_is_not_blamed(build: Any) -> None:
    run = Sites(build, sites=2, outer_lr=0.7, outer_momentum=0.9)
    for _ in range(8):
        run.run_round(2)
    assert run.undone() == ["", ""]


@few
@given(st.sampled_from([ADAMW, RMSPROP, ADAGRAD]), st.floats(-5.5, -4), st.sampled_from([2, 8]))
def test_masters_are_noticed_after_few_rounds(kind: Any, exponent: float, steps: int) -> None:
    run = Sites(
        lambda net: WithMasters(net.parameters(), kind, lr=10**exponent),
        sites=2,
        outer_lr=0.7,
        outer_momentum=0.9,
    )
    for _ in range(12):
        run.run_round(steps)
        if all(run.undone()):
            break
    for text in run.undone():
        assert text.startswith("the inner optimizer undoes the rounds: ")
        assert "WithMasters, it seems, keeps FP32 masters of its own" in text
        assert 'docs/optimizer.md says how, under "Parameters of 16 bits"' in text
