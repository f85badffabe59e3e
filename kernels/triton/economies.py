"""The gate's economies: a margin, and values in steps, both in units of θ's BF16 ulp."""

import triton
import triton.language as tl


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
