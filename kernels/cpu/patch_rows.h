/* The elements of a block by class, in rows of 64: how many of each class there are, and where those of one are.
 *
 * A class has four bits. For each pattern of its upper two and of its lower two a row has a mask of its elements, so
 * those of a class are the `and` of two masks. That counts 64 elements in 16 steps, whatever they are.
 */

#ifndef LOCO_PATCH_ROWS_H
#define LOCO_PATCH_ROWS_H

#include "patch.h"

typedef struct {
    uint64_t upper[4], lower[4];  /* a bit for each element */
} Row;

typedef struct {
    char buffer[BLOCK * 4];
    const char *bits;      /* of the elements, one after the other */
    uint8_t class[BLOCK];  /* 0 past the last */
    Row row[ROWS];
} Block;

static inline uint64_t members(const Row *row, int k) { return row->upper[k / 4] & row->lower[k % 4]; }

static inline void count_members(const Block *b, uint32_t *restrict count) {
    for (int upper = 0; upper < 4; upper++)
        for (int lower = 0; lower < 4; lower++) {
            uint32_t sum = 0;
            for (int r = 0; r < ROWS; r++) sum += ones(b->row[r].upper[upper] & b->row[r].lower[lower]);
            count[4 * upper + lower] = sum;
        }
}

/* The place of the set bit that `before` others come before. */
static inline int select_bit(uint64_t mask, uint32_t before) {
#if defined(__BMI2__)
    return __builtin_ctzll(_pdep_u64((uint64_t)1 << before, mask));
#else
    for (; before; before--) mask &= mask - 1;
    return __builtin_ctzll(mask);
#endif
}

/* The classes of some elements: their fields are bytes, whatever their size. */
#define CLASSES_OF(type)                                                                           \
    for (int i = 0; i < n; i++) {                                                                  \
        type one;                                                                                  \
        memcpy(&one, bits + (size_t)i * sizeof one, sizeof one);                                   \
        uint8_t field = (uint8_t)(one >> f.mantissa) & fields, above = field > least ? field : least; \
        above = (uint8_t)(above - least);                                                          \
        class[i] = above < CLASSES - 1 ? above : CLASSES - 1;                                      \
    }

static inline void classes_of(const char *restrict bits, int n, Format f, int32_t low, uint8_t *restrict class) {
    const uint8_t fields = (uint8_t)fields_of(f), least = (uint8_t)low;
    if (f.width == 2) CLASSES_OF(uint16_t)
    else if (f.width == 1) CLASSES_OF(uint8_t)
    else CLASSES_OF(uint32_t)
}

/* `class` has zeros past the last of n. */
static inline void read_row(Row *row, const char *bits, int n, Format f, int32_t low, uint8_t *class) {
    classes_of(bits, n, f, low, class);
    uint64_t a = bits_of_bytes(class, 3), b = bits_of_bytes(class, 2), c = bits_of_bytes(class, 1),
             d = bits_of_bytes(class, 0), there = n < ROW ? ((uint64_t)1 << n) - 1 : ~(uint64_t)0;
    *row = (Row){{~a & ~b & there, ~a & b, a & ~b, a & b}, {~c & ~d, ~c & d, c & ~d, c & d}};
}

#if defined(__AVX512BW__)
static inline __m512i fields_512(const char *bits, Format f) {
    const __m128i shift = _mm_cvtsi32_si128(f.mantissa);
    const __m512i fields = _mm512_set1_epi8((char)fields_of(f));
    if (f.width == 1) return _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(bits), shift), fields);
    if (f.width == 2) {
        const __m512i words = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), byte = _mm512_set1_epi16(255);
        __m512i first = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(bits), shift), byte);
        __m512i last = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(bits + 64), shift), byte);
        return _mm512_and_si512(_mm512_permutexvar_epi64(words, _mm512_packus_epi16(first, last)), fields);
    }
    __m512i all = _mm512_setzero_si512();
    for (int i = 0; i < 4; i++) {
        __m128i some = _mm512_cvtepi32_epi8(_mm512_srl_epi32(_mm512_loadu_si512(bits + 64 * i), shift));
        all = _mm512_mask_broadcast_i32x4(all, (__mmask16)(15 << 4 * i), some);
    }
    return _mm512_and_si512(all, fields);
}

/* The same of a whole row. */
static inline void read_row_512(Row *row, const char *bits, Format f, int32_t low, uint8_t *class) {
    __m512i above = _mm512_subs_epu8(fields_512(bits, f), _mm512_set1_epi8((char)low));
    above = _mm512_min_epu8(above, _mm512_set1_epi8(CLASSES - 1));
    _mm512_storeu_si512(class, above);
    __m512i upper = _mm512_and_si512(above, _mm512_set1_epi8(12)), lower = _mm512_and_si512(above, _mm512_set1_epi8(3));
    for (int i = 0; i < 4; i++) {
        row->upper[i] = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8((char)(4 * i)));
        row->lower[i] = _mm512_cmpeq_epi8_mask(lower, _mm512_set1_epi8((char)i));
    }
}
#endif

/* The elements from `first` on. `piece` moves on to the last one's. */
static inline void read_block(Block *b, const Pieces *p, int64_t *piece, int64_t first, int n, Format f, int32_t low) {
    int run = run_from(p, piece, first, first + n);
    b->bits = bits_at(p, *piece, first, f.width);
    if (run < n) {
        for (int made = 0;;) {
            memcpy(b->buffer + made * f.width, bits_at(p, *piece, first + made, f.width), (size_t)(run * f.width));
            made += run;
            if (made == n) break;
            run = run_from(p, piece, first + made, first + n);
        }
        b->bits = b->buffer;
    }
    for (int r = 0; r < ROWS; r++) {
        const char *bits = b->bits + ROW * r * f.width;
        uint8_t *class = b->class + ROW * r;
        int left = n - ROW * r;
        if (left >= ROW) {
#if defined(__AVX512BW__)
            read_row_512(&b->row[r], bits, f, low, class);
#else
            read_row(&b->row[r], bits, ROW, f, low, class);
#endif
        } else {
            memset(class, 0, ROW);
            read_row(&b->row[r], bits, left > 0 ? left : 0, f, low, class);
        }
    }
}

#endif
