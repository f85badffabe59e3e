"""What every rank has, on every rank.

torch's own `all_gather_object` unpickles what peers send, and a pickle can do anything; here plain values and
tensors are all that can arrive.
"""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist


def most(count: int) -> int:
    """Of any rank, in one small message; every rank calls this together. For gloo."""
    found = torch.tensor(count)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def from_all(value: Any) -> list[Any]:
    """By rank. Plain containers, numbers, strings and tensors; every rank calls this together."""
    file = io.BytesIO()
    torch.save(value, file)
    # Through the GPU where the ranks can only speak by NCCL.
    device = torch.device("cpu" if "gloo" in str(dist.get_backend_config()) else "cuda")
    mine = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8).to(device)
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    sizes[dist.get_rank()] = mine.numel()
    dist.all_reduce(sizes)
    padded = mine.new_zeros(int(sizes.max()))
    padded[: mine.numel()] = mine
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [
        torch.load(io.BytesIO(one[: int(size)].cpu().numpy().tobytes()), weights_only=True)
        for one, size in zip(found, sizes, strict=True)
    ]
