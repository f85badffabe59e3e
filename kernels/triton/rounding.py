"""Rounding FP32 to 16 bits, to nearest, ties to even.

BF16 is rounded on integers: Triton's interpreter rounds BF16 wrongly, and hardware may flush denormals.
"""

import triton
import triton.language as tl


@triton.jit
def nearest_bf16(x):
    """The nearest BF16 value, still as FP32. What it makes of a NaN is arbitrary."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def through_bf16(x):
    """float(cast(x)) for BF16 weights."""
    return tl.where(x == x, nearest_bf16(x), float("nan"))


@triton.jit
def bits_of_bf16(x):
    bits = nearest_bf16(x).to(tl.int32, bitcast=True) >> 16
    return tl.where(x == x, bits, 0x7FC0).to(tl.int16)


@triton.jit
def float_of_bf16(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def bits_of_fp16(x):
    bits = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(x == x, bits, 0x7E00).to(tl.int16)
