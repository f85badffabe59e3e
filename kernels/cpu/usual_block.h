/* The block that nearly all are: 256 weights of one piece, with a residual and a gate, in one pass from memory to
 * packed entries. What the functions of encode.c do one after the other takes longer, and the memory waits. For the
 * BF16 gate there is a version for AVX-512, an eighth faster than the one for AVX2 (experiments/LOG.md).
 */

#ifndef LOCO_USUAL_BLOCK_H
#define LOCO_USUAL_BLOCK_H

#include "flat.h"
#include "packing.h"

#if defined(__AVX2__)
/* Bits of FP32 numbers, rounded to nearest even at bit `shift`, where a sign or larger exponent rides along. */
static inline __m256i round_at(__m256i u, int shift) {
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, shift), all(1));
    return _mm256_add_epi32(u, _mm256_add_epi32(odd, all((1u << (shift - 1)) - 1)));
}

/* round_magnitude of numbers.h, but for NaN. */
static inline __m256i round_magnitudes(__m256i a, int mantissa, int least, uint32_t largest) {
    int shift = 23 - mantissa;
    __m256i normal = _mm256_and_si256(round_at(a, shift), all(~((1u << shift) - 1)));
    __m256 steps = _mm256_castsi256_ps(all((uint32_t)(127 + least - mantissa + 23) << 23));
    __m256 tiny = _mm256_sub_ps(_mm256_add_ps(_mm256_castsi256_ps(a), steps), steps);
    __m256i is_tiny = _mm256_cmpgt_epi32(all((uint32_t)(127 + least) << 23), a);
    return _mm256_min_epu32(_mm256_blendv_epi8(normal, _mm256_castps_si256(tiny), is_tiny), all(largest));
}

/* visible of numbers.h, negated and but for NaN: all bits where the two casts are one value. */
static inline __attribute__((always_inline)) __m256i unseen(__m256i x, __m256i y, int gate) {
    const __m256i sign = all(0x80000000), zero = _mm256_setzero_si256();
    if (gate == GATE_BF16) {
        /* The upper halves agree, or both are zero but for their signs. */
        __m256i p = round_at(x, 16), q = round_at(y, 16);
        __m256i differ = _mm256_srli_epi32(_mm256_xor_si256(p, q), 16);
        __m256i nonzero = _mm256_and_si256(_mm256_or_si256(p, q), all(0x7FFF0000));
        return _mm256_cmpeq_epi32(_mm256_min_epu32(differ, nonzero), zero);
    }
    int mantissa = gate == GATE_FP16 ? 10 : gate == GATE_E4M3 ? 3 : 2, least = gate == GATE_E4M3 ? -6 : -14;
    uint32_t largest = gate == GATE_FP16 ? 0x47800000 : gate == GATE_E4M3 ? 0x43E00000 : 0x47600000;
    __m256i p = round_magnitudes(_mm256_andnot_si256(sign, x), mantissa, least, largest);
    __m256i q = round_magnitudes(_mm256_andnot_si256(sign, y), mantissa, least, largest);
    __m256i other_sign = _mm256_and_si256(_mm256_xor_si256(x, y), sign);
    __m256i sign_counts = _mm256_andnot_si256(_mm256_cmpeq_epi32(p, zero), other_sign);
    __m256i differ = _mm256_or_si256(_mm256_xor_si256(p, q), sign_counts);
    return _mm256_cmpeq_epi32(differ, zero);
}

#if defined(__AVX512F__)
static inline __m512i all512(uint32_t word) { return _mm512_set1_epi32((int)word); }

static inline __m512i round_bf16_512(__m512i u) {
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), all512(1));
    return _mm512_add_epi32(u, _mm512_add_epi32(odd, all512(0x7FFF)));
}

/* The function below, 16 elements at a time, for the BF16 gate. */
static inline __attribute__((always_inline)) int pack_usual_block_512(const float *theta, const char *w, const float *e,
                                                                     float factor, float gain, int dtype, uint32_t first,
                                                                     float *values, uint8_t *offsets,
                                                                     uint64_t *digest) {
    const __m512i magnitude = all512(0x7FFFFFFF);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 times = _mm512_set1_ps(factor), gains = _mm512_set1_ps(gain);
    __m512i key = _mm512_mullo_epi32(_mm512_add_epi32(all512(first), lane), all512(DIGEST_STEP));
    __m512i worst = _mm512_setzero_si512(), even_sum = worst, odd_sum = worst, place = lane;
    int k = 0;
    for (int i = 0; i < BLOCK; i += 16) {
        __m512 t = _mm512_loadu_ps(theta + i), cast = t, weight;
        __m512i u = _mm512_castps_si512(t);
        if (dtype == FLOAT32) {
            weight = _mm512_loadu_ps((const float *)(w + 4 * i));
        } else {
            __m256i half = _mm256_loadu_si256((const __m256i *)(w + 2 * i));
            if (dtype == BFLOAT16) {
                weight = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
                cast = _mm512_castsi512_ps(_mm512_and_si512(round_bf16_512(u), all512(0xFFFF0000)));
                worst = _mm512_max_epu32(worst, _mm512_and_si512(u, magnitude));  /* rounding can hide a NaN */
            } else {
                weight = _mm512_cvtph_ps(half);
                cast = _mm512_cvtph_ps(_mm512_cvtps_ph(t, _MM_FROUND_TO_NEAREST_INT));
            }
        }
        __m512 s = _mm512_add_ps(_mm512_mul_ps(_mm512_sub_ps(cast, weight), times), _mm512_loadu_ps(e + i));
        worst = _mm512_max_epu32(worst, _mm512_and_si512(_mm512_castps_si512(s), magnitude));

        /* Seen: the upper halves differ, and not only as the signs of zeros. */
        __m512i p = round_bf16_512(u);
        __m512i q = round_bf16_512(_mm512_castps_si512(_mm512_sub_ps(t, _mm512_mul_ps(gains, s))));
        __mmask16 seen = _mm512_test_epi32_mask(_mm512_xor_si512(p, q), all512(0xFFFF0000));
        seen = _mm512_mask_test_epi32_mask(seen, _mm512_or_si512(p, q), all512(0x7FFF0000));
        _mm512_storeu_ps(values + k, _mm512_maskz_compress_ps(seen, s));
        __m128i places = _mm512_cvtepi32_epi8(_mm512_maskz_compress_epi32(seen, place));
        _mm_storeu_si128((__m128i *)(offsets + k), places);
        k += __builtin_popcount(seen);
        place = _mm512_add_epi32(place, all512(16));

        __m512i v = _mm512_add_epi32(u, key), by = _mm512_or_si512(key, all512(1));
        v = _mm512_xor_si512(v, _mm512_srli_epi32(v, 15));
        even_sum = _mm512_add_epi64(even_sum, _mm512_mul_epu32(v, by));
        odd_sum = _mm512_add_epi64(odd_sum, _mm512_mul_epu32(_mm512_srli_epi64(v, 32), _mm512_srli_epi64(by, 32)));
        key = _mm512_add_epi32(key, all512(16 * DIGEST_STEP));
    }
    uint64_t sums[8];
    if (_mm512_reduce_max_epu32(worst) >= 0x7F800000) return -1;
    _mm512_storeu_si512(sums, _mm512_add_epi64(even_sum, odd_sum));
    for (int i = 0; i < 8; i++) *digest += sums[i];
    return k;
}
#endif

/* Packs the block's visible s and their offsets, and adds to the digest of θ.
 * -> how many, or −1 if a number is not finite: then the caller must look closer. */
static inline __attribute__((always_inline)) int pack_usual_block(const float *theta, const char *w, const float *e,
                                                                 float factor, float gain, int dtype, int gate, uint32_t first,
                                                                 float *values, uint8_t *offsets, uint64_t *digest) {
#if defined(__AVX512F__)
    if (gate == GATE_BF16) return pack_usual_block_512(theta, w, e, factor, gain, dtype, first, values, offsets, digest);
#endif
    const __m256i magnitude = all(0x7FFFFFFF), lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 times = _mm256_set1_ps(factor), gains = _mm256_set1_ps(gain);
    __m256i key = _mm256_mullo_epi32(_mm256_add_epi32(all(first), lane), all(DIGEST_STEP));
    __m256i worst = _mm256_setzero_si256(), even_sum = worst, odd_sum = worst;
    uint64_t base = 0;
    int k = 0;
    for (int i = 0; i < BLOCK; i += 8, base += 0x0808080808080808u) {
        __m256 t = _mm256_loadu_ps(theta + i), cast = t, weight;
        __m256i u = _mm256_castps_si256(t);
        if (dtype == FLOAT32) {
            weight = _mm256_loadu_ps((const float *)(w + 4 * i));
        } else {
            __m128i half = _mm_loadu_si128((const __m128i *)(w + 2 * i));
            if (dtype == BFLOAT16) {
                weight = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
                cast = _mm256_castsi256_ps(_mm256_and_si256(round_at(u, 16), all(0xFFFF0000)));
                worst = _mm256_max_epu32(worst, _mm256_and_si256(u, magnitude));  /* rounding can hide a NaN */
            } else {
                weight = _mm256_cvtph_ps(half);
                cast = _mm256_cvtph_ps(_mm256_cvtps_ph(t, _MM_FROUND_TO_NEAREST_INT));
            }
        }
        __m256 s = _mm256_add_ps(_mm256_mul_ps(_mm256_sub_ps(cast, weight), times), _mm256_loadu_ps(e + i));
        worst = _mm256_max_epu32(worst, _mm256_and_si256(_mm256_castps_si256(s), magnitude));

        __m256i moved = _mm256_castps_si256(_mm256_sub_ps(t, _mm256_mul_ps(gains, s)));
        unsigned mask = ~(unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(unseen(u, moved, gate))) & 0xFF;
        uint64_t places = places_of_bits[mask];
        __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)places));
        _mm256_storeu_ps(values + k, _mm256_permutevar8x32_ps(s, lanes));
        places += base;
        memcpy(offsets + k, &places, 8);
        k += __builtin_popcount(mask);

        __m256i v = _mm256_add_epi32(u, key), by = _mm256_or_si256(key, all(1));
        v = _mm256_xor_si256(v, _mm256_srli_epi32(v, 15));
        even_sum = _mm256_add_epi64(even_sum, _mm256_mul_epu32(v, by));
        odd_sum = _mm256_add_epi64(odd_sum, _mm256_mul_epu32(_mm256_srli_epi64(v, 32), _mm256_srli_epi64(by, 32)));
        key = _mm256_add_epi32(key, all(8 * DIGEST_STEP));
    }
    uint32_t most[8];
    uint64_t sums[4];
    _mm256_storeu_si256((__m256i *)most, worst);
    for (int i = 0; i < 8; i++)
        if (most[i] >= 0x7F800000) return -1;
    _mm256_storeu_si256((__m256i *)sums, _mm256_add_epi64(even_sum, odd_sum));
    *digest += sums[0] + sums[1] + sums[2] + sums[3];
    return k;
}

typedef int Pack(const float *, const char *, const float *, float, float, uint32_t, float *, uint8_t *, uint64_t *);

/* The function above with its dtype and gate made constants. */
#define USUAL(name, dtype, gate)                                                                                      \
    static int name(const float *theta, const char *w, const float *e, float factor, float gain, uint32_t first,      \
                    float *values, uint8_t *offsets, uint64_t *digest) {                                              \
        return pack_usual_block(theta, w, e, factor, gain, dtype, gate, first, values, offsets, digest);              \
    }
USUAL(float32_bf16, FLOAT32, GATE_BF16)
USUAL(float32_fp16, FLOAT32, GATE_FP16)
USUAL(float32_e4m3, FLOAT32, GATE_E4M3)
USUAL(float32_e5m2, FLOAT32, GATE_E5M2)
USUAL(bfloat16_bf16, BFLOAT16, GATE_BF16)
USUAL(bfloat16_fp16, BFLOAT16, GATE_FP16)
USUAL(bfloat16_e4m3, BFLOAT16, GATE_E4M3)
USUAL(bfloat16_e5m2, BFLOAT16, GATE_E5M2)
USUAL(float16_bf16, FLOAT16, GATE_BF16)
USUAL(float16_fp16, FLOAT16, GATE_FP16)
USUAL(float16_e4m3, FLOAT16, GATE_E4M3)
USUAL(float16_e5m2, FLOAT16, GATE_E5M2)

static Pack *const usual[3][5] = {
    [FLOAT32] = {NULL, float32_bf16, float32_fp16, float32_e4m3, float32_e5m2},
    [BFLOAT16] = {NULL, bfloat16_bf16, bfloat16_fp16, bfloat16_e4m3, bfloat16_e5m2},
    [FLOAT16] = {NULL, float16_bf16, float16_fp16, float16_e4m3, float16_e5m2},
};
#endif

#endif
