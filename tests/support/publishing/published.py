"""A small model that trains, as a publisher sees it, and its weights, as a subscriber holds them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loco.kernels import reference
from loco.sync import Publisher


class Model(nn.Module):
    """Odd sizes, tied weights, a matrix that is not contiguous, a buffer of integers."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(301, width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.norm = nn.LayerNorm(2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.down.weight = nn.Parameter(self.down.weight.detach().t().clone().t())
        self.head = nn.Linear(width, 301, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def model(seed: int = 0, width: int = 48) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Model(width)


def train(trained: nn.Module, generator: torch.Generator, lr: float = 1e-5) -> None:
    """Something like a step: a third of the weights move a little."""
    with torch.no_grad():
        for parameter in trained.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            noise *= torch.rand(parameter.shape, generator=generator) < 0.3
            parameter.add_(lr * noise)
        for buffer in trained.buffers():
            buffer.add_(1)


def held(trained: nn.Module) -> dict[str, Tensor]:
    """What a subscriber should hold: FP32 as BF16, everything else as it is, and tied what is tied."""
    memories: dict[int, Tensor] = {}
    for tensor in trained.state_dict().values():
        memories.setdefault(tensor.data_ptr(), cast(tensor).clone())
    return {name: memories[tensor.data_ptr()] for name, tensor in trained.state_dict().items()}


def cast(tensor: Tensor) -> Tensor:
    return reference.cast(tensor, torch.bfloat16) if tensor.dtype == torch.float32 else tensor


def blank(trained: nn.Module) -> dict[str, Tensor]:
    """Memory of a subscriber that holds something else."""
    engine = held(trained)
    for tensor in engine.values():
        tensor.fill_(3)
    return engine


def same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        mine = found[name]
        assert mine.dtype == tensor.dtype
        assert torch.equal(bytes_of(mine), bytes_of(tensor)), name


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def publish(publisher: Publisher, trained: nn.Module, generator: torch.Generator, versions: int) -> None:
    for _ in range(versions):
        train(trained, generator)
        publisher.publish()


def chain(
    tmp_path: Path, versions: int, keep: int = 10_000, **settings: Any
) -> tuple[nn.Module, Publisher, dict[int, dict[str, Tensor]]]:
    """A chain of versions, and what each of them was."""
    trained, generator, were = model(width=9), torch.Generator().manual_seed(1), {}
    publisher = Publisher(trained, tmp_path, keep=keep, **settings)
    for version in range(1, versions + 1):
        train(trained, generator)
        publisher.publish(wait=False)
        were[version] = held(trained)
    publisher.flush()
    return trained, publisher, were


def weights_of(folder: Path, version: int) -> list[Path]:
    return sorted((folder / "weights").glob(f"{version:012d}.*"))
