"""A state is plain data, complete, and taken back only where it belongs."""

import io
import pickle
from typing import Any

import pytest
import torch
from test_optimizer import model, train
from torch import nn

import loco

pytestmark = pytest.mark.usefixtures("single_site")


def test_a_state_dict_is_plain_data_and_keeps_torchs_shape() -> None:
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    optimizer = loco.PulseLoCo(inner, sync_every=2)
    train(net, optimizer, 3)
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups", "loco"}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=True)
    assert again["loco"]["round"] == 1
    assert again["loco"]["local_step"] == 1
    assert optimizer.outer_state.residual is not None
    assert torch.equal(again["loco"]["residual"], optimizer.outer_state.residual)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sync_every": 3}, "sync_every = 2, this optimizer has 3"),
        ({"outer_lr": 0.5}, "outer_lr = 0.7, this optimizer has 0.5"),
        ({"gate_margin": 0.25}, "gate_margin = 0.0, this optimizer has 0.25"),
        ({"value_steps": 16}, "value_steps = None, this optimizer has 16"),
        ({"gate": "open"}, "gate = bf16, this optimizer has open"),
    ],
)
def test_a_state_of_other_settings_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    def build(**options: Any) -> loco.PulseLoCo:
        return loco.PulseLoCo(torch.optim.SGD(model().parameters(), lr=0.1), **options)

    state = build(sync_every=2).state_dict()
    other = build(**({"sync_every": 2} | change))
    before = other.outer_state.anchor.clone()
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    assert torch.equal(before, other.outer_state.anchor)


def test_a_state_of_another_model_or_optimizer_is_refused() -> None:
    optimizer = loco.PulseLoCo(torch.optim.SGD(model().parameters(), lr=0.1))
    dense = loco.DiLoCo(torch.optim.SGD(model().parameters(), lr=0.1))
    narrow = loco.PulseLoCo(torch.optim.SGD(nn.Linear(6, 7).parameters(), lr=0.1))
    with pytest.raises(ValueError, match="kind = DiLoCo, this optimizer has PulseLoCo"):
        optimizer.load_state_dict(dense.state_dict())
    with pytest.raises(ValueError, match=r"parameters = \['group0.param0', \[7, 6\]"):
        optimizer.load_state_dict(narrow.state_dict())
    with pytest.raises(ValueError, match="this state has no 'loco' entry, so it is not of a loco optimizer"):
        optimizer.load_state_dict(optimizer.inner.state_dict())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("site", 1, "this state was saved with site = 1, this optimizer has 0: each rank loads"),
        ("num_sites", 4, "num_sites = 4, this optimizer has 1"),
        ("rank_in_site", 1, "rank_in_site = 1, this optimizer has 0"),
        ("ranks_per_site", 2, "ranks_per_site = 2, this optimizer has 1"),
        ("format", 2, "a loco state of format 2"),
        (
            "residual",
            torch.zeros(64),
            r"residual is torch\.float32 \(64,\), not torch\.float32 \(65,\): it is damaged",
        ),
        ("anchor", None, "anchor is None"),
        ("weights", [], "does not hold the weights of all parameters"),
        ("local_step", None, "local_step is None, not a number of rounds or steps"),
        ("local_step", -1, "local_step is -1"),
    ],
)
def test_a_foreign_or_damaged_state_is_refused_before_anything_changes(
    key: str, value: Any, message: str
) -> None:
    net = model()
    optimizer = loco.PulseLoCo(torch.optim.AdamW(net.parameters(), lr=0.1), sync_every=2)
    train(net, optimizer, 1)
    other = pickle.loads(pickle.dumps(optimizer.state_dict()))
    other["loco"][key] = value
    other["loco"]["round"] = 77
    train(net, optimizer, 2)
    before = pickle.dumps(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(other)
    assert pickle.dumps(optimizer.state_dict()) == before


def test_a_state_of_a_round_in_doubt_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = loco.PulseLoCo(torch.optim.SGD(model().parameters(), lr=0.1))
    state = optimizer.state_dict()
    state["loco"]["undecided_round"] = 3
    optimizer.load_state_dict(state)
    assert "saved before the outcome of round 3 was known: if other ranks load a state of" in caplog.text


def test_state_dict_hooks_fire() -> None:
    optimizer = loco.PulseLoCo(torch.optim.SGD(model().parameters(), lr=0.1))
    seen: list[str] = []

    def mark(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append("saved")
        return {**state, "mark": 1}

    def unmark(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append(f"loading {state.pop('mark')}")
        return state

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("saving"))
    optimizer.register_state_dict_post_hook(mark)
    optimizer.register_load_state_dict_pre_hook(unmark)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saving", "saved", "loading 1", "loaded"]


def test_it_cannot_be_pickled_and_says_what_to_save() -> None:
    with pytest.raises(
        TypeError, match=r"holds process groups and can't be copied or pickled: save its state_dict\(\)"
    ):
        pickle.dumps(loco.PulseLoCo(torch.optim.SGD(model().parameters(), lr=0.1)))


def test_a_round_interrupted_while_applied_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    optimizer = loco.PulseLoCo(torch.optim.SGD(net.parameters(), lr=0.1), sync_every=1)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))

    def ctrl_c(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("loco.kernels.apply", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    for call in (optimizer.state_dict, optimizer.sync, optimizer.step):
        with pytest.raises(loco.LocoError, match=r"round 1 was stopped .* Load the last checkpoint"):
            call()
    optimizer.load_state_dict(saved)
    assert optimizer.sync().round == 1


def test_a_state_that_lacks_the_inner_optimizers_is_refused() -> None:
    """What torch.distributed.checkpoint loads into a fresh AdamW: Adam's moments would be lost in silence."""
    net = model()
    optimizer = loco.PulseLoCo(torch.optim.AdamW(net.parameters(), lr=0.1), sync_every=2)
    train(net, optimizer, 1)
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    with pytest.raises(ValueError, match=r"of 0 parameters, [1-9] were saved.* loco\.Checkpoints"):
        optimizer.load_state_dict(state | {"state": {}})


def test_what_bytes_are_predicted_from_is_resumed_and_may_be_missing() -> None:
    optimizer = loco.PulseLoCo(torch.optim.SGD(model().parameters(), lr=0.1))
    optimizer.outer_state.tuner.spread = 1.75
    optimizer.outer_state.tuner.entry_bytes["tight"] = 2.25
    state = optimizer.state_dict()
    other = loco.PulseLoCo(torch.optim.SGD(model().parameters(), lr=0.1))
    other.load_state_dict(state)
    assert other.outer_state.tuner.state() == optimizer.outer_state.tuner.state()
    del state["loco"]["tuner"]  # as it was saved before
    other.load_state_dict(state)
    assert other.outer_state.tuner.spread == 1.75
