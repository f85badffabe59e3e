"""PulseLoCo and DiLoCo are torch optimizers: what works around an AdamW works around them."""

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import loco

pytestmark = pytest.mark.usefixtures("single_site")
BOTH = pytest.mark.parametrize("wrap", [loco.PulseLoCo, loco.DiLoCo])
Wrap = Callable[..., loco.PulseLoCo | loco.DiLoCo]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(net: nn.Module, seed: int = 0) -> torch.Tensor:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
    return net(x).square().mean()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@BOTH
def test_between_rounds_it_is_the_inner_optimizer(wrap: Wrap) -> None:
    plain, wrapped = model(), model()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 5)
    optimizer = wrap(torch.optim.AdamW(wrapped.parameters(), lr=1e-2), sync_every=6)
    train(wrapped, optimizer, 5)
    assert torch.equal(weights(plain), weights(wrapped))
    assert optimizer.last_report is None
    train(wrapped, optimizer, 1)
    assert optimizer.last_report is not None
    assert optimizer.last_report.round == 1


def test_the_pseudo_gradient_points_downhill() -> None:
    """One site, plain averaging: a round keeps what the inner steps gained, and does not undo it."""
    plain, wrapped = model(), model()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 10)
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    optimizer = loco.DiLoCo(inner, sync_every=10, outer_lr=1.0, outer_momentum=0.0)
    train(wrapped, optimizer, 10)
    assert optimizer.round == 1
    # θ − (θ − w) is w up to the rounding of two subtractions, of numbers below 1.
    torch.testing.assert_close(weights(wrapped), weights(plain), rtol=0, atol=2.0**-23)
    assert loss_of(wrapped).item() < 0.5 * loss_of(model()).item()


@BOTH
def test_the_inner_state_survives_a_round(wrap: Wrap) -> None:
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    optimizer = wrap(inner, sync_every=2)
    train(net, optimizer, 2)
    first = next(net.parameters())
    state = inner.state[first]
    before = state["exp_avg"].clone()
    optimizer.sync()
    assert torch.equal(before, inner.state[first]["exp_avg"])
    assert int(state["step"]) == 2
    assert before.abs().sum() > 0


@BOTH
def test_a_scheduler_changes_the_inner_rate_also_after_loading(wrap: Wrap) -> None:
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=1.0)
    optimizer = wrap(inner, sync_every=4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(net, optimizer, 1)
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.5
    optimizer.load_state_dict(optimizer.state_dict())
    train(net, optimizer, 1)
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups is inner.param_groups


def test_a_scheduler_built_on_the_inner_optimizer_works_too() -> None:
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(inner, 0.1, total_iters=10)
    optimizer = loco.PulseLoCo(inner)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    train(net, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.19)


@BOTH
def test_a_closure_is_evaluated_and_its_loss_returned(wrap: Wrap) -> None:
    net = model()
    optimizer = wrap(torch.optim.LBFGS(net.parameters(), max_iter=4), sync_every=2)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    second = optimizer.step(closure).item()
    assert calls > 2
    assert second < first
    assert optimizer.round == 1


@BOTH
def test_hooks_fire_on_the_wrapper_and_on_the_inner_optimizer(wrap: Wrap) -> None:
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = wrap(inner, sync_every=2)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    inner.register_step_pre_hook(lambda *_: seen.append("inner"))
    train(net, optimizer, 1)
    assert seen == ["before", "inner", "after"]


@BOTH
def test_groups_frozen_tied_and_unused_parameters(wrap: Wrap) -> None:
    net = model()
    unused, frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2), requires_grad=False)
    shared = nn.Linear(6, 6, bias=False)
    twice = nn.Sequential(shared, shared, net)  # one Parameter in two places
    inner = torch.optim.AdamW(
        [
            {"params": list(twice.parameters()), "lr": 1e-2},
            {"params": [unused, frozen], "lr": 1e-3},
        ],
        weight_decay=0.0,
    )
    optimizer = wrap(inner, sync_every=1)
    train(twice, optimizer, 3)
    assert optimizer.last_report is not None
    assert optimizer.last_report.numel == 36 + 65 + 3  # a frozen parameter costs nothing
    assert torch.equal(unused, torch.ones(3))
    assert torch.equal(frozen, torch.ones(2))
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3]


def test_clipping_accumulation_and_zero_grad() -> None:
    plain, wrapped = model(), model()
    optimizers = [
        torch.optim.AdamW(plain.parameters(), lr=1e-2),
        loco.PulseLoCo(torch.optim.AdamW(wrapped.parameters(), lr=1e-2), sync_every=100),
    ]
    for net, optimizer in zip((plain, wrapped), optimizers, strict=True):
        for step in range(4):
            for micro in range(3):
                (loss_of(net, 3 * step + micro) / 3).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            assert all((p.grad is None) == (step % 2 == 0) for p in net.parameters())
    assert torch.equal(weights(plain), weights(wrapped))


def test_a_gradient_scaler_drives_it_and_skips_on_overflow() -> None:
    plain, wrapped = model(), model()
    optimizers = [
        torch.optim.SGD(plain.parameters(), lr=1e-2),
        loco.PulseLoCo(torch.optim.SGD(wrapped.parameters(), lr=1e-2), sync_every=100),
    ]
    for net, optimizer in zip((plain, wrapped), optimizers, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(net, step)
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert torch.equal(weights(plain), weights(wrapped))
    assert isinstance(optimizers[1], loco.PulseLoCo)
    assert optimizers[1].local_step == 3  # the skipped step counts, or this site's rounds would come later


def test_a_round_that_fails_under_a_scaler_leaves_no_scale_behind() -> None:
    """GradScaler takes its marks back only from a step that returns; kept, they would scale twice."""
    param = nn.Parameter(torch.ones(3))
    other = nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([param, other], lr=1.0)
    optimizer = loco.DiLoCo(inner, sync_every=2, outer_lr=1.0, outer_momentum=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(param.sum() / 4).backward()
        scaler.step(optimizer)
        scaler.update()

    step()
    other.data.fill_(float("inf"))
    with pytest.raises(loco.NonFiniteError):
        step()
    other.data.fill_(1.0)
    scaler.update()
    step()
    assert param.tolist() == [0.25] * 3  # three steps of a quarter


@BOTH
def test_bf16_parameters_stay_the_cast_of_the_anchor(wrap: Wrap) -> None:
    net = model().to(torch.bfloat16)
    optimizer = wrap(torch.optim.AdamW(net.parameters(), lr=1e-3), sync_every=2)
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
        net(x).square().mean().backward()
        optimizer.step()
    anchor = optimizer.outer_state.anchor
    assert torch.equal(weights(net), anchor.bfloat16())
    assert not torch.equal(anchor, anchor.bfloat16().float())  # FP32 keeps what BF16 can't


def test_fp16_parameters_stay_the_cast_of_the_anchor() -> None:
    param = nn.Parameter(torch.linspace(-1, 1, 50).half())
    optimizer = loco.PulseLoCo(torch.optim.SGD([param], lr=1e-3), sync_every=1)
    for _ in range(3):
        param.grad = torch.linspace(0, 1, 50).half()
        optimizer.step()
    assert optimizer.last_report is not None
    assert optimizer.last_report.entries > 0
    assert torch.equal(param, optimizer.outer_state.anchor.half())
    assert not torch.equal(param, torch.linspace(-1, 1, 50).half())


@BOTH
def test_a_round_of_ones_own_starts_the_count_again(wrap: Wrap) -> None:
    net = model()
    optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.1), sync_every=3)
    train(net, optimizer, 2)
    assert optimizer.local_step == 2
    optimizer.sync()
    assert optimizer.local_step == 0
    train(net, optimizer, 2)
    assert (optimizer.round, optimizer.local_step) == (1, 2)
    train(net, optimizer, 1)
    assert (optimizer.round, optimizer.local_step) == (2, 0)


def test_a_failed_round_is_due_again_at_the_next_step() -> None:
    net = model()
    optimizer = loco.PulseLoCo(torch.optim.SGD(net.parameters(), lr=0.1), sync_every=2)
    bias = net.get_parameter("2.bias")
    train(net, optimizer, 1)
    bias.data.fill_(float("inf"))
    with pytest.raises(loco.NonFiniteError):
        optimizer.step()
    assert (optimizer.round, optimizer.local_step) == (0, 2)
    bias.data.zero_()
    optimizer.zero_grad()
    optimizer.step()
    assert (optimizer.round, optimizer.local_step) == (1, 0)


def test_an_extra_round_sends_nothing_and_keeps_the_residual() -> None:
    net = model()
    optimizer = loco.PulseLoCo(
        torch.optim.SGD(net.parameters(), lr=1e-5), sync_every=1, outer_lr=1.0, outer_momentum=0.0
    )
    train(net, optimizer, 1)
    residual = optimizer.outer_state.residual
    assert residual is not None
    before = residual.clone()
    report = optimizer.sync()
    assert report.round == 2
    assert report.entries == 0
    assert before.norm() > 0
    assert torch.equal(before, residual)
    assert report.residual_norm == pytest.approx(float(before.norm()))
    assert "round 2: sent 0.00% of 65 entries" in str(report)


@pytest.mark.parametrize(
    ("outer", "gain"),
    [
        ({}, 3.5),  # half of 0.7 / (1 - 0.9)
        ({"outer_lr": 7.0, "outer_momentum": 0.0}, 3.5),
        ({"outer_lr": 1.0, "outer_momentum": 0.0}, 1.0),  # never below the paper's
        ({"gate_gain": 1.0}, 1.0),
        ({"gate_gain": 0.25, "outer_lr": 7.0}, 0.25),
    ],
)
def test_the_gain_follows_the_reach_of_the_outer_optimizer_unless_it_is_given(
    outer: dict[str, Any], gain: float
) -> None:
    optimizer = loco.PulseLoCo(torch.optim.SGD(model().parameters(), lr=1.0), **outer)
    assert optimizer.state_dict()["loco"]["settings"]["gate_gain"] == gain


def settings_of(**options: Any) -> dict[str, Any]:
    optimizer = loco.PulseLoCo(torch.optim.SGD(model().parameters(), lr=1.0), **options)
    return optimizer.state_dict()["loco"]["settings"]


def test_the_published_setting_is_the_default_with_another_gain_and_cannot_be_changed() -> None:
    assert settings_of(**loco.PAPER) == settings_of(gate_gain=1.0)
    assert settings_of(**dict(loco.PAPER) | {"gate_gain": 3.5}) == settings_of()
    with pytest.raises(TypeError):
        loco.PAPER["gate_gain"] = 7.0  # pyright: ignore[reportIndexIssue]
    assert not hasattr(loco.PAPER, "update")


AUTO = {"outer_lr": 1.0, "outer_momentum": 0.0, "finds_outer_lr": True}
QUARTER = {"gate_gain": 2.0, "gate_margin": 0.25, "value_steps": 2, "sums_margin": 0.125}
EXACT = {"gate_margin": 0.0, "value_steps": None, "sums_margin": None}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"saving": 0},
            EXACT | {"gate_gain": 3.5, "outer_lr": 7.0, "outer_momentum": 0.0, "finds_outer_lr": None},
        ),
        ({"saving": 0.25}, AUTO | QUARTER),
        (
            {"saving": 0.3},
            AUTO | {"gate_gain": 1 / 0.6, "gate_margin": 0.3, "value_steps": 2, "sums_margin": 0.15},
        ),
        (
            {"saving": 64},
            AUTO | {"gate_gain": 1.0, "gate_margin": 64.0, "value_steps": 1, "sums_margin": 32.0},
        ),
        ({"saving": 2**-9}, AUTO | {"gate_gain": 256.0, "value_steps": 256}),
        ({"saving": 0.25, "value_steps": 16}, AUTO | QUARTER | {"value_steps": 16}),
        ({"saving": 0.25, "gate_margin": 0.0}, AUTO | QUARTER | {"gate_margin": 0.0}),
        (
            {"saving": 0.25, "outer_lr": 28},
            QUARTER | {"outer_lr": 28.0, "outer_momentum": 0.0, "finds_outer_lr": None},
        ),
        ({"saving": 0.25, "outer_lr": 1, "outer_momentum": 0.5}, QUARTER | {"outer_momentum": 0.5}),
        ({}, EXACT | {"outer_lr": 0.7, "outer_momentum": 0.9, "finds_outer_lr": None}),
    ],
    ids=str,
)
def test_one_number_decides_what_is_not_given(given: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = settings_of(**given)
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"saving": -0.25}, "saving must be 0, or from 1/512 to 64 BF16 ulps, got -0.25"),
        ({"saving": 1e-3}, "saving must be 0, or from 1/512 to 64"),
        ({"saving": 65}, "saving must be 0, or from 1/512 to 64"),
        ({"saving": math.nan}, "saving must be 0, or from 1/512 to 64"),
        ({"saving": True}, "saving must be 0, or from 1/512 to 64 BF16 ulps, got True"),
        ({"saving": False}, "saving must be 0, or from 1/512 to 64 BF16 ulps, got False"),
        ({"saving": 0.25, "gate": "open"}, "there is nothing to save: leave saving out"),
        ({"saving": 0.25, "outer_momentum": 0.9}, "leave out outer_momentum"),
    ],
    ids=str,
)
def test_a_number_that_can_mean_nothing_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        settings_of(**given)


def test_help_shows_an_example_ddps_group_and_the_reports_fields() -> None:
    text = inspect.getdoc(loco.PulseLoCo) or ""
    for piece in (
        "loco.PulseLoCo(inner, sync_every=8)",
        "optimizer.step()",
        "process_group=topology.site_group",
    ):
        assert piece in text
    fields = [field.name for field in dataclasses.fields(loco.SyncReport)]
    explained = (inspect.getdoc(loco.SyncReport) or "").split("Attributes:")[1]
    for name in fields:
        assert f"`{name}`" in text
        assert f"\n    {name}: " in explained


def test_every_argument_of_an_optimizer_is_explained() -> None:
    for kind in (loco.PulseLoCo, loco.DiLoCo):
        explained = (inspect.getdoc(kind) or "").split("Args:")[1]
        for name in inspect.signature(kind).parameters:
            assert f"\n    {name}: " in explained, (kind, name)


@pytest.mark.parametrize("public", [loco.PulseLoCo, loco.DiLoCo, loco.Checkpoints])
def test_what_public_signatures_name_is_public(public: type) -> None:
    """So that a user can annotate a function that takes either optimizer."""
    names = ["__init__", *(name for name in dir(public) if not name.startswith("_"))]
    functions = [getattr(public, name) for name in names]
    for function in filter(inspect.isfunction, functions):
        if not function.__module__.startswith("loco."):
            continue
        for hint in typing.get_type_hints(function).values():
            for part in (hint, *typing.get_args(hint)):
                if inspect.isclass(part) and part.__module__.startswith("loco."):
                    assert part.__name__ in loco.__all__, f"{function.__qualname__} names {part}"
