"""Step 4: would the update change the cast of the weight? One comparison of values per gate dtype.

And the gate's economies: a margin, and values in steps, both in units of θ's BF16 ulp.
"""

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


@triton.jit
def power_of(anchor):
    """2^(E − 127) for the biased exponent E of θ, which is 1 for zeros and denormals: 2^7 BF16 ulps."""
    exponent = anchor.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(exponent, 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def beyond_margin(anchor, update, margin):
    """|s| > f·ulp(θ)"""
    return tl.abs(update) > margin * (power_of(anchor) * 0.0078125)  # 2^-7


@triton.jit
def in_steps(anchor, update, fraction):
    """s as the nearest multiple of fraction · 2^(E − 127), ties to the even one; what is not finite stays.

    From 2^23 steps on FP32 numbers are a step or more apart: adding that many, and taking them away again,
    rounds s as wanted. Where θ is large all is done 2^32 times smaller, since 2^23 steps could be more than
    FP32 holds; and so could the result be, which then is the last multiple that is not.
    """
    power = power_of(anchor)
    large = power >= 2.0
    size = tl.abs(update)
    scaled = tl.where(large, size * 2.0**-32, size)
    step = tl.where(large, power * 2.0**-32, power) * fraction
    many = step * 8388608.0  # 2^23
    rounded = tl.minimum((scaled + many) - many, 2.0**96 - step)
    rounded = tl.where(large, rounded * 2.0**32, rounded)
    rounded = tl.where(scaled < many, rounded, size)
    return tl.where(update < 0, -rounded, rounded)
