/* Numbers: casts, the gate and the digest, bit for bit as in ../reference.py.
 *
 * Written without branches, so that compilers turn the loops around them into vector instructions.
 */

#ifndef LOCO_NUMBERS_H
#define LOCO_NUMBERS_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || FLT_EVAL_METHOD != 0
#error "every operation must be rounded to FP32 on its own, and denormals kept"
#endif

enum { FLOAT32, BFLOAT16, FLOAT16 };                        /* dtypes of parameters */
enum { OPEN, GATE_BF16, GATE_FP16, GATE_E4M3, GATE_E5M2 };  /* OPEN: everything is sent */

static inline uint32_t bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float from_bits(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
static inline uint32_t choose(int32_t condition, uint32_t yes, uint32_t no) { return condition ? yes : no; }

static inline float bf16_to_float(uint16_t h) { return from_bits((uint32_t)h << 16); }

static inline uint16_t float_to_bf16(float x) {
    uint32_t u = bits(x), rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
    return (uint16_t)choose((u & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded);
}

static inline float fp16_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, a = h & 0x7FFF;
    uint32_t normal = (a << 13) + ((127 - 15) << 23), special = (a << 13) + ((255 - 31) << 23);
    uint32_t tiny = bits((float)(int32_t)a * 0x1p-24f);
    return from_bits(sign | choose(a >= 0x7C00, special, choose(a < 0x0400, tiny, normal)));
}

static inline uint16_t float_to_fp16(float x) {
    uint32_t u = bits(x), sign = (u >> 16) & 0x8000, a = u & 0x7FFFFFFF;
    uint32_t normal = (a - ((127 - 15) << 23) + 0xFFF + ((a >> 13) & 1)) >> 13;
    /* Below 2^-14 FP16 has steps of 2^-24. Adding 0.5, where FP32 has the same steps, rounds to them. */
    uint32_t tiny = bits(from_bits(a) + 0.5f) - bits(0.5f);
    uint32_t h = choose(a < 0x38800000, tiny, normal);
    h = choose(a >= 0x477FF000, 0x7C00, h);  /* from 65520 on: infinity */
    return (uint16_t)choose(a > 0x7F800000, 0x7E00, sign | h);
}

/* |x|, given and returned as FP32 bits, rounded to a format with `mantissa` explicit bits, normal numbers from
 * 2^least, and nothing above `largest`. */
static inline uint32_t round_magnitude(uint32_t a, int mantissa, int least, uint32_t largest) {
    int shift = 23 - mantissa;
    uint32_t normal = (a + ((1u << (shift - 1)) - 1) + ((a >> shift) & 1)) & ~((1u << shift) - 1);
    /* Below 2^least the format's steps are all equal; adding a number with those steps rounds to them. */
    float steps = from_bits((uint32_t)(127 + least - mantissa + 23) << 23);
    uint32_t tiny = bits((from_bits(a) + steps) - steps);
    uint32_t q = choose(a < (uint32_t)(127 + least) << 23, tiny, normal);
    return choose(q > largest, largest, q);
}

static inline uint32_t to_gate(uint32_t a, int gate) {
    switch (gate) {
    case GATE_FP16: return round_magnitude(a, 10, -14, 0x47800000);  /* 65536 stands for infinity */
    case GATE_E4M3: return round_magnitude(a, 3, -6, 0x43E00000);    /* 448 */
    case GATE_E5M2: return round_magnitude(a, 2, -14, 0x47600000);   /* 57344 */
    default: return (a + 0x7FFF + ((a >> 16) & 1)) & 0xFFFF0000;     /* BF16: denormals are FP32's own */
    }
}

/* Step 4: cast(θ) ≠ cast(θ − γ·s) as values: +0 equals −0, NaN differs from everything. -> 1 or 0 */
static inline uint32_t visible(float theta, float s, float gain, int gate) {
    float scaled = gain * s;
    uint32_t x = bits(theta), y = bits(theta - scaled), a = x & 0x7FFFFFFF, b = y & 0x7FFFFFFF;
    uint32_t p = to_gate(a, gate), q = to_gate(b, gate);
    uint32_t differ = (p ^ q) | choose(p != 0, (x ^ y) & 0x80000000, 0);
    return choose((differ != 0) | (a > 0x7F800000) | (b > 0x7F800000), 1, 0);
}

#define DIGEST_STEP 0x9E3779B1u

/* The digest of some 32-bit words of a vector, of which the first is word number `first`. */
static inline uint64_t digest_words(const void *data, int words, uint32_t first) {
    const char *at = data;
    uint64_t sum = 0;
    for (int i = 0; i < words; i++) {
        uint32_t u;
        memcpy(&u, at + 4 * i, 4);
        uint32_t k = (first + (uint32_t)i) * DIGEST_STEP, v = u + k;
        v ^= v >> 15;
        sum += (uint64_t)v * (k | 1);
    }
    return sum;
}

#endif
