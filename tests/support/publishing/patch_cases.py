"""Weights of every format and kind and what may become of them, for the tests of patches."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loco.kernels import reference
from loco.kernels.reference_patch import FORMATS, bits_of, ordered, unsigned


def of_bits(bits: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Weights of these bits, of which only the lower ones are taken."""
    width = FORMATS[dtype].width
    return torch.from_numpy(bits.astype(f"<u{width}").view(f"<i{width}")).view(dtype)


def at_order(order: np.ndarray, width: int) -> np.ndarray:
    """The bits of values that are numbered in order: the inverse of `ordered`."""
    return np.where(order >= 0, order, (1 << 8 * width - 1) - 1 - order)


def any_bits(n: int, dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
    """NaNs of any payload, infinities, zeros of both signs and denormals among them."""
    return of_bits(rng.integers(0, 1 << 8 * FORMATS[dtype].width, n), dtype)


def trained(n: int, dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
    """As weights are: from a normal distribution, and a few much larger."""
    values = rng.standard_normal(n) * np.where(rng.random(n) < 1e-3, 4.0, 0.02)
    whole = torch.from_numpy(values.astype(np.float32))
    return (whole * 255).to(dtype) if dtype == torch.uint8 else reference.cast(whole, dtype)


def moved(old: Tensor, density: float, longest: int, rng: np.random.Generator) -> Tensor:
    """Some weights moved by steps of either sign, whose lengths up to `longest` bits are equally frequent."""
    width = FORMATS[old.dtype].width
    half, n = 1 << 8 * width - 1, old.numel()
    lengths = rng.integers(0, longest, n) if n else np.empty(0, dtype=np.int64)
    steps = (1 << lengths) + (rng.random(n) * (1 << lengths)).astype(np.int64)
    steps *= rng.choice([-1, 1], n) * (rng.random(n) < density)
    order = ordered(unsigned(bits_of(old)), width) + steps
    return of_bits(at_order(np.clip(order, -half, half - 1), width), old.dtype)


def in_pieces(whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Cut so, with the rest as the last piece. All but the first begin at any address."""
    return list(whole.split([*sizes, whole.numel() - sum(sizes)]))


def noisy_step(n: int, lr: float, steps: int) -> tuple[Tensor, Tensor]:
    """BF16 weights N(0, 0.02) before the last step of Adam with gradients N(0, 1), and FP32 ones after it."""
    noise = torch.Generator().manual_seed(0)
    weights = (0.02 * torch.randn(n, generator=noise)).bfloat16().float()
    pool = torch.randn(n + 4096, generator=noise)
    m, v, old = torch.zeros(n), torch.zeros(n), weights
    for step in range(1, steps + 1):
        first = int(torch.randint(4096, (), generator=noise))
        gradient = pool[first : first + n]
        m.lerp_(gradient, 0.1)
        v.lerp_(gradient.square(), 0.05)
        old = reference.cast(weights, torch.bfloat16)
        size = (v / (1 - 0.95**step)).sqrt_().add_(1e-8)
        weights.addcdiv_(m, size, value=-lr / (1 - 0.9**step))
    return old, weights
