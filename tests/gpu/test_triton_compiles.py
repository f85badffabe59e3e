"""The Triton kernels as the ops launch them, compiled for GPUs that need not be here, and what came out.

Nothing is recorded before a test asks for it: an error during collection would stop the whole suite.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
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
from loco.kernels import Entries, Gate, OuterStep

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
VISIBLE = Gate()


def state(dtypes: list[torch.dtype], tiles: float, pad: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    n = int(TILES.TILE * tiles)
    size = n // len(dtypes) // 8 * 8
    sizes = [size] * (len(dtypes) - 1) + [n - size * (len(dtypes) - 1)]
    return torch.zeros(n), [torch.zeros(s + pad, dtype=d)[pad:] for s, d in zip(sizes, dtypes, strict=True)]


def encode(
    *dtypes: torch.dtype, tiles: float = 3, gate: Gate | None = VISIBLE, keeps: bool = True, pad: int = 0
) -> list[Launch]:
    anchor, weights = state(list(dtypes), tiles, pad)
    return record(lambda: home.encode(anchor, weights, torch.zeros_like(anchor) if keeps else None, gate))


def apply(
    *dtypes: torch.dtype, tiles: float = 3, mix: str = "ss", mu: float = 0.9, keeps: bool = True, pad: int = 0
) -> list[Launch]:
    anchor, weights = state(list(dtypes), tiles, pad)
    sparse = Entries.at(torch.arange(0), torch.zeros(0), anchor.numel())
    kinds = {"s": sparse, "w": Entries.whole(torch.zeros_like(anchor))}
    momentum, residual = (torch.zeros_like(anchor) if wanted else None for wanted in (mu, keeps))
    outer = OuterStep(divisor=2, lr=0.7, momentum=mu, nesterov=True)
    contributions = [kinds[kind] for kind in mix]
    return record(lambda: home.apply(anchor, momentum, weights, residual, sparse, contributions, outer))


def write(*dtypes: torch.dtype) -> list[Launch]:
    anchor, weights = state(list(dtypes), 3)
    return record(lambda: home.write_weights(anchor, weights))


def named(launches: list[Launch], name: str) -> Launch:
    """The last launch of a kernel; the ones before it on the same state are its full tiles, or a sample."""
    return [launch for launch in launches if launch.kernel.fn.__name__ == name][-1]


# What every round launches, by name; then what only some do.
COMMON: dict[str, Callable[[], Launch]] = {
    "encode-fp32": lambda: named(encode(FP32), "encode_kernel"),
    "encode-bf16": lambda: named(encode(BF16), "encode_kernel"),
    "place": lambda: named(encode(FP32), "place_kernel"),
    "apply-fp32": lambda: named(apply(FP32), "apply_kernel"),
    "apply-bf16": lambda: named(apply(BF16), "apply_kernel"),
    "diloco-encode-bf16": lambda: named(encode(BF16, gate=None, keeps=False), "encode_kernel"),
    "diloco-apply-bf16": lambda: named(apply(BF16, mix="w", keeps=False), "apply_kernel"),
    "write-bf16": lambda: named(write(BF16), "weights_kernel"),
    "digest": lambda: named(record(lambda: home.digest(torch.zeros(3 * TILES.TILE))), "digest_kernel"),
}
RARE: dict[str, Callable[[], Launch]] = {
    "count-bf16": lambda: encode(BF16)[0],
    "encode-fp16": lambda: named(encode(FP16), "encode_kernel"),
    "encode-mixed": lambda: named(encode(FP32, BF16, FP16), "encode_kernel"),
    "encode-unaligned": lambda: named(encode(BF16, pad=1), "encode_kernel"),
    "encode-tail": lambda: named(encode(BF16, tiles=1.3), "encode_kernel"),
    "encode-gate-fp16": lambda: named(encode(FP32, gate=Gate(dtype=FP16)), "encode_kernel"),
    "encode-gate-e4m3": lambda: named(encode(BF16, gate=Gate(dtype=torch.float8_e4m3fn)), "encode_kernel"),
    "encode-margin": lambda: named(encode(BF16, gate=Gate(margin=0.25)), "encode_kernel"),
    "encode-steps": lambda: named(encode(FP32, gate=Gate(value_steps=16)), "encode_kernel"),
    "encode-both-economies": lambda: named(
        encode(BF16, gate=Gate(margin=0.25, value_steps=16)), "encode_kernel"
    ),
    "count-both-economies": lambda: encode(BF16, gate=Gate(margin=0.25, value_steps=16))[0],
    "encode-gate-e5m2": lambda: named(encode(BF16, gate=Gate(dtype=torch.float8_e5m2)), "encode_kernel"),
    "apply-no-momentum": lambda: named(apply(BF16, mu=0.0), "apply_kernel"),
    "apply-mixed": lambda: named(apply(FP32, BF16, FP16, mix="sws"), "apply_kernel"),
    "apply-unaligned": lambda: named(apply(FP16, pad=1), "apply_kernel"),
    "apply-tail": lambda: named(apply(BF16, tiles=1.3, mix="ws"), "apply_kernel"),
    "write-mixed": lambda: named(write(FP32, BF16, FP16), "weights_kernel"),
    "digest-tail": lambda: named(record(lambda: home.digest(torch.zeros(TILES.TILE + 3))), "digest_kernel"),
}
VARIANTS = COMMON | RARE
COMPILED = [(name, target) for name in COMMON for target in TARGETS]
COMPILED += [(name, target) for name in RARE for target in ("sm_90", "gfx942")]
# For `make test`: what most rounds launch, and the kernels that hold most of the others' code.
SAMPLE = "|".join([*COMMON, "encode-both-economies", "encode-gate-e4m3", "apply-mixed"])
ON_ONE = rf"({SAMPLE})-sm_90"
CUDA = [pair for pair in COMPILED if pair[1] != "gfx942"]
ROCM = [name for name, target in COMPILED if target == "gfx942"]


@functools.cache
def compiled(name: str, target: str) -> Any:
    return compile_launch(VARIANTS[name](), target)


def test_every_launch_forbids_fused_multiply_adds() -> None:
    class Kernel:
        options: dict[str, Any]

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **options: setattr(self, "options", options)

    kernel = Kernel()
    TILES.launch(kernel, 1)
    assert kernel.options == {"num_warps": TILES.WARPS, "enable_fp_fusion": False}


@pytest.mark.check(GPU_TARGETS, sample=ON_ONE)
@pytest.mark.parametrize(("name", "target"), CUDA)
def test_cuda_arithmetic_is_exact_and_nothing_is_atomic(name: str, target: str) -> None:
    ptx = compiled(name, target).asm["ptx"]
    assert "fma." not in ptx
    assert ".ftz" not in ptx
    assert not re.search(r"\b(atom|red)\.", ptx)
    assert not re.search(r"\b(mul|add|sub)\.r[zmp]", ptx)
    divisions = set(re.findall(r"\bdiv\.\S+f32", ptx))
    assert divisions == ({"div.rn.f32"} if "apply" in name else set())
    if re.search("fp16|mixed|unaligned", name) and "encode-unaligned" not in name:
        assert re.search(r"\bcvt\.rn\.f16(x2)?\.f32", ptx)
    assert "cvt.rn.bf16" not in ptx


@pytest.mark.check(GPU_TARGETS, sample=r"sm_90")
@pytest.mark.parametrize("target", [t for t in TARGETS if t != "gfx942"])
def test_zero_is_added_where_there_is_no_residual(target: str) -> None:
    """It makes −0 into +0; a compiler that forgets signs of zeros would drop it."""
    ptx = compiled("diloco-encode-bf16", target).asm["ptx"]
    single, paired = (len(re.findall(rf"\badd(?:\.rn)?\.{kind}\s", ptx)) for kind in ("f32", "f32x2"))
    assert single + 2 * paired == 16  # one for each element of a thread; Δ itself is a subtraction


@pytest.mark.check(GPU_TARGETS, sample="(encode-both-economies|apply-mixed)-sm_90")
@pytest.mark.parametrize(("name", "target"), CUDA)
def test_cuda_kernels_fit_their_registers(name: str, target: str) -> None:
    code = sass(compiled(name, target))
    assert "EXIT" in code
    spills = re.findall(r"\b(?:LDL|STL)\b", code)
    # Triton 3.8.0 alone saves a pair of registers where the division leaves its fast path.
    assert len(spills) <= (2 if triton.__version__ == "3.8.0" else 0)
    assert not re.search(r"\bFFMA\b", code) or "apply" in name  # inside the division
    assert ".FTZ" not in code.replace("MUFU.RCP", "") or "apply" in name


WIDE = {  # 16-byte loads and stores of a thread: 4 elements each of θ, e, m, s and FP32 w, 8 of BF16 w
    "encode-fp32": (3 * 4, 0),
    "encode-bf16": (2 * 4 + 2, 0),
    "diloco-encode-bf16": (4 + 2, 4),
    "apply-fp32": (4 * 4, 4 * 4),
    "apply-bf16": (3 * 4 + 2, 3 * 4 + 2),
    "diloco-apply-bf16": (3 * 4, 2 * 4 + 2),
    "write-bf16": (4, 2),
    "digest": (4, 0),
}


@pytest.mark.check(GPU_TARGETS, sample=rf"{ON_ONE}|apply-bf16-gfx942")
@pytest.mark.parametrize(("name", "target"), [pair for pair in COMPILED if pair[0] in WIDE])
def test_the_state_and_aligned_weights_move_16_bytes_at_a_time(name: str, target: str) -> None:
    assert TILES.TILE == 16 * 32 * TILES.WARPS  # elements of a thread, on CUDA; half on gfx942
    kernel = compiled(name, target)
    loads, stores = WIDE[name]
    if target == "gfx942":
        found = [len(re.findall(rf"_{kind}_dwordx4", kernel.asm["amdgcn"])) for kind in ("load", "store")]
        assert found[0] >= loads // 2
        assert found[1] >= stores // 2
    else:
        found = [
            len(re.findall(rf"\b{kind}\.global\S*\.v4\.b32", kernel.asm["ptx"])) for kind in ("ld", "st")
        ]
        assert found == [loads, stores]


@pytest.mark.check(GPU_TARGETS, sample=r"apply-unaligned")
@pytest.mark.parametrize("name", ["encode-unaligned", "apply-unaligned"])
def test_only_the_weights_are_narrow_when_they_are_not_aligned(name: str) -> None:
    ptx = compiled(name, "sm_90").asm["ptx"]
    arrays = 2 if "encode" in name else 3
    assert len(re.findall(r"\bld\.global\S*\.v4\.b32", ptx)) == 4 * arrays
    assert len(re.findall(r"\bld\.global\S*\.b16", ptx)) == 16


@pytest.mark.check(GPU_TARGETS, sample=r"apply-bf16")
@pytest.mark.parametrize("name", ROCM)
def test_rocm_arithmetic_is_exact_and_nothing_spills(name: str) -> None:
    code = compiled(name, "gfx942").asm["amdgcn"]
    assert set(re.findall(r"\.amdhsa_float_denorm_mode_32 (\d)", code)) == {"3"}
    assert set(re.findall(r"\.amdhsa_float_round_mode_32 (\d)", code)) <= {"0"}
    divisions = len(re.findall(r"\bv_div_fixup_f32", code))
    fused = len(re.findall(r"\bv_(?:pk_)?(?:fma|mac|fmac|mad)_f32", code))
    assert (divisions > 0) == ("apply" in name)
    assert fused == 5 * divisions  # a correctly rounded division is made of five
    assert not re.search(r"\bv_(?:fma|fmac|mad)_(?:f64|f16)|_atomic_|_mad_mix", code)
    for resource in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert set(re.findall(rf"\.{resource}:\s+(\d+)", code)) == {"0"}


@pytest.mark.check(GPU_TARGETS, sample=SAMPLE)
@pytest.mark.parametrize("name", list(VARIANTS))
def test_positions_are_64_bit(name: str) -> None:
    """The program's number, times what a program covers, passes 2^31: it must be widened first."""
    ttir = compiled(name, "sm_90").asm["ttir"]
    assert_numbers_are_widened(ttir)
    # What is narrowed again lies inside one tile, or is the digest's k, mod 2^32, or is no position.
    narrowed = re.findall(r"arith\.trunci %(\w+?)(?:_\d+)? .*: i64 to i32", ttir)
    assert set(narrowed) <= {"low", "high", "use", "base" if "digest" in ttir else "none"}
