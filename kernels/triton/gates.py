"""Step 4: would the update change the cast of the weight? One comparison of values per gate dtype."""

import torch
import triton
import triton.language as tl

from .rounding import nearest_bf16

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4m3",
    torch.float8_e5m2: "fp8e5m2",
}


@triton.jit
def visible(anchor, update, gain, GATE: tl.constexpr):
    """cast(θ) ≠ cast(θ − γ·s), compared as values: +0 equals −0, a NaN differs from everything."""
    moved = anchor - gain * update
    if GATE == "fp16":
        before, after = anchor.to(tl.float16), moved.to(tl.float16)
    elif GATE == "bf16":
        before, after = nearest_bf16(anchor), nearest_bf16(moved)
    elif GATE == "fp8e4m3":
        before, after = nearest_fp8(anchor, 3, -6, 448.0), nearest_fp8(moved, 3, -6, 448.0)
    else:
        tl.static_assert(GATE == "fp8e5m2")
        before, after = nearest_fp8(anchor, 2, -14, 57344.0), nearest_fp8(moved, 2, -14, 57344.0)
    # The integer rounding may lose a NaN. Where θ is one, θ − γ·s is one too.
    return (before != after) | (moved != moved)


@triton.jit
def nearest_fp8(x, MANTISSA: tl.constexpr, LOWEST_EXPONENT: tl.constexpr, LARGEST: tl.constexpr):
    """The nearest FP8 value, still as FP32, saturating. What it makes of a NaN is arbitrary.

    The spacing of FP8 numbers around x is 2^(e − MANTISSA), with e the exponent of x, or the lowest
    exponent for denormals. FP32 numbers around 2^(e − MANTISSA + 23) have that same spacing: adding that
    power and taking it away again rounds x as wanted.
    """
    size = tl.minimum(tl.abs(x), LARGEST)
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, (127 + LOWEST_EXPONENT) << 23)
    power = (exponent + ((23 - MANTISSA) << 23)).to(tl.float32, bitcast=True)
    rounded = (size + power) - power
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
