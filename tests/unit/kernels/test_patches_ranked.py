"""The two halves of patches: one ranks and places changes among all weights, the other codes the changes."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from homes import builds, same_bits
from patch_cases import in_pieces, moved, trained
from torch import Tensor

from loco.kernels import MalformedError, reference_patch
from loco.kernels.reference_patch import FORMATS, PART, bits_of
from loco.kernels.types import Ranked

CODERS = [reference_patch, *(param.values[0].patches for param in builds() if param.values[0] is not None)]
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in FORMATS]


def ranked_example(n: int, dtype: torch.dtype, density: float, seed: int = 0) -> tuple[list[Tensor], Ranked]:
    rng = np.random.default_rng(seed)
    old = trained(n, dtype, rng)
    new = moved(old, density, 3, rng)
    pieces = in_pieces(old, (n // 3, 0))
    changes = reference_patch.find_changes(pieces, in_pieces(new, (n // 3, 0)))
    ranked = reference_patch.rank_changes(pieces, changes)
    same_bits(reference_patch.place_ranked(pieces, ranked), changes)
    return pieces, ranked


def check(pieces: list[Tensor], ranked: Ranked) -> None:
    """Both halves, one after the other, are what a home does in one go."""
    numel = sum(piece.numel() for piece in pieces)
    changes = reference_patch.place_ranked(pieces, ranked)
    for home in CODERS:
        body = home.code_ranked(ranked)
        same_bits([body], [home.pack_patch(pieces, changes)])
        same_bits(home.decode_ranked(body, numel), ranked)


@pytest.mark.parametrize("n", [0, 1, 63, 1003])
@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_are_coded_and_decoded_alike_in_every_home(n: int, density: float, dtype: torch.dtype) -> None:
    check(*ranked_example(n, dtype, density))


def test_parts_without_changes_between_others() -> None:
    n = 3 * PART + 1003
    old = trained(n, torch.bfloat16, np.random.default_rng(0))
    new = old.clone()
    for first in (5, 2 * PART + 77):
        bits_of(new)[first : first + 9000 : 30] ^= 1
    ranked = reference_patch.rank_changes([old], reference_patch.find_changes([old], [new]))
    assert [int(counts.sum()) for counts in ranked.counts] == [300, 0, 300, 0]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            check([old], ranked)
    finally:
        torch.set_num_threads(before)


def test_a_step_may_be_as_long_as_fp32_is_wide() -> None:
    ends = torch.tensor([-1, (1 << 31) - 1, 0, -(1 << 31)], dtype=torch.int32)
    old, new = ends.view(torch.float32), ends.roll(1).view(torch.float32)
    ranked = reference_patch.rank_changes([old], reference_patch.find_changes([old], [new]))
    assert ranked.steps.abs().max() == (1 << 32) - 1
    check([old], ranked)


def outcome(home: Any, body: bytes, numel: int) -> Ranked | None:
    try:
        return home.decode_ranked(torch.from_numpy(np.frombuffer(body, dtype=np.uint8).copy()), numel)
    except MalformedError:
        return None


def test_damaged_bytes_are_refused_or_decoded_alike_in_every_home() -> None:
    draw = random.Random(0)
    fine = 0
    for seed in range(300):
        n = draw.choice([40, 90, 300])
        _, ranked = ranked_example(n, torch.bfloat16, 0.3, seed % 7)
        raw = bytearray(reference_patch.code_ranked(ranked).numpy().tobytes())
        at = draw.randrange(4, len(raw))
        raw[at] ^= 1 << draw.randrange(8)
        if draw.random() < 0.3:
            raw[4:] = raw[4 : at + 1]
            raw[:4] = (len(raw) - 4).to_bytes(4, "little")
        found = [outcome(home, bytes(raw), n) for home in CODERS]
        for other in found[1:]:
            assert (other is None) == (found[0] is None)
            same_bits(other or (), found[0] or ())
        fine += found[0] is not None
    assert 0 < fine < 300


def test_ranks_of_weights_that_are_not_there_are_refused() -> None:
    pieces, ranked = ranked_example(300, torch.bfloat16, 0.3)
    with pytest.raises(MalformedError, match="more weights of a class than there are"):
        reference_patch.place_ranked(pieces, ranked._replace(ranks=ranked.ranks + 300))
    too_long = ranked._replace(steps=torch.full_like(ranked.steps, 1 << 16))
    with pytest.raises(MalformedError, match="a step leads out of the format"):
        reference_patch.place_ranked(pieces, too_long)
