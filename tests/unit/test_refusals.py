"""What can't work is refused with a sentence that names it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_optimizer import model
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import loco
from loco.parameters import sharding
from loco.parameters.flat_parameters import FlatParameters

pytestmark = pytest.mark.usefixtures("single_site")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 0}, "sync_every must be a whole number >= 1, got 0"),
        ({"sync_every": 2.5}, "sync_every must be a whole number >= 1, got 2.5"),
        ({"outer_lr": -1.0}, "outer_lr must be > 0 and finite in FP32, got -1.0"),
        ({"outer_lr": float("nan")}, "outer_lr must be > 0 and finite in FP32, got nan"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
        ({"outer_lr": 1e300}, "outer_lr must be > 0 and finite in FP32, got 1e\\+300"),
        ({"sync_every": float("inf")}, "sync_every must be a whole number >= 1, got inf"),
        ({"nesterov": "no"}, "nesterov must be True or False, got 'no'"),
        ({"gate": "fp4"}, "gate must be one of bf16, fp16, fp8_e4m3, fp8_e5m2, open, got 'fp4'"),
        ({"gate_gain": 0.0}, "gate_gain must be > 0 and finite in FP32, got 0.0"),
        ({"gate_margin": -0.5}, "gate_margin must be 0, or > 0 and finite in FP32, got -0.5"),
        ({"gate_margin": 1e-60}, "gate_margin must be 0, or > 0 and finite in FP32, got 1e-60"),
        ({"gate_margin": float("inf")}, "gate_margin must be 0, or > 0 and finite in FP32, got inf"),
        ({"gate_margin": float("nan")}, "gate_margin must be 0, or > 0 and finite in FP32, got nan"),
        ({"value_steps": 8, "sums_margin": 0}, "sums_margin must be None, or > 0 and finite in FP32, got 0"),
        (
            {"sums_margin": 0.5},
            "sums_margin adds small sums to a residual, which is exact only for values rounded",
        ),
        (
            {"gate": "open", "sums_margin": 0.5},
            'gate="open" sends every entry exactly, so sums_margin must be None',
        ),
        (
            {"overlap": -1.0},
            "overlap must be True, False or how far a site runs ahead by its own update",
        ),
        ({"value_steps": 0}, "value_steps must be None or a power of two from 1 to 256, got 0"),
        ({"value_steps": 12}, "value_steps must be None or a power of two from 1 to 256, got 12"),
        ({"value_steps": 512}, "value_steps must be None or a power of two from 1 to 256, got 512"),
        ({"value_steps": "16"}, "value_steps must be None or a power of two from 1 to 256, got '16'"),
        (
            {"weight": 0},
            "weight must be from 1/64 to 64, and 1 for a usual round of a usual site, got 0: give",
        ),
        ({"weight": float("nan")}, "weight must be from 1/64 to 64, .*, got nan"),
        ({"weight": 1e6}, "weight must be from 1/64 to 64, .*, got 1000000.0"),
        ({"weight": "2"}, "weight must be from 1/64 to 64, .*, got '2'"),
        (
            {"gate": "open", "gate_margin": 0.25},
            'gate="open" sends every entry exactly, so gate_margin must be 0, got 0.25: leave it out',
        ),
        (
            {"gate": "open", "value_steps": 16},
            'gate="open" sends every entry exactly, so value_steps must be None, got 16: leave it out',
        ),
    ],
)
def test_arguments_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loco.PulseLoCo(torch.optim.SGD(model().parameters(), lr=0.1), **options)


def test_parameters_that_cannot_be_synchronised_are_named() -> None:
    def build(*params: torch.Tensor) -> loco.PulseLoCo:
        named = [(f"p{k}", p) for k, p in enumerate(params)]
        return loco.PulseLoCo(torch.optim.SGD(named, lr=0.1))

    one = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match=r"p1 is torch\.float64"):
        build(one, nn.Parameter(torch.ones(2, dtype=torch.float64)))
    for twin in (one.data, one.data.view(2, 2).t(), one.data[1:3]):
        with pytest.raises(ValueError, match="p0 and p1 share their memory, or interleave in it"):
            build(one, nn.Parameter(twin))
    both = torch.ones(8)
    assert build(nn.Parameter(both[:4]), nn.Parameter(both[4:])).outer_state.parameters.numel == 8
    with pytest.raises(ValueError, match="p1 has no values yet"):
        build(one, nn.Parameter(torch.ones(1, device="meta")))
    with pytest.raises(ValueError, match="the inner optimizer has no parameters"):
        loco.DiLoCo(torch.optim.SGD([{"params": []}], lr=0.1))
    with pytest.raises(ValueError, match="p1 is expanded: its elements share their memory"):
        build(one, nn.Parameter(torch.ones(1).expand(3)))
    with pytest.raises(ValueError, match=r"p1 is infinite or NaN on site 0"):
        build(one, nn.Parameter(torch.tensor([1.0, float("inf")])))
    with pytest.raises(ValueError, match="inner already exchanges"):
        loco.DiLoCo(build(one))
    with pytest.raises(TypeError, match=r"inner\[0\] must be a torch.optim.Optimizer, got Parameter"):
        loco.PulseLoCo([one])  # pyright: ignore[reportArgumentType]


def test_tensors_that_cannot_be_exchanged_are_named() -> None:
    one, two = torch.ones(2, 2), nn.Parameter(torch.ones(4))
    two.untyped_storage().resize_(0)
    with torch.inference_mode():
        inferred = nn.Parameter(torch.ones(2))
    for param, said in (
        (nn.Parameter(TwoTensor(one, one)), "p1 is a TwoTensor; loco synchronises plain tensors"),
        (nn.Parameter(one.to_sparse()), r"p1 is torch\.sparse_coo; it must be dense"),
        (inferred, "p1 was made under inference_mode, and can't be updated"),
        (two, "p1 has no memory, a framework has freed it"),
    ):
        named = [("p0", nn.Parameter(torch.ones(1))), ("p1", param)]
        with pytest.raises(ValueError, match=said):
            loco.PulseLoCo(torch.optim.SGD(named, lr=0.1))
    flat = FlatParameters(torch.optim.SGD(model().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="the tensors have other shapes or dtypes than the optimizer's"):
        flat.over([torch.ones(1)])
    flat.device = torch.device("cuda")
    with pytest.raises(ValueError, match=r"all parameters of one optimizer must be on one device"):
        flat._check("p1", one)


def test_a_parameter_of_a_mesh_without_this_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "local", lambda tensor: tensor)
    elsewhere: Any = SimpleNamespace(device_mesh=SimpleNamespace(get_coordinate=lambda: None))
    with pytest.raises(ValueError, match="parameter p1 is on a device mesh that this rank is not part of"):
        sharding.check_sharded("p1", elsewhere, None)


def test_parameters_are_named_in_errors_as_the_user_named_them() -> None:
    net = model()
    optimizer = loco.PulseLoCo(torch.optim.SGD(net.named_parameters(), lr=0.1))
    net.get_parameter("2.bias").data.fill_(float("nan"))
    with pytest.raises(
        loco.NonFiniteError, match=r"round 1, site 0: the update of 2\.bias is infinite or NaN"
    ):
        optimizer.sync()


def test_adding_a_group_later_says_what_to_do() -> None:
    inner = torch.optim.SGD(model().parameters(), lr=0.1)
    optimizer = loco.PulseLoCo(inner)
    extra = {"params": [nn.Parameter(torch.ones(1))]}
    with pytest.raises(
        ValueError, match="add the group to the inner optimizer before you build it, or build a new one"
    ):
        optimizer.add_param_group(extra)
    inner.add_param_group(extra)  # behind the wrapper's back
    with pytest.raises(
        ValueError, match="the inner optimizer's parameters have changed since the sites agreed"
    ):
        optimizer.sync()


def test_converting_the_model_later_says_what_to_do() -> None:
    net = model()
    optimizer = loco.PulseLoCo(torch.optim.SGD(net.named_parameters(), lr=0.1))
    net.to(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"parameter 0\.weight was torch\.float32 .* convert and move the model"
    ):
        optimizer.sync()


def test_it_refuses_to_flush_denormals() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU can't flush denormals")
    try:
        with pytest.raises(ValueError, match=r"call torch\.set_flush_denormal\(False\)"):
            loco.PulseLoCo(torch.optim.SGD(model().parameters(), lr=0.1))
        torch.set_flush_denormal(False)
        optimizer = loco.PulseLoCo(torch.optim.SGD(model().parameters(), lr=0.1))
        torch.set_flush_denormal(True)
        with pytest.raises(ValueError, match=r"call torch\.set_flush_denormal\(False\)"):
            optimizer.sync()
    finally:
        torch.set_flush_denormal(False)
    assert optimizer.sync().round == 1
