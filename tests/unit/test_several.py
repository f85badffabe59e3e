"""Several inner optimizers look to torch like one."""

import pickle
from typing import Any

import pytest
import torch
from test_optimizer import loss_of, model, train, weights
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import loco

pytestmark = pytest.mark.usefixtures("single_site")


def muon_and_adamw(net: nn.Module) -> list[torch.optim.Optimizer]:
    params = list(net.parameters())
    return [
        torch.optim.Muon([p for p in params if p.ndim == 2], lr=1e-2),
        torch.optim.AdamW([p for p in params if p.ndim != 2], lr=1e-2),
    ]


def test_a_step_steps_all_and_schedulers_reach_each() -> None:
    plain, wrapped = model(), model()
    each = muon_and_adamw(plain)
    for step in range(3):
        for optimizer in each:
            optimizer.zero_grad()
        loss_of(plain, step).backward()
        for optimizer in each:
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
    inner = muon_and_adamw(wrapped)
    optimizer = loco.PulseLoCo(inner, sync_every=4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(wrapped, step).backward()
        optimizer.step()
        scheduler.step()
    assert torch.equal(weights(plain), weights(wrapped))
    assert [one.param_groups[0]["lr"] for one in inner] == [1.25e-3] * 2
    first = next(wrapped.parameters())
    assert optimizer.state[first] is inner[0].state[first]
    assert len(optimizer.state) == 4
    train(wrapped, optimizer, 1)
    assert optimizer.round == 1


def test_a_closure_is_evaluated_once_for_all() -> None:
    net = model()
    optimizer = loco.PulseLoCo(muon_and_adamw(net), sync_every=2)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    assert calls == 2


def test_their_state_has_the_shape_of_one_optimizers() -> None:
    net = model()
    optimizer = loco.PulseLoCo(muon_and_adamw(net), sync_every=2)
    train(net, optimizer, 3)
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    assert set(state) == {"state", "param_groups", "loco"}
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2, 3]]
    assert [sorted(state["state"][k]) for k in range(4)] == [["momentum_buffer"]] * 2 + [
        ["exp_avg", "exp_avg_sq", "step"]
    ] * 2
    named: Any = get_optimizer_state_dict(net, optimizer)
    assert set(named["state"]) == {name for name, _ in net.named_parameters()}


def test_a_state_that_one_of_them_refuses_changes_none() -> None:
    net = model()
    optimizer = loco.PulseLoCo(muon_and_adamw(net), sync_every=2)
    train(net, optimizer, 1)
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    train(net, optimizer, 2)
    before = pickle.dumps(optimizer.state_dict())
    state["param_groups"][1]["params"] = [2]
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(state)
    assert pickle.dumps(optimizer.state_dict()) == before
    del state["param_groups"][1]
    with pytest.raises(ValueError, match="has 1 parameter groups, and these 2 optimizers have 2"):
        optimizer.load_state_dict(state)


def test_an_optimizer_that_keeps_state_elsewhere_can_not_be_saved_with_others() -> None:
    one, other = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    both = loco.PulseLoCo([one, other])
    one.state_dict = lambda: {"state": {"step": 1}, "param_groups": []}  # as some optimizers do
    with pytest.raises(
        ValueError, match=r"inner\[0\], a SGD, keeps state under 'step', which is none of its"
    ):
        both.state_dict()


def test_a_step_counts_when_all_of_them_have_stepped() -> None:
    net = model()
    muon, adamw = muon_and_adamw(net)
    handle = loco.attach([muon, adamw], sync_every=2)
    loss_of(net).backward()
    counts = []
    for optimizer in (muon, muon, adamw, adamw, muon):
        optimizer.step()
        counts.append((handle.round, handle.local_step))
    assert counts == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0)]
    assert "loco" in muon.state_dict()
    assert "loco" not in adamw.state_dict()


def test_none_of_them_may_step_in_eval_mode() -> None:
    net = model()
    muon, adamw = muon_and_adamw(net)
    handle = loco.attach([muon, adamw], sync_every=2)
    loss_of(net).backward()
    muon.step()
    handle.eval()
    shown = weights(net)
    for optimizer in (adamw, muon):
        with pytest.raises(ValueError, match=r"step\(\) in eval mode"):
            optimizer.step()
    assert torch.equal(weights(net), shown)
    handle.train()
    adamw.step()
    assert handle.local_step == 1


def test_what_cannot_step_together_is_refused() -> None:
    net = model()
    with pytest.raises(ValueError, match="got an empty list"):
        loco.PulseLoCo([])
    with pytest.raises(
        TypeError, match=r"inner must be a torch\.optim.Optimizer, or a list of them, got int"
    ):
        loco.PulseLoCo(1)  # pyright: ignore[reportArgumentType]
    one, other = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(ValueError, match=r"optimizers 0 and 1 hold the same parameter, of shape \(8, 6\)"):
        loco.PulseLoCo([one, other])
    with pytest.raises(ValueError, match="inner already exchanges"):
        loco.DiLoCo([loco.PulseLoCo(one), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)])
    assert loco.PulseLoCo([other]).inner is other
