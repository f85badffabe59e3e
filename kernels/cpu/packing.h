/* Packing eight numbers at a time: those that a mask keeps move to the front. */

#ifndef LOCO_PACKING_H
#define LOCO_PACKING_H

#include "flat.h"

enum { PACK_ROOM = 16 };  /* places past the last entry that may be read and written */

#if defined(__AVX2__)
static uint64_t places_of_bits[256];  /* for each mask of 8 bits the places of those that are set, a byte each */

__attribute__((constructor)) static void fill_places(void) {
    for (int mask = 0; mask < 256; mask++)
        for (int bit = 0, k = 0; bit < 8; bit++)
            if (mask >> bit & 1) places_of_bits[mask] |= (uint64_t)bit << 8 * k++;
}

static inline __m256i all(uint32_t word) { return _mm256_set1_epi32((int)word); }

/* The eight places from `at` on, of which only `left` may be entries: the others become 0. */
static inline __m128i eight_places(const uint8_t *at, int left) {
    uint64_t places;
    memcpy(&places, at, 8);
    if (left < 8) places &= ((uint64_t)1 << 8 * left) - 1;
    return _mm_cvtsi64_si128((int64_t)places);
}

/* Of eight entries those of the mask. -> how many */
static inline int pack_eight(unsigned mask, __m256 s, __m128i places, float *values, uint8_t *offsets) {
    __m128i order = _mm_cvtsi64_si128((int64_t)places_of_bits[mask]);
    _mm256_storeu_ps(values, _mm256_permutevar8x32_ps(s, _mm256_cvtepu8_epi32(order)));
    _mm_storel_epi64((__m128i *)(void *)offsets, _mm_shuffle_epi8(places, order));
    return __builtin_popcount(mask);
}
#endif

#endif
