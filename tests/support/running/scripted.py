"""An inner optimizer whose steps are known in advance, and models small enough to follow by hand."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


class Scripted(torch.optim.Optimizer):
    """w ← cast(float(w) − d), with d drawn from (seed, site, step): numpy can follow it bit for bit."""

    def __init__(self, params: Any, seed: int, site: int, scale: float = 3e-5) -> None:
        super().__init__(params, {"lr": 1.0})
        self.seed, self.site, self.scale, self.count = seed, site, scale, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        numel = sum(p.numel() for group in self.param_groups for p in group["params"])
        moves = move(self.seed, self.site, self.count, numel, self.scale)
        self.count += 1
        start = 0
        for group in self.param_groups:
            for p in group["params"]:
                d = torch.from_numpy(moves[start : start + p.numel()]).view(p.shape)
                p.copy_(p.float() - d.to(p.device))
                start += p.numel()
        return None


def move(seed: int, site: int, step: int, numel: int, scale: float) -> np.ndarray:
    noise = np.random.default_rng((seed, site, step)).standard_normal(numel)
    return (scale * noise).astype(np.float32)


def parameters(seed: int, numel: int, bf16: bool = False) -> list[torch.nn.Parameter]:
    """A matrix that is not contiguous, a 0-d, an empty and a 1-D parameter; with `bf16` the last is BF16."""
    rng = np.random.default_rng(seed)
    values = torch.from_numpy((0.02 * rng.standard_normal(numel)).astype(np.float32))
    matrix, scalar, rest = values[:12].view(3, 4), values[12].clone(), values[13:].clone()
    return [
        torch.nn.Parameter(matrix.t().contiguous().t()),  # [3, 4], stored by columns
        torch.nn.Parameter(scalar),
        torch.nn.Parameter(torch.empty(0, 5)),
        torch.nn.Parameter(rest.bfloat16() if bf16 else rest),
    ]


def flat(params: list[torch.nn.Parameter]) -> np.ndarray:
    return torch.cat([p.detach().float().reshape(-1) for p in params]).cpu().numpy()


def bits(x: Tensor | np.ndarray) -> np.ndarray:
    """FP32 as integers, since −0.0 and NaN payloads matter."""
    return np.asarray(x, dtype=np.float32).view(np.uint32).copy()
