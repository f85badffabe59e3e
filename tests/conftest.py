"""Fixtures that more than one file uses."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch._C._distributed_c10d import HashStore

# No test is about time: the first one to need the C kernels compiles them.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device"))


@pytest.fixture
def single_site() -> Iterator[None]:
    """A process group of one rank, in this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
