"""The Triton kernels of patches as the ops launch them, compiled for GPUs that need not be here."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from selection import GPU_TARGETS
from triton_compiling import (
    TARGETS,
    TILES,
    Launch,
    assert_numbers_are_widened,
    compile_launch,
    record,
    sass,
)

import loco.kernels.triton as home
from loco.kernels.types import Changes, Ranked

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def weights(dtype: torch.dtype, tiles: float = 3, pad: int = 0) -> list[torch.Tensor]:
    n = int(tiles * TILES.TILE)
    return [torch.zeros(n // 2 + pad, dtype=dtype)[pad:], torch.zeros(n - n // 2, dtype=dtype)]


def some(entries: int, dtype: torch.dtype) -> Changes:
    return Changes(
        torch.arange(entries), torch.zeros(entries, dtype=home.changes.Vector(weights(dtype)).bits)
    )


def find(dtype: torch.dtype, new: torch.dtype | None = None, **how: Any) -> list[Launch]:
    return record(lambda: home.find_changes(weights(dtype, **how), weights(new or dtype, **how)))


def rank(dtype: torch.dtype, **how: Any) -> list[Launch]:
    return record(lambda: home.rank_changes(weights(dtype, **how), some(100, dtype)))


def place(dtype: torch.dtype, **how: Any) -> list[Launch]:
    # What the recorded kernels have counted is zeros, and no rank may be above it.
    counts = torch.tensor([[100, *[0] * 15]], dtype=torch.int32)
    ranks = torch.full((100,), -1, dtype=torch.int32)
    ranked = Ranked(torch.zeros(1, dtype=torch.uint8), counts, ranks, torch.zeros(100, dtype=torch.int64))
    return record(lambda: home.place_ranked(weights(dtype, **how), ranked))


def named(launches: list[Launch], name: str) -> Launch:
    """The last launch of a kernel."""
    return [launch for launch in launches if launch.kernel.fn.__name__ == name][-1]


COMMON: dict[str, Callable[[], Launch]] = {
    "find-count": lambda: find(BF16, FP32)[0],
    "find": lambda: named(find(BF16, FP32), "find_kernel"),
    "swap": lambda: record(lambda: home.swap_bits(weights(BF16), some(100, BF16)))[-1],
    "digest": lambda: record(lambda: home.digest_bits(weights(BF16)[0]))[0],
    "lowest": lambda: named(rank(BF16), "lowest_kernel"),
    "count": lambda: named(rank(BF16), "count_kernel"),
    "rank": lambda: named(rank(BF16), "rank_kernel"),
    "meet": lambda: named(place(BF16), "meet_kernel"),
    "place": lambda: named(place(BF16), "place_kernel"),
}
RARE: dict[str, Callable[[], Launch]] = {
    "find-fp16": lambda: named(find(FP16, FP32), "find_kernel"),
    "find-same": lambda: named(find(E4M3), "find_kernel"),
    "find-tail": lambda: named(find(BF16, tiles=1.3, pad=1), "find_kernel"),
    "swap-fp32": lambda: record(lambda: home.swap_bits(weights(FP32), some(100, FP32)))[-1],
    "swap-e4m3": lambda: record(lambda: home.swap_bits(weights(E4M3), some(100, E4M3)))[-1],
    "digest-e4m3": lambda: record(lambda: home.digest_bits(weights(E4M3)[0]))[0],
    "lowest-e4m3": lambda: named(rank(E4M3), "lowest_kernel"),
    "rank-fp32": lambda: named(rank(FP32), "rank_kernel"),
    "rank-tail": lambda: named(rank(FP16, tiles=1.3, pad=1), "rank_kernel"),
    "place-fp32": lambda: named(place(FP32), "place_kernel"),
    "place-tail": lambda: named(place(E4M3, tiles=1.3, pad=1), "place_kernel"),
}
VARIANTS = COMMON | RARE
SAMPLE = "|".join([*COMMON, "place-tail"])  # for `make test`
COMPILED = [(name, target) for name in COMMON for target in TARGETS]
COMPILED += [(name, target) for name in RARE for target in ("sm_90", "gfx942")]


@functools.cache
def compiled(name: str, target: str) -> Any:
    return compile_launch(VARIANTS[name](), target)


@pytest.mark.check(GPU_TARGETS, sample=r"(find|place)-sm_90|rank-gfx942")
@pytest.mark.parametrize(("name", "target"), COMPILED)
def test_every_kernel_compiles_and_keeps_its_values_in_registers(name: str, target: str) -> None:
    kernel = compiled(name, target)
    if target == "gfx942":
        code = kernel.asm["amdgcn"]
        # Scalar registers may be kept in vector registers, which is not memory.
        for resource in ("vgpr_spill_count", "private_segment_fixed_size"):
            assert set(re.findall(rf"\.{resource}:\s+(\d+)", code)) == {"0"}
    else:
        code = sass(kernel)
        assert "EXIT" in code
        assert not re.search(r"\b(?:LDL|STL)\b", code)


@pytest.mark.check(GPU_TARGETS, sample=SAMPLE)
@pytest.mark.parametrize("name", list(VARIANTS))
def test_memory_is_written_without_atomics(name: str) -> None:
    """What several programs added up in any order would still be right; but none of them has to wait."""
    assert not re.search(r"\b(atom|red)\.global", compiled(name, "sm_90").asm["ptx"])


@pytest.mark.check(GPU_TARGETS, sample=SAMPLE)
@pytest.mark.parametrize("name", list(VARIANTS))
def test_positions_are_64_bit(name: str) -> None:
    """The program's number, times what a program covers, passes 2^31: it must be widened first."""
    assert_numbers_are_widened(compiled(name, "sm_90").asm["ttir"])


@pytest.mark.parametrize("name", ["find-count", "find", "count", "place"])
def test_aligned_weights_are_read_16_bytes_at_a_time(name: str) -> None:
    assert re.search(r"\bld\.global\S*\.v4\.b32", compiled(name, "sm_90").asm["ptx"])
