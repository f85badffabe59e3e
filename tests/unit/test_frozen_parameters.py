"""Frozen parameters cost nothing; those that thaw or are replaced later are refused, not missed."""

import pickle
from typing import Any

import pytest
import torch
from test_optimizer import loss_of, model, train
from torch import nn

import loco

pytestmark = pytest.mark.usefixtures("single_site")


class Lora(nn.Module):
    """A frozen layer beside a product of two thin matrices."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.linspace(-1, 1, layer.in_features * rank).view(rank, -1))
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.a.t() @ self.b.t()


def test_only_what_is_trained_takes_memory_and_bytes() -> None:
    net = nn.Sequential(Lora(nn.Linear(6, 64)), nn.Tanh(), Lora(nn.Linear(64, 1)))
    frozen = [p.detach().clone() for p in net.parameters() if not p.requires_grad]
    inner = torch.optim.AdamW(net.named_parameters(), lr=1e-2)
    optimizer = loco.PulseLoCo(inner, sync_every=2)
    outer = optimizer.outer_state
    trained = 2 * (6 + 64) + 2 * (64 + 1)
    assert outer.parameters.numel == trained
    assert [t.numel() for t in (outer.anchor, outer.momentum, outer.residual) if t is not None] == [
        trained
    ] * 3
    assert outer.parameters.names == ["0.a", "0.b", "2.a", "2.b"]
    train(net, optimizer, 4)
    assert optimizer.last_report is not None
    assert optimizer.last_report.numel == trained
    assert optimizer.last_report.entries > 0
    assert all(
        torch.equal(a, b)
        for a, b in zip(frozen, (p for p in net.parameters() if not p.requires_grad), strict=True)
    )
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    assert sum(w.numel() for w in state["loco"]["weights"]) == trained
    optimizer.load_state_dict(state)


def test_one_that_thaws_later_is_refused_before_it_moves() -> None:
    net = model()
    net.get_parameter("0.weight").requires_grad_(False)
    optimizer = loco.PulseLoCo(torch.optim.SGD(net.named_parameters(), lr=0.1), sync_every=2)
    train(net, optimizer, 2)
    net.get_parameter("0.weight").requires_grad_(True)
    before = net.get_parameter("0.weight").detach().clone()
    loss_of(net).backward()
    for call in (optimizer.step, optimizer.sync):
        with pytest.raises(ValueError, match=r"0\.weight was frozen when the sites agreed.* build a new one"):
            call()
    assert torch.equal(net.get_parameter("0.weight"), before)
    net.get_parameter("0.weight").requires_grad_(False)
    net.zero_grad()
    train(net, optimizer, 2)
    assert optimizer.round == 2


def test_one_that_freezes_later_keeps_its_place() -> None:
    net = model()
    optimizer = loco.PulseLoCo(torch.optim.SGD(net.parameters(), lr=0.1), sync_every=1)
    net.get_parameter("0.weight").requires_grad_(False)
    train(net, optimizer, 2)
    assert optimizer.round == 2
    assert optimizer.outer_state.parameters.numel == 65


def test_an_optimizer_of_frozen_parameters_is_refused() -> None:
    net = model().requires_grad_(False)
    with pytest.raises(ValueError, match="all of the inner optimizer's parameters are frozen"):
        loco.PulseLoCo(torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("way", ["wrap", "attach"])
def test_a_model_that_is_frozen_under_the_optimizer_is_refused(way: str) -> None:
    """What a `peft_config` does to the model that the optimizer was built on."""
    net = model()
    inner: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = loco.PulseLoCo(inner) if way == "wrap" else inner
    if way == "attach":
        loco.attach(inner)
    net.requires_grad_(False)
    with pytest.raises(ValueError, match="all parameters that the sites agreed on have been frozen since"):
        optimizer.step()


@pytest.mark.parametrize("way", ["wrap", "attach"])
def test_parameters_that_a_framework_swaps_in_the_optimizer_are_refused(way: str) -> None:
    net = model()
    inner: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = loco.PulseLoCo(inner) if way == "wrap" else inner
    if way == "attach":
        loco.attach(inner)
    inner.param_groups[0]["params"] = [nn.Parameter(p.detach().clone()) for p in net.parameters()]
    with pytest.raises(ValueError, match="parameters have changed since the sites agreed on them"):
        optimizer.step()


@pytest.mark.parametrize("way", ["wrap", "attach"])
@pytest.mark.parametrize("how", ["load_state_dict", "data", "in place"])
def test_weights_that_are_loaded_after_construction_are_refused(way: str, how: str) -> None:
    """Torch's own ways, and two that leave no trace in the parameter's version."""
    net = model()
    inner: Any = torch.optim.SGD(net.named_parameters(), lr=0.1)
    rounds: Any = loco.PulseLoCo(inner, sync_every=2) if way == "wrap" else loco.attach(inner, sync_every=2)
    optimizer = rounds if way == "wrap" else inner
    for since in ("the optimizer was built", "round 1"):
        loaded = {name: p.detach() + 1 for name, p in net.named_parameters()}
        if how == "load_state_dict":
            net.load_state_dict(loaded)
        else:
            last = net.get_parameter("2.bias")
            last.data = loaded["2.bias"] if how == "data" else last.data.add_(1.0)
        first = "0.weight" if how == "load_state_dict" else "2.bias"
        with pytest.raises(ValueError, match=f"parameter {first} was changed from outside since {since}"):
            optimizer.step()
        rounds.adopt_weights()
        train(net, optimizer, 2)
    assert rounds.round == 2


def test_a_first_step_that_fails_once_weights_have_moved_can_be_repeated() -> None:
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = loco.PulseLoCo(inner, sync_every=2)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = inner.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(net, optimizer, 1)
    assert not torch.equal(next(net.parameters()).reshape(-1), optimizer.outer_state.anchor[:48])
    hook.remove()
    train(net, optimizer, 2)
    assert optimizer.round == 1


def test_sites_that_come_and_go_adopt_no_weights() -> None:
    net = model()
    optimizer = loco.PulseLoCo(torch.optim.SGD(net.parameters(), lr=0.1), sync_every=2)
    train(net, optimizer, 2)
    before = pickle.dumps(optimizer.state_dict())
    optimizer._loop.views.membership.others_may_be_ahead = True  # theirs
    with pytest.raises(ValueError, match="sites that come and go take θ from each other"):
        optimizer.adopt_weights()
    assert pickle.dumps(optimizer.state_dict()) == before
