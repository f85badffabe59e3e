"""What a handle refuses, and what it leaves of an optimizer; steps that only give an optimizer its state."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_optimizer import model, train, weights
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import loco

pytestmark = pytest.mark.usefixtures("single_site")


def test_a_detached_optimizer_is_its_own_again() -> None:
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = loco.attach(inner, sync_every=2)
    train(net, inner, 3)
    assert (handle.round, handle.local_step) == (1, 1)
    assert "loco" in inner.state_dict()
    handle.detach()
    train(net, inner, 3)
    assert (handle.round, handle.local_step) == (1, 1)
    state = inner.state_dict()
    assert "loco" not in state
    inner.load_state_dict(state)
    again = loco.attach(inner, sync_every=1)
    train(net, inner, 1)
    assert again.round == 1


def test_detaching_in_eval_mode_gives_the_weights_back() -> None:
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = loco.attach(inner, sync_every=4)
    train(net, inner, 2)
    before = weights(net)
    handle.eval()
    assert not torch.equal(weights(net), before)
    handle.detach()
    assert torch.equal(weights(net), before)


def test_who_attaches_again_takes_the_earlier_handles_place(caplog: pytest.LogCaptureFixture) -> None:
    """As after a training that has failed, and of which an exception still holds all objects."""
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    first = loco.attach(inner, sync_every=1)
    train(net, inner, 1)
    first.eval()
    second = loco.attach(inner, sync_every=1)
    assert "this SGD was attached before: its earlier handle is detached" in caplog.text
    train(net, inner, 2)
    assert (first.round, second.round) == (1, 2)
    first.detach()  # is none of the second one's business
    third = loco.PulseLoCo(inner, sync_every=1)
    train(net, third, 1)
    assert (second.round, third.round) == (2, 1)


def test_a_wrapper_is_not_wrapped_again() -> None:
    wrapper = loco.DiLoCo(torch.optim.SGD(model().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="inner already exchanges with the other sites"):
        loco.attach(wrapper)


class NoHooks(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_an_optimizer_without_hooks_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"this NoHooks has no step hooks.* attach to the optimizer inside it"
    ):
        loco.attach(NoHooks(torch.optim.SGD(model().parameters(), lr=0.1)))


def test_arguments_are_the_methods() -> None:
    def build(**options: Any) -> loco.Attached:
        return loco.attach(torch.optim.SGD(model().parameters(), lr=0.1), **options)

    assert (
        build(saving=0.25).settings
        == loco.PulseLoCo(torch.optim.SGD(model().parameters(), lr=0.1), saving=0.25).settings
    )
    assert build(method=loco.DiLoCo, wire="int8").settings.kind == "DiLoCo"
    assert "PulseLoCo(sync_every=5" in repr(build(sync_every=5))
    with pytest.raises(TypeError, match="gate_gian"):
        build(gate_gian=1.0)
    with pytest.raises(TypeError, match="gate_gain"):
        build(method=loco.DiLoCo, gate_gain=1.0)


def test_an_attached_optimizer_refuses_what_is_not_its_state_before_anything_changes() -> None:
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=0.1)
    handle = loco.attach(inner, sync_every=2)
    train(net, inner, 3)
    foreign = pickle.loads(pickle.dumps(inner.state_dict()))
    plain = {key: value for key, value in foreign.items() if key != "loco"}
    foreign["loco"]["site"] = 3
    before = pickle.dumps(inner.state_dict())
    with pytest.raises(ValueError, match="no 'loco' entry"):
        inner.load_state_dict(plain)
    with pytest.raises(ValueError, match="site = 3, this optimizer has 0"):
        inner.load_state_dict(foreign)
    with pytest.raises(ValueError, match="site = 3, this optimizer has 0"):
        handle.load_state_dict(foreign)
    assert pickle.dumps(inner.state_dict()) == before
    inner.load_state_dict(inner.state_dict())
    assert (handle.round, handle.local_step) == (1, 1)


def test_an_optimizers_own_state_dict_can_be_without_the_rounds() -> None:
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=0.1)
    handle = loco.attach(inner, sync_every=2, in_state_dict=False)
    train(net, inner, 3)
    own, both = inner.state_dict(), handle.state_dict()
    assert set(own) == {"state", "param_groups"}
    assert set(both) == {"state", "param_groups", "loco"}
    inner.load_state_dict(own)  # and the rounds stay
    assert (handle.round, handle.local_step) == (1, 1)
    with pytest.raises(ValueError, match=r"told in_state_dict=False: load it with the handle's"):
        inner.load_state_dict(both)
    handle.load_state_dict(both)
    assert (handle.round, handle.local_step) == (1, 1)


INNER = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "a learning rate in a tensor": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1)),
}


def wrapped(inner: torch.optim.Optimizer) -> tuple[Any, Any]:
    optimizer = loco.PulseLoCo(inner, sync_every=1)
    return optimizer, optimizer


def attached(inner: torch.optim.Optimizer) -> tuple[Any, Any]:
    return inner, loco.attach(inner, sync_every=1)


@pytest.mark.parametrize("way", [wrapped, attached])
@pytest.mark.parametrize("name", list(INNER))
def test_a_step_that_gives_an_optimizer_its_state_is_no_training_step(
    way: Callable[..., tuple[Any, Any]], name: str
) -> None:
    """At H = 1, where a step that counts runs a round."""
    net = model()
    optimizer, rounds = way(INNER[name](net.parameters()))
    before = weights(net)
    state: Any = get_optimizer_state_dict(net, optimizer)
    assert (rounds.round, rounds.local_step) == (0, 0)
    assert torch.equal(weights(net), before)
    outer = rounds.outer_state
    assert torch.equal(outer.anchor, before)
    assert not outer.momentum.any()
    assert not outer.residual.any()
    if name != "SGD":
        assert len(optimizer.state) == 4  # torch got what it asked for
        assert state["state"]["0.weight"]["exp_avg"].shape == (8, 6)
    train(net, optimizer, 2)
    assert rounds.round == 2
    with pytest.raises(ValueError, match=r"no 'loco' entry"):  # torch's function drops it
        set_optimizer_state_dict(net, optimizer, state)
    assert rounds.round == 2


@pytest.mark.parametrize("way", [wrapped, attached])
def test_a_training_step_at_rate_zero_without_gradients_counts(way: Callable[..., tuple[Any, Any]]) -> None:
    """The first step of a warm-up, on a batch without advantages: all sites must come to the round."""
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=0.0)
    optimizer, rounds = way(inner)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert rounds.round == 1


def test_a_function_of_that_name_elsewhere_is_a_training_step() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = loco.PulseLoCo(torch.optim.SGD([param], lr=0.0), sync_every=1)

    def _init_optim_state() -> None:
        optimizer.step()

    _init_optim_state()
    assert optimizer.round == 1
