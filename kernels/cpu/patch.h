/* Patches, as ../reference_patch.py specifies them: what a part looks like to both ends. */

#ifndef LOCO_PATCH_H
#define LOCO_PATCH_H

#include "flat.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

enum { PATCH_PART = 1 << 20, PATCH_BLOCKS = PATCH_PART / BLOCK, CLASSES = 16, SAMPLED = 16, RARE = 1024 };

/* What can be wrong with a patch; ../reference_ranked.py has the same in words. Of several faults any may be named. */
enum { FINE, SHORT, PART_SIZES, BAD_COUNTS, BAD_GAP, NO_SUCH_ELEMENT, BAD_STEP, LEFT_OVER, NO_MEMORY };

typedef struct {
    int width;     /* bytes of a weight */
    int mantissa;  /* bits */
} Format;

static inline uint64_t parts_of_patch(int64_t n) { return (uint64_t)((n + PATCH_PART - 1) / PATCH_PART); }

/* ---- bits of weights ---- */

static inline char *bits_at(const Pieces *p, int64_t piece, int64_t position, int width) {
    return (char *)(intptr_t)p->address[piece] + (position - p->start[piece]) * width;
}

static inline uint32_t read_bits(const char *at, int width) {
    uint8_t one;
    uint16_t two;
    uint32_t four;
    switch (width) {
    case 1: memcpy(&one, at, 1); return one;
    case 2: memcpy(&two, at, 2); return two;
    default: memcpy(&four, at, 4); return four;
    }
}

static inline void write_bits(char *at, uint32_t bits, int width) {
    uint8_t one = (uint8_t)bits;
    uint16_t two = (uint16_t)bits;
    switch (width) {
    case 1: memcpy(at, &one, 1); break;
    case 2: memcpy(at, &two, 2); break;
    default: memcpy(at, &bits, 4);
    }
}

/* ---- rows of 64 elements, with a bit for each ---- */

enum { ROW = 64, ROWS = BLOCK / ROW };

static inline uint32_t ones(uint64_t mask) { return (uint32_t)__builtin_popcountll(mask); }

/* The same bit of each of 64 bytes. */
static inline uint64_t bits_of_bytes(const uint8_t *byte, int bit) {
    uint64_t all = 0;
#if defined(__AVX512BW__)
    all = _mm512_test_epi8_mask(_mm512_loadu_si512(byte), _mm512_set1_epi8((char)(1 << bit)));
#elif defined(__SSE2__)
    for (int i = 0; i < ROW; i += 16) {
        __m128i some = _mm_slli_epi16(_mm_loadu_si128((const __m128i *)(byte + i)), 7 - bit);
        all |= (uint64_t)(uint32_t)_mm_movemask_epi8(some) << i;
    }
#else
    for (int i = 0; i < ROW; i += 8) {
        uint64_t eight;
        memcpy(&eight, byte + i, 8);
        all |= ((eight >> bit & 0x0101010101010101) * 0x0102040810204080) >> 56 << i;
    }
#endif
    return all;
}

/* ---- classes and order ---- */

static inline uint32_t fields_of(Format f) { return (1u << (8 * f.width - 1 - f.mantissa)) - 1; }  /* at most 255 */

static inline uint32_t field_of(uint32_t bits, Format f) { return bits >> f.mantissa & fields_of(f); }

/* All values of a format in order, −0 just below +0: neighbours differ by 1, and no two are equal. */
static inline int64_t ordered(uint32_t bits, int width) {
    int64_t half = (int64_t)1 << (8 * width - 1), u = bits;
    return u < half ? u : half - 1 - u;
}

static inline uint32_t from_ordered(int64_t at, int width) {
    int64_t half = (int64_t)1 << (8 * width - 1);
    return (uint32_t)(at >= 0 ? at : half - 1 - at);
}

/* ---- parts: what one says, and threads that each take the next one ---- */

typedef struct {
    int32_t low;              /* the field of class 0 */
    uint32_t count[CLASSES];  /* of changes */
    uint32_t *rank;           /* of each change, class by class: how many of its class come before it in the part */
    int64_t *step;
} RankedPart;

/* Bytes that are made in a room of each part's own, and then moved together. */
typedef struct {
    int64_t parts;
    const int64_t *first;  /* of each part its first entry; one more than there are parts */
    uint8_t *out;          /* of loco_patch_room bytes */
    int64_t *size;         /* of each part's body; less than 0: there was no room, or no memory */
} Bodies;

/* patch_code.c */
void loco_patch_code_part(const Bodies *to, int64_t part, const RankedPart *from);
int64_t loco_patch_join(const Bodies *bodies);
int loco_patch_read_parts(const uint8_t *body, int64_t size, int64_t n, int64_t *begin, int64_t *first);
int loco_patch_decode_part(const uint8_t *body, int64_t size, RankedPart *into);

static inline int64_t part_size(int64_t n, int64_t part) { return smaller(PATCH_PART, n - part * PATCH_PART); }

static inline int64_t most_entries(const int64_t *first, int64_t parts) {
    int64_t most = 0;
    for (int64_t p = 0; p < parts; p++) most = first[p + 1] - first[p] > most ? first[p + 1] - first[p] : most;
    return most;
}

static inline int64_t take_part(int64_t *taken) { return __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED); }

static inline void work_on_parts(void *(*work)(void *), const void *call, int64_t parts, int threads) {
    Share shares[MAX_THREADS];
    int count = (int)smaller(smaller(threads, parts), MAX_THREADS);
    if (parts) share_among(count < 1 ? 1 : count, work, call, parts, shares);
}

#endif
