"""A small model, a training loop in which each site has data of its own, and what to compare afterwards."""

import numpy as np
import torch
from scripted import bits
from torch import nn

import loco

Snapshot = dict[str, np.ndarray]


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    """Each site on data of its own."""
    device = next(net.parameters()).device
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * rank + step))
        net(x.to(device)).square().mean().backward()
        optimizer.step()


def snapshot(optimizer: loco.Saveable) -> Snapshot:
    """θ, m, e and w, bit for bit."""
    outer = optimizer.outer_state
    tensors = {"anchor": outer.anchor, "momentum": outer.momentum, "residual": outer.residual}
    weights = torch.cat([p.detach().float().reshape(-1) for p in outer.parameters.tensors])
    return {name: bits(t.cpu()) for name, t in (tensors | {"weights": weights}).items() if t is not None}


def inner_state(optimizer: torch.optim.Optimizer) -> Snapshot:
    """What the inner optimizer itself holds, bit for bit."""
    state = optimizer.state_dict()["state"]
    return {f"{k} {name}": bits(torch.as_tensor(v)) for k, own in state.items() for name, v in own.items()}


def assert_same(a: Snapshot, b: Snapshot) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], name)
