"""`eval()` shows θ in the weights, `train()` gives them back; nothing else changes."""

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from states import assert_same, snapshot
from test_optimizer import model, train, weights
from torch import nn

import loco

pytestmark = pytest.mark.usefixtures("single_site")


def wrapped(inner: torch.optim.Optimizer) -> tuple[Any, Any]:
    optimizer = loco.PulseLoCo(inner, sync_every=3)
    return optimizer, optimizer


def attached(inner: torch.optim.Optimizer) -> tuple[Any, Any]:
    return inner, loco.attach(inner, sync_every=3)


def built(
    way: Callable[..., Any] = wrapped, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Any, Any]:
    net = model().to(dtype)
    return net, *way(torch.optim.AdamW(net.named_parameters(), lr=1e-2))


@pytest.mark.parametrize("way", [wrapped, attached])
def test_a_run_that_evaluates_at_every_step_has_the_bits_of_one_that_does_not(
    way: Callable[..., tuple[Any, Any]],
) -> None:
    net, optimizer, rounds = built(way)
    other, other_optimizer, other_rounds = built(way)
    shown = set()
    for step in range(7):
        train(net, optimizer, 1)
        train(other, other_optimizer, 1)
        mine = weights(net)
        rounds.eval()
        assert torch.equal(weights(net), rounds.outer_state.anchor)
        shown.add(torch.equal(weights(net), mine))
        rounds.eval()
        rounds.train()
        rounds.train()
        assert torch.equal(weights(net), mine)
        assert rounds.local_step == (step + 1) % 3
    assert shown == {True, False}
    assert_same(snapshot(rounds), snapshot(other_rounds))


def test_what_is_shown_of_bf16_weights_is_the_cast_of_the_anchor() -> None:
    param = nn.Parameter(torch.linspace(-1, 1, 500).bfloat16())
    optimizer = loco.PulseLoCo(torch.optim.SGD([param], lr=0.1), sync_every=2)
    for _ in range(3):
        param.grad = torch.linspace(0, 1, 500).bfloat16()
        optimizer.step()
    kept, anchor = param.detach().clone(), optimizer.outer_state.anchor
    assert not torch.equal(anchor, anchor.bfloat16().float())
    optimizer.eval()
    assert torch.equal(param, anchor.bfloat16())
    assert not torch.equal(param, kept)
    optimizer.train()
    assert torch.equal(param, kept)


@pytest.mark.parametrize("way", [wrapped, attached])
def test_steps_and_rounds_are_refused_in_eval_mode(way: Callable[..., tuple[Any, Any]]) -> None:
    net, optimizer, rounds = built(way)
    train(net, optimizer, 2)
    rounds.eval()
    before = weights(net)
    with pytest.raises(ValueError, match=r"step\(\) in eval mode.* call optimizer\.train\(\) first"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"sync\(\) in eval mode"):
        rounds.sync()
    assert torch.equal(weights(net), before)
    assert (rounds.round, rounds.local_step) == (0, 2)
    assert rounds.settle() is None
    rounds.train()
    train(net, optimizer, 1)
    assert rounds.round == 1


@pytest.mark.parametrize("way", [wrapped, attached])
def test_a_state_dict_in_eval_mode_is_that_of_the_training(
    way: Callable[..., tuple[Any, Any]], tmp_path: Path
) -> None:
    net, optimizer, rounds = built(way)
    train(net, optimizer, 5)
    before = pickle.loads(pickle.dumps(optimizer.state_dict()))["loco"]
    rounds.eval()
    saved = pickle.dumps(optimizer.state_dict())
    own = pickle.loads(saved)["loco"]
    assert own.keys() == before.keys()
    assert (own["round"], own["local_step"]) == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(own["weights"], before["weights"], strict=True))
    assert not torch.equal(own["weights"][0], next(net.parameters()))
    with loco.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(rounds)
    rounds.train()
    train(net, optimizer, 3)

    for source in ("state dict", "checkpoint"):
        other, other_optimizer, other_rounds = built(way)
        train(other, other_optimizer, 1)
        other_rounds.eval()  # a state that is loaded ends it
        if source == "state dict":
            other_optimizer.load_state_dict(pickle.loads(saved))
        else:
            with loco.Checkpoints(tmp_path) as checkpoints:
                checkpoints.load(other_rounds)
        train(other, other_optimizer, 3)
        assert_same(snapshot(rounds), snapshot(other_rounds))


def test_weights_written_in_eval_mode_are_discarded_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer, _ = built()
    train(net, optimizer, 2)
    kept = weights(net)
    optimizer.eval()
    with caplog.at_level(logging.WARNING, "loco"):
        net.get_parameter("2.weight").data.add_(1.0)
        optimizer.train()
    assert torch.equal(weights(net), kept)
    assert "parameter 2.weight was changed in eval mode, and train() discards that" in caplog.text


def test_weights_are_given_back_if_theta_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer, _ = built()
    train(net, optimizer, 2)
    kept = weights(net)

    def fail(_: Any) -> None:
        next(net.parameters()).data.zero_()
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("loco.round.outer.outer_state.OuterState.write_weights", fail)
        with pytest.raises(MemoryError):
            optimizer.eval()
    assert torch.equal(weights(net), kept)
    train(net, optimizer, 1)
    assert optimizer.round == 1
