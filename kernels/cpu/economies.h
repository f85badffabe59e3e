/* The gate's economies, bit for bit as in ../reference.py: a margin, and values in steps.
 *
 * They concern only what is visible, a small part of all. So they are a second pass over a block's packed entries
 * (economise.h), and the pass that finds those need not know of them.
 */

#ifndef LOCO_ECONOMIES_H
#define LOCO_ECONOMIES_H

#include "flat.h"

/* 2^(E − 127) for the biased exponent E of θ, which is 1 for zeros and denormals: 2^7 BF16 ulps. */
static inline float power_of(float theta) {
    uint32_t exponent = bits(theta) & 0x7F800000;
    return from_bits(choose(exponent < 0x00800000, 0x00800000, exponent));
}

static inline float magnitude(float x) { return from_bits(bits(x) & 0x7FFFFFFF); }

/* Whether |x| is more than `margin` ulps of a weight of this power. */
static inline int is_above(float x, float margin, float power) { return magnitude(x) > margin * (power * 0x1p-7f); }

/* s as the nearest multiple of power · fraction, ties to the even one; not 2^128, but the multiple before it. */
static inline float in_steps(float s, float power, float fraction) {
    /* Where θ is large all is done 2^32 times smaller: 2^23 steps could be more than FP32 holds. */
    int32_t large = power >= 2.0f;
    float down = from_bits(choose(large, bits(0x1p-32f), bits(1.0f)));
    float up = from_bits(choose(large, bits(0x1p32f), bits(1.0f)));
    float size = magnitude(s) * down, step = power * down * fraction;
    /* From 2^23 steps on FP32 numbers are a step or more apart: adding that many rounds to them. */
    float many = step * 0x1p23f, nearest = (size + many) - many, largest = 0x1p96f - step;
    nearest = from_bits(choose(nearest > largest, bits(largest), bits(nearest))) * up;
    return from_bits(choose(size < many, bits(nearest), bits(magnitude(s))) | (bits(s) & 0x80000000));
}

#endif
