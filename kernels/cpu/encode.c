/* Encode, steps 2 to 5: what to send, the digest of θ and the first bad position, in one pass that writes nothing
 * of the state. */

#define _DEFAULT_SOURCE  /* for madvise */
#include <stdlib.h>
#include <sys/mman.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "flat.h"

typedef struct {
    int64_t n;
    const float *anchor, *residual;
    Pieces pieces;
    int gate;
    float gain;
    int64_t *starts;
    uint8_t *offsets;
    float *values;
    /* Threads take chunks of blocks in order, and in order put down what they found. */
    int64_t chunk;
    pthread_mutex_t *lock;
    pthread_cond_t *moved_on;
    int64_t *taken, *put_down, *entries;
} Encode;

/* ---- a block ---- */

static inline __attribute__((always_inline)) void mark_visible(uint32_t *restrict mark, const float *restrict theta,
                                                              const float *restrict s, int n, float gain, int gate) {
    for (int i = 0; i < n; i++) mark[i] = visible(theta[i], s[i], gain, gate);
}

/* Packs a block's visible s and their offsets. May write one place past the last. -> how many */
static int pack(const float *theta, const float *s, int n, float gain, int gate, float *values, uint8_t *offsets) {
    uint32_t mark[BLOCK];
    switch (gate) {  /* each with its own loop, in which the gate is a constant */
    case GATE_BF16: mark_visible(mark, theta, s, n, gain, GATE_BF16); break;
    case GATE_FP16: mark_visible(mark, theta, s, n, gain, GATE_FP16); break;
    case GATE_E4M3: mark_visible(mark, theta, s, n, gain, GATE_E4M3); break;
    case GATE_E5M2: mark_visible(mark, theta, s, n, gain, GATE_E5M2); break;
    }
    int k = 0;
    for (int i = 0; i < n; i++) {
        values[k] = s[i];
        offsets[k] = (uint8_t)i;
        k += (int)mark[i];
    }
    return k;
}

/* The place of the first s that is infinite or NaN, or −1. */
static int first_bad(const float *s, int n) {
    uint32_t worst = 0;
    for (int i = 0; i < n; i++) {
        uint32_t a = bits(s[i]) & 0x7FFFFFFF;
        worst = a > worst ? a : worst;
    }
    if (worst >= 0x7F800000)
        for (int i = 0; i < n; i++)
            if ((bits(s[i]) & 0x7FFFFFFF) >= 0x7F800000) return i;
    return -1;
}

#if defined(__AVX2__)
static uint64_t places_of_bits[256];  /* for each mask of 8 bits the places of those that are set, a byte each */

__attribute__((constructor)) static void fill_places(void) {
    for (int mask = 0; mask < 256; mask++)
        for (int bit = 0, k = 0; bit < 8; bit++)
            if (mask >> bit & 1) places_of_bits[mask] |= (uint64_t)bit << 8 * k++;
}

static inline __m256i all(uint32_t word) { return _mm256_set1_epi32((int)word); }

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
    __m256i differ = _mm256_or_si256(_mm256_xor_si256(p, q), _mm256_andnot_si256(_mm256_cmpeq_epi32(p, zero), other_sign));
    return _mm256_cmpeq_epi32(differ, zero);
}

/* A block of 256 weights of one piece, with a residual, in one pass. What the functions above do one after
 * the other takes twice as long, and the memory would wait. May write 7 places past the last.
 * -> how many, or −1 if a number is not finite: then the functions above must look closer. */
static inline __attribute__((always_inline)) int pack_usual_block(const float *theta, const char *w, const float *e,
                                                                 float gain, int dtype, int gate, uint32_t first,
                                                                 float *values, uint8_t *offsets, uint64_t *digest) {
    const __m256i magnitude = all(0x7FFFFFFF), lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 factor = _mm256_set1_ps(gain);
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
        __m256 s = _mm256_add_ps(_mm256_sub_ps(cast, weight), _mm256_loadu_ps(e + i));
        worst = _mm256_max_epu32(worst, _mm256_and_si256(_mm256_castps_si256(s), magnitude));

        __m256i moved = _mm256_castps_si256(_mm256_sub_ps(t, _mm256_mul_ps(factor, s)));
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

typedef int Pack(const float *, const char *, const float *, float, uint32_t, float *, uint8_t *, uint64_t *);

/* The function above with its dtype and gate made constants. */
#define USUAL(name, dtype, gate)                                                                                      \
    static int name(const float *theta, const char *w, const float *e, float gain, uint32_t first, float *values,     \
                    uint8_t *offsets, uint64_t *digest) {                                                             \
        return pack_usual_block(theta, w, e, gain, dtype, gate, first, values, offsets, digest);                      \
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

/* The entries of one block, packed into `values` and `offsets`. -> how many */
static int encode_block(Share *share, int64_t first, int64_t *piece, float *values, uint8_t *offsets) {
    const Encode *c = share->call;
    int64_t last = smaller(first + BLOCK, c->n);
    int n = (int)(last - first), count = -1;
    const float *theta = c->anchor + first;
#if defined(__AVX2__)
    if (c->gate != OPEN && c->residual && run_from(&c->pieces, piece, first, last) == BLOCK)
        count = usual[c->pieces.dtype[*piece]][c->gate](theta, weight_at(&c->pieces, *piece, first), c->residual + first,
                                                        c->gain, (uint32_t)first, values, offsets, &share->digest);
#endif
    if (count >= 0) return count;
    float room[BLOCK], *s = c->gate == OPEN ? c->values + first : room;
    update_block(s, c->anchor, c->residual, &c->pieces, piece, first, last);
    share->digest += digest_words(theta, n, (uint32_t)first);
    int bad = first_bad(s, n);
    if (bad >= 0 && share->bad < 0) share->bad = first + bad;
    return c->gate == OPEN ? 0 : pack(theta, s, n, c->gain, c->gate, values, offsets);
}

/* ---- a thread ---- */

static int64_t take_chunk(const Encode *c) {
    pthread_mutex_lock(c->lock);
    int64_t block = *c->taken;
    *c->taken += c->chunk;
    pthread_mutex_unlock(c->lock);
    return block;
}

/* Where the `count` entries of the chunk that ends at `stop` belong: behind those of all chunks before it. */
static int64_t place_for(const Encode *c, int64_t block, int64_t stop, int64_t count) {
    pthread_mutex_lock(c->lock);
    while (*c->put_down != block) pthread_cond_wait(c->moved_on, c->lock);
    int64_t position = *c->entries;
    *c->entries += count;
    *c->put_down = stop;
    pthread_cond_broadcast(c->moved_on);
    pthread_mutex_unlock(c->lock);
    return position;
}

static void *encode_share(void *argument) {
    Share *share = argument;
    const Encode *c = share->call;
    size_t room = (size_t)c->chunk * BLOCK + 8;
    float *values = malloc(5 * room);  /* touched as far as there are entries */
    uint8_t *offsets = (uint8_t *)(values + room);
    int64_t blocks = blocks_of(c->n);
    if (!values) return NULL;  /* the caller sees that chunks are missing */
    for (int64_t block; (block = take_chunk(c)) < blocks;) {
        int64_t stop = smaller(block + c->chunk, blocks), piece = piece_at(&c->pieces, block * BLOCK), k = 0;
        for (int64_t b = block; b < stop; b++) {
            int count = encode_block(share, b * BLOCK, &piece, values + k, offsets + k);
            k += count;
            if (c->gate != OPEN) c->starts[b + 1] = k;
        }
        int64_t position = place_for(c, block, stop, k);
        if (c->gate == OPEN) continue;
        memcpy(c->values + position, values, 4 * (size_t)k);
        memcpy(c->offsets + position, offsets, (size_t)k);
        for (int64_t b = block; b < stop; b++) c->starts[b + 1] += position;
    }
    free(values);
    return NULL;
}

/* ---- the call ---- */

/* Fresh memory costs a page fault for every 4 KiB, together as long as the pass itself. Large pages make them rare. */
static void prefer_large_pages(void *memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    enum { PAGE = 4096 };
    uintptr_t first = ((uintptr_t)memory + PAGE - 1) / PAGE * PAGE;
    uintptr_t last = ((uintptr_t)memory + (uintptr_t)bytes) / PAGE * PAGE;
    if (bytes >= 1 << 26) madvise((void *)first, last - first, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

/* `values` and `offsets` have room for n entries, `starts` for one more than there are blocks. Without a gate only
 * `values` is written. -> how many entries there are, or −1 for want of memory */
int64_t loco_encode(int64_t n, const float *anchor, const float *residual, int64_t pieces, const int64_t *address,
                    const int64_t *start, const int32_t *dtype, int gate, float gain, int threads, int64_t *starts,
                    uint8_t *offsets, float *values, uint64_t *digest, int64_t *first_nonfinite) {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t moved_on = PTHREAD_COND_INITIALIZER;
    int64_t taken = 0, put_down = 0, entries = 0, blocks = blocks_of(n);
    /* Large enough that threads rarely wait for each other, small enough that all have work to the end. */
    int64_t chunk = smaller(blocks / (16 * (threads < 1 ? 1 : threads)), 1024);
    Encode call = {n, anchor, residual, {pieces, address, start, dtype}, gate, gain, starts, offsets, values,
                   chunk < 16 ? 16 : chunk, &lock, &moved_on, &taken, &put_down, &entries};
    Share shares[MAX_THREADS];
    *digest = 0;
    *first_nonfinite = -1;
    prefer_large_pages(values, 4 * n);
    if (gate != OPEN) {
        prefer_large_pages(offsets, n);
        starts[0] = 0;
    }
    int count = share_out(encode_share, &call, blocks, threads, shares);
    for (int k = 0; k < count; k++) {
        int64_t bad = shares[k].bad;
        *digest += shares[k].digest;
        if (bad >= 0 && (*first_nonfinite < 0 || bad < *first_nonfinite)) *first_nonfinite = bad;
    }
    if (put_down < blocks) return -1;
    return gate == OPEN ? n : entries;
}
