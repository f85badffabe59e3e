"""Weights and entries of every kind, for the tests of the tight code."""

import numpy as np
import torch
from torch import Tensor

from loco.kernels import Entries, Gate, Known, OuterStep
from loco.kernels.cpu import Compiled

THETAS = ["model", "on the BF16 grid", "on a border", "odd"]
VALUES = ["half ulps", "quantised", "BF16 ulps", "sums", "floats", "odd"]

# Zeros, subnormals, powers of two, halfway between BF16 values, and as large as there are.
_ODD = """0 1 8000 7FFFFF 800000 800001 33D6BF95 38800000 3B000000 3F7FFFFF 3F800000 3F808000 3F817FFF
          43E00000 477FE000 7F000000 7F7F8000 7F7FFFFF"""
ODD = np.array([int(word, 16) for word in _ODD.split()], dtype=np.uint32)


def weights(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    theta = (0.02 * rng.standard_normal(n)).astype(np.float32)
    if kind == "on the BF16 grid":
        return (theta.view(np.uint32) & 0xFFFF0000).view(np.float32)
    if kind == "on a border":
        return (theta.view(np.uint32) & 0xFFFF0000 | 0x8000).view(np.float32)
    return odd(n, rng) if kind == "odd" else theta


def odd(n: int, rng: np.random.Generator) -> np.ndarray:
    signs = rng.integers(0, 2, n, dtype=np.uint32) << 31
    return (rng.choice(ODD, n) | signs).view(np.float32)


def updates(kind: str, theta: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    n = len(theta)
    exponent = np.maximum(theta.view(np.uint32) >> 23 & 255, 1).astype(np.int64)
    half_ulp = np.ldexp(1.0, exponent - 151)
    noise = rng.standard_normal(n) * np.exp(3 * rng.standard_normal(n))
    steps = {"half ulps": 1, "quantised": 2**13, "BF16 ulps": 2**17}.get(kind, 1)
    if kind == "floats":
        return (noise * 1e-5).astype(np.float32)
    if kind == "odd":
        return odd(n, rng)
    whole = np.rint(noise * max(3e4 / steps, 2))
    if kind == "sums":  # of four sites, half of which cancel
        whole = sum(np.rint(rng.standard_normal(n) * 3) for _ in range(4)) * (rng.random(n) < 0.5)
    with np.errstate(over="ignore"):
        values = (whole * half_ulp * steps).astype(np.float32)
    return np.nan_to_num(values, posinf=1.0, neginf=-1.0)


def case(
    n: int,
    density: float,
    *,
    theta: str = "model",
    values: str = "half ulps",
    momentum: bool = True,
    gate: Gate | None = None,
    seed: int = 0,
) -> tuple[Entries, Known]:
    """Entries at random places; of the first and the last element too, if there is room for a density."""
    rng = np.random.default_rng(seed)
    anchor = weights(theta, n, rng)
    update = updates(values, anchor, rng)
    m = torch.from_numpy((1e-5 * rng.standard_normal(n)).astype(np.float32)) if momentum else None
    present = rng.random(n) < density
    if density:
        present[:1] = present[-1:] = True
    where = torch.from_numpy(np.flatnonzero(present))
    entries = Entries.at(where, torch.from_numpy(update)[where], n)
    return entries, Known(torch.from_numpy(anchor), m, gate or Gate())


def after_rounds(
    home: Compiled, n: int, lr: float, gate: Gate, *, sites: int = 4, rounds: int = 16
) -> tuple[Entries, Known]:
    """What a site sends once residuals have settled, if its gradients are noise to AdamW. H = 8."""
    noise = torch.Generator().manual_seed(0)
    anchor, momentum = 0.02 * torch.randn(n, generator=noise), torch.zeros(n)
    inner, residuals = torch.zeros(sites, n), torch.zeros(sites, n)
    weight, gradient, sent = torch.empty(n), torch.empty(n), []
    outer = OuterStep(divisor=sites, lr=0.7, momentum=0.9, nesterov=True)
    for last in [False] * rounds + [True]:
        sent.clear()
        trained: list[Tensor] = []
        for site in range(1 if last else sites):
            weight.copy_(anchor)
            for _ in range(8):
                inner[site].lerp_(gradient.normal_(generator=noise), 0.1)  # β₁ = 0.9, and v = 1
                weight.add_(inner[site], alpha=-lr)
            trained.append(weight.clone())
            sent.append(home.encode(anchor, [weight], residuals[site], gate).entries)
        if last:
            break
        theta = anchor.clone()
        for site, w in enumerate(trained):
            anchor_of_site, m = theta.clone(), momentum.clone()
            home.apply(anchor_of_site, m, [w], residuals[site], sent[site], sent, outer)
            if site == sites - 1:
                anchor, momentum = anchor_of_site, m
    return sent[0], Known(anchor, momentum, gate)
