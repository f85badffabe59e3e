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

static inline __m256i round_bf16(__m256i u) {
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
}

/* The usual block in one pass: 256 FP32 weights, a residual, the BF16 gate. What the functions above do one after the
 * other takes twice as long, and the memory would wait. May write 7 places past the last.
 * -> how many, or −1 if an s is not finite: then the functions above must look closer. */
static int pack_usual_block(const float *theta, const float *w, const float *e, float gain, uint32_t first,
                            float *values, uint8_t *offsets, uint64_t *digest) {
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF), upper = _mm256_set1_epi32(0x7FFF0000);
    const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi32(1);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i step = _mm256_set1_epi32((int)DIGEST_STEP), next = _mm256_set1_epi32((int)(8 * DIGEST_STEP));
    const __m256 factor = _mm256_set1_ps(gain);
    __m256i key = _mm256_mullo_epi32(_mm256_add_epi32(_mm256_set1_epi32((int)first), lane), step);
    __m256i worst = zero, even_sum = zero, odd_sum = zero;
    uint64_t base = 0;
    int k = 0;
    for (int i = 0; i < BLOCK; i += 8, base += 0x0808080808080808u) {
        __m256 t = _mm256_loadu_ps(theta + i);
        __m256 s = _mm256_add_ps(_mm256_sub_ps(t, _mm256_loadu_ps(w + i)), _mm256_loadu_ps(e + i));
        worst = _mm256_max_epu32(worst, _mm256_and_si256(_mm256_castps_si256(s), magnitude));

        __m256i u = _mm256_castps_si256(t);
        __m256i p = round_bf16(u), q = round_bf16(_mm256_castps_si256(_mm256_sub_ps(t, _mm256_mul_ps(factor, s))));
        /* Unseen: the upper halves agree, or both are zero but for their signs. */
        __m256i differ = _mm256_srli_epi32(_mm256_xor_si256(p, q), 16);
        __m256i nonzero = _mm256_and_si256(_mm256_or_si256(p, q), upper);
        __m256i unseen = _mm256_cmpeq_epi32(_mm256_min_epu32(differ, nonzero), zero);

        unsigned mask = ~(unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(unseen)) & 0xFF;
        uint64_t places = places_of_bits[mask];
        __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)places));
        _mm256_storeu_ps(values + k, _mm256_permutevar8x32_ps(s, lanes));
        places += base;
        memcpy(offsets + k, &places, 8);
        k += __builtin_popcount(mask);

        __m256i v = _mm256_add_epi32(u, key), by = _mm256_or_si256(key, one);
        v = _mm256_xor_si256(v, _mm256_srli_epi32(v, 15));
        even_sum = _mm256_add_epi64(even_sum, _mm256_mul_epu32(v, by));
        odd_sum = _mm256_add_epi64(odd_sum, _mm256_mul_epu32(_mm256_srli_epi64(v, 32), _mm256_srli_epi64(by, 32)));
        key = _mm256_add_epi32(key, next);
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
#endif

/* The entries of one block, packed into `values` and `offsets`. -> how many */
static int encode_block(Share *share, int64_t first, int64_t *piece, float *values, uint8_t *offsets) {
    const Encode *c = share->call;
    int64_t last = smaller(first + BLOCK, c->n);
    int n = (int)(last - first), count = -1;
    const float *theta = c->anchor + first;
#if defined(__AVX2__)
    if (c->gate == GATE_BF16 && c->residual && run_from(&c->pieces, piece, first, last) == BLOCK &&
        c->pieces.dtype[*piece] == FLOAT32)
        count = pack_usual_block(theta, (const float *)weight_at(&c->pieces, *piece, first), c->residual + first,
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
