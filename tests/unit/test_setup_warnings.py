"""A training that was set up so that nothing is learned is told so, once."""

import logging
import re
from typing import Any

import pytest
import torch
from selection import PRODUCTS
from test_optimizer import loss_of, model, train
from torch import nn

import loco

pytestmark = pytest.mark.usefixtures("single_site")


def warnings_of(caplog: pytest.LogCaptureFixture, *, dense: bool = False) -> list[str]:
    """Without the one of rounds that send most entries, as many do here; or that one alone."""
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text for text in said if ("so the gate saves few bytes" in text) == dense]


@pytest.mark.parametrize("wrap", [loco.PulseLoCo, loco.DiLoCo])
def test_a_learning_rate_of_zero_is_told_once(wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.0), sync_every=2)
    train(net, optimizer, 6)
    (text,) = warnings_of(caplog)
    assert text == (
        "round 1: no site has anything to send, and no weight of this one has moved in 2 inner steps: the "
        "learning rate is 0"
    )


def test_parameters_that_were_replaced_in_the_model_are_told(caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    optimizer = loco.PulseLoCo(torch.optim.SGD(net.parameters(), lr=0.1), sync_every=2)
    net.load_state_dict({name: p.detach().clone() for name, p in net.named_parameters()}, assign=True)
    train(net, optimizer, 2)
    (text,) = warnings_of(caplog)
    assert "none of the optimizer's parameters has a gradient" in text
    assert "load_state_dict(assign=True)" in text


def test_small_steps_that_are_withheld_are_steps(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is sent, but the residual grows."""
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=1e-8)
    optimizer = loco.PulseLoCo(inner, sync_every=1, outer_lr=1.0, outer_momentum=0.0)
    train(net, optimizer, 3)
    assert optimizer.last_report is not None
    assert optimizer.last_report.entries == 0
    assert optimizer.last_report.residual_norm > 0
    optimizer.sync()  # without a step
    assert warnings_of(caplog) == []
    inner.param_groups[0]["lr"] = 0.0
    train(net, optimizer, 1)
    (text,) = warnings_of(caplog)
    assert "no weight of this one has moved" in text


LONG = {"outer_lr": 896.0, "outer_momentum": 0.0}


@pytest.mark.parametrize(
    ("lr", "outer", "percent"),
    [
        (1e-3, LONG, r"\d{4}"),
        (1e-4, LONG, r"\d{3}"),
        (1e-6, LONG, ""),
        (1e-3, {}, ""),
        (10.0, {}, ""),  # that the inner steps are too long is seen without loco
    ],
)
def test_an_outer_step_that_is_far_too_long_is_told_once(
    lr: float, outer: dict[str, Any], percent: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    optimizer = loco.PulseLoCo(torch.optim.Adam(net.parameters(), lr=lr), sync_every=8, **outer)
    train(net, optimizer, 24)
    said = "\n".join(warnings_of(caplog))
    if not percent:
        assert said == ""
        return
    step = rf"round 1: an outer step of outer_lr \d+ moves the weights by up to {percent}% of what they "
    assert re.fullmatch(rf"{step}were at the start\. [^\n]*", said)


@pytest.mark.check(PRODUCTS)
def test_what_was_withheld_for_long_is_no_long_step(caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    options: dict[str, Any] = {"saving": 1, "outer_lr": 448}
    optimizer = loco.PulseLoCo(torch.optim.SGD(net.parameters(), lr=1e-6), sync_every=1, **options)
    for _ in range(3000):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        if optimizer.last_report is not None and optimizer.last_report.update_norms[0] * 448 > 4.0:
            break
    else:
        pytest.fail("the residual did not grow")
    assert warnings_of(caplog) == []


def test_a_resumed_run_is_not_judged_by_what_was_before(caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    optimizer = loco.PulseLoCo(torch.optim.SGD(net.parameters(), lr=0.1), sync_every=1)
    train(net, optimizer, 2)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    train(net, optimizer, 2)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_are_warned_of_at_construction(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    net[2].to(dtype)
    loco.PulseLoCo(torch.optim.SGD(net.named_parameters(), lr=0.1))
    (text,) = warnings_of(caplog)
    assert text.startswith("2 of 4 trained parameters have 16 bits, 2.weight for example")
    assert "Keep the parameters in FP32" in text
    caplog.clear()
    net[2].requires_grad_(False)
    loco.PulseLoCo(torch.optim.SGD(net.named_parameters(), lr=0.1))
    assert warnings_of(caplog) == []


def test_bf16_steps_that_are_rounded_away_are_told(caplog: pytest.LogCaptureFixture) -> None:
    param = nn.Parameter(torch.ones(100).bfloat16())
    optimizer = loco.PulseLoCo(torch.optim.SGD([param], lr=1e-6), sync_every=2)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert "steps are too small for the format of the parameters" in warnings_of(caplog)[1]


@pytest.mark.parametrize(
    ("wrap", "options", "lr", "percent"),
    [
        (loco.PulseLoCo, {}, 1e-3, r"\d+"),
        (loco.PulseLoCo, {"gate": "fp8_e4m3"}, 1e-1, r"\d+"),
        (loco.PulseLoCo, {}, 1e-6, ""),
        (loco.PulseLoCo, {"gate": "open"}, 1e-3, ""),
        (loco.DiLoCo, {}, 1e-3, ""),
    ],
)
def test_rounds_that_send_most_entries_are_told_once(
    wrap: Any, options: dict[str, Any], lr: float, percent: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    optimizer = wrap(torch.optim.AdamW(net.parameters(), lr=lr), sync_every=8, **options)
    train(net, optimizer, 24)
    said = "\n".join(warnings_of(caplog, dense=True))
    assert bool(said) == bool(percent)
    assert optimizer.last_report is not None
    if percent:
        assert optimizer.last_report.density > 0.5
        sends = rf"round \d: this site sends {percent}% of its entries, so the gate saves few bytes beside "
        assert re.fullmatch(rf'{sends}[^\n]*use loco\.DiLoCo: [^\n]*"Where the method stops paying"', said)
    assert warnings_of(caplog) == []


def test_an_optimizer_that_steps_alone_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    params = list(net.parameters())
    a, b = torch.optim.SGD(params[:2], lr=0.1), torch.optim.SGD(params[2:], lr=0.1)
    handle = loco.attach([a, b], sync_every=2)
    loss_of(net).backward()
    for _ in range(4):
        a.step()
    (text,) = warnings_of(caplog)
    assert text.startswith("optimizer 0 has stepped again before optimizer 1 has: a step counts")
    assert handle.local_step == 0
