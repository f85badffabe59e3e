"""Applying a patch on the device of the weights takes memory for tiles and changes, no copy of weights."""

from typing import Any

import numpy as np
import pytest
import torch
from homes import PATCH_OPS, interpreted
from patch_cases import in_pieces, moved, trained
from scratch import scratch_bytes
from selection import MEMORY
from torch import Tensor

from loco import kernels
from loco.kernels import Changes, reference_patch
from loco.kernels.reference_patch import bits_of

home = interpreted(PATCH_OPS)
TILE = 2048
N = 20 * TILE
OF_TILE = 16 * 4 + 5 * 8  # bytes: counts of classes, running sums, in which piece it begins
OF_CHANGE = 2 * 8  # its term of the digest, summed up
OF_PART = 512 * 16 * 4 + 4096  # there is only one here: counts of classes for tiles that it does not have


def step(density: float) -> tuple[list[Tensor], Changes]:
    rng = np.random.default_rng(0)
    old = trained(N, torch.bfloat16, rng)
    pieces = in_pieces(old, (TILE, 3 * TILE + 8))
    return pieces, reference_patch.find_changes(
        pieces, in_pieces(moved(old, density, 3, rng), (TILE, 3 * TILE + 8))
    )


def nothing(_: Any) -> list[Tensor]:
    return []


@pytest.mark.check(MEMORY)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3])
def test_a_subscriber_needs_memory_for_tiles_and_changes_only(density: float) -> None:
    """To place what was decoded, to write it and to prove what is held. Weights take 4096 bytes a tile."""
    weights, changes = step(density)
    ranked = reference_patch.rank_changes(weights, changes)
    k = changes.positions.numel()
    given = [*weights, *ranked, *changes]
    placed = scratch_bytes(lambda: home.place_ranked(weights, ranked), list, given)
    swapped = scratch_bytes(lambda: home.swap_bits(weights, changes), nothing, given)
    digested = scratch_bytes(lambda: home.digest_bits(weights[0]), nothing, given)
    assert placed <= OF_TILE * N / TILE + OF_PART
    assert swapped <= OF_TILE * N / TILE + OF_CHANGE * k + 4096
    assert digested <= OF_TILE * N / TILE + 4096


@pytest.mark.gpu
@pytest.mark.parametrize("density", [0.001, 0.01])
def test_a_subscriber_on_a_gpu_needs_a_tenth_of_a_byte_for_each_weight(density: float) -> None:
    """64 MiB of BF16 weights, a patch that arrives in host memory, and the peak of the GPU's memory."""
    n = 1 << 25
    old = (torch.randn(n, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    new = old.clone()
    bits_of(new)[:: int(1 / density)] ^= 1
    changes = kernels.find_changes([old], [new])
    body = kernels.pack_patch([old], changes)
    held = old.cuda()
    assert kernels.find_changes([held], [new.cuda().float()]).positions.numel() == changes.positions.numel()
    assert torch.equal(kernels.pack_patch([held], Changes(*(x.cuda() for x in changes))), body)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = kernels.unpack_patch([held], body)
    kernels.swap_bits([held], found)
    assert torch.equal(bits_of(held).cpu(), bits_of(new))
    of_change = 8 + 2 + (4 + 8) + OF_CHANGE  # the changes, and from which ranks and steps they were placed
    assert torch.cuda.max_memory_allocated() - before < 0.1 * n + 1.1 * of_change * changes.positions.numel()
