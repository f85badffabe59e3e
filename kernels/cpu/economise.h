/* The gate's economies on a block's packed entries. */

#ifndef LOCO_ECONOMISE_H
#define LOCO_ECONOMISE_H

#include "economies.h"
#include "packing.h"

#if defined(__AVX2__)
/* power_of of eight weights. */
static inline __m256 powers_of(__m256i weights) {
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_and_si256(weights, all(0x7F800000)), all(0x00800000)));
}

/* Of those at eight places of a block. */
static inline __m256 powers_at(const float *theta, __m128i places) {
    return powers_of(_mm256_i32gather_epi32((const int *)(const void *)theta, _mm256_cvtepu8_epi32(places), 4));
}

/* is_above of eight numbers, as a mask. */
static inline unsigned are_above(__m256 x, float margin, __m256 powers) {
    __m256 sign = _mm256_castsi256_ps(all(0x80000000));
    __m256 most = _mm256_mul_ps(_mm256_set1_ps(margin), _mm256_mul_ps(powers, _mm256_set1_ps(0x1p-7f)));
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_andnot_ps(sign, x), most, _CMP_GT_OQ));
}

/* in_steps of eight numbers. */
static inline __m256 in_steps_256(__m256 s, __m256 power, float fraction) {
    const __m256 sign = _mm256_castsi256_ps(all(0x80000000));
    __m256 large = _mm256_cmp_ps(power, _mm256_set1_ps(2.0f), _CMP_GE_OQ);
    __m256 down = _mm256_blendv_ps(_mm256_set1_ps(1.0f), _mm256_set1_ps(0x1p-32f), large);
    __m256 up = _mm256_blendv_ps(_mm256_set1_ps(1.0f), _mm256_set1_ps(0x1p32f), large);
    __m256 magnitudes = _mm256_andnot_ps(sign, s), size = _mm256_mul_ps(magnitudes, down);
    __m256 step = _mm256_mul_ps(_mm256_mul_ps(power, down), _mm256_set1_ps(fraction));
    __m256 many = _mm256_mul_ps(step, _mm256_set1_ps(0x1p23f));
    __m256 nearest = _mm256_sub_ps(_mm256_add_ps(size, many), many);
    __m256 largest = _mm256_sub_ps(_mm256_set1_ps(0x1p96f), step);
    __m256 beyond = _mm256_cmp_ps(nearest, largest, _CMP_GT_OQ);
    nearest = _mm256_mul_ps(_mm256_blendv_ps(nearest, largest, beyond), up);
    __m256 rounded = _mm256_blendv_ps(magnitudes, nearest, _mm256_cmp_ps(size, many, _CMP_LT_OQ));
    return _mm256_or_ps(rounded, _mm256_and_ps(sign, s));
}

/* The function below, 8 entries at a time. */
static inline int economise_256(const float *theta, float margin, float fraction, int count, float *values,
                                uint8_t *offsets) {
    int kept = 0;
    for (int k = 0; k < count; k += 8) {
        int left = count - k;
        __m128i places = eight_places(offsets + k, left);
        __m256 powers = powers_at(theta, places), s = _mm256_loadu_ps(values + k);
        unsigned mask = left < 8 ? (1u << left) - 1 : 0xFF;
        if (margin != 0.0f) mask &= are_above(s, margin, powers);
        if (fraction != 0.0f) {
            s = in_steps_256(s, powers, fraction);
            mask &= (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(s, _mm256_setzero_ps(), _CMP_NEQ_UQ));
        }
        /* Nothing is overwritten that has not been read: kept is at most k. */
        kept += pack_eight(mask, s, places, values + kept, offsets + kept);
    }
    return kept;
}
#endif

/* Of a block's packed entries keeps those above `margin` ulps (0: all), in steps of `fraction` · 2^(E − 127) (0: as
 * they are), if that leaves anything of them. Behind the last entry there are PACK_ROOM more places. -> how many */
static inline int economise(const float *theta, float margin, float fraction, int count, float *values,
                            uint8_t *offsets) {
#if defined(__AVX2__)
    return economise_256(theta, margin, fraction, count, values, offsets);
#else
    float power[BLOCK];
    uint32_t keep[BLOCK];
    for (int k = 0; k < count; k++) {
        power[k] = power_of(theta[offsets[k]]);
        keep[k] = 1;
    }
    if (margin != 0.0f)
        for (int k = 0; k < count; k++) keep[k] = is_above(values[k], margin, power[k]);
    if (fraction != 0.0f)
        for (int k = 0; k < count; k++) {
            values[k] = in_steps(values[k], power[k], fraction);
            keep[k] &= values[k] != 0.0f;
        }
    int kept = 0;
    for (int k = 0; k < count; k++) {
        values[kept] = values[k];
        offsets[kept] = offsets[k];
        kept += (int)keep[k];
    }
    return kept;
#endif
}

#endif
