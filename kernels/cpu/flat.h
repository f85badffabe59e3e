/* The flat state in blocks, the parameters in pieces, the work in threads. */

#ifndef LOCO_FLAT_H
#define LOCO_FLAT_H

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "numbers.h"

enum { BLOCK = 256, MAX_THREADS = 256 };  /* BLOCK: as in ../types.py */

static inline int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- entries: as in ../types.py ---- */

typedef struct {
    const int64_t *starts;  /* NULL: all elements */
    const uint8_t *offsets;
    const float *values;
} Entries;

_Static_assert(sizeof(Entries) == 24, "the caller passes addresses of 8 bytes");

/* ---- pieces: 1-D parts of the parameters, which one after the other make up the flat vector ---- */

typedef struct {
    int64_t count;
    const int64_t *address, *start;  /* start has one more than there are pieces: the end of the last */
    const int32_t *dtype;
} Pieces;

/* The piece in which a position lies. None is empty. */
static inline int64_t piece_at(const Pieces *p, int64_t position) {
    int64_t low = 0, high = p->count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (p->start[middle] <= position) low = middle; else high = middle;
    }
    return low;
}

static inline char *weight_at(const Pieces *p, int64_t piece, int64_t position) {
    return (char *)(intptr_t)p->address[piece] + (position - p->start[piece]) * (p->dtype[piece] == FLOAT32 ? 4 : 2);
}

/* The part of the elements `low` … `last` that lies in one piece, which `piece` moves on to. -> its length */
static inline int run_from(const Pieces *p, int64_t *piece, int64_t low, int64_t last) {
    while (p->start[*piece + 1] <= low) ++*piece;
    return (int)(smaller(p->start[*piece + 1], last) - low);
}

/* Steps 2 and 3 in one piece: s = c·(float(cast(θ)) − float(w)) + e. Without e a zero is added: −0 becomes +0. */
static inline void update_run(float *restrict s, const float *restrict theta, const char *restrict w,
                              const float *restrict e, float factor, int n, int dtype) {
    const float *full = (const float *)w;
    const uint16_t *half = (const uint16_t *)w;
    if (dtype == FLOAT32)
        for (int i = 0; i < n; i++) s[i] = theta[i] - full[i];
    else if (dtype == BFLOAT16)
        for (int i = 0; i < n; i++) s[i] = bf16_to_float(float_to_bf16(theta[i])) - bf16_to_float(half[i]);
    else
        for (int i = 0; i < n; i++) s[i] = fp16_to_float(float_to_fp16(theta[i])) - fp16_to_float(half[i]);
    if (factor != 1.0f) for (int i = 0; i < n; i++) s[i] *= factor;
    if (e) for (int i = 0; i < n; i++) s[i] += e[i];
    else for (int i = 0; i < n; i++) s[i] += 0.0f;
}

/* Steps 2 and 3 of the elements `first` … `last`, at most a block, whose θ are given. `piece` moves on to the last
 * one's. */
static inline void update_block(float *s, const float *theta, const float *residual, float factor, const Pieces *p,
                                int64_t *piece, int64_t first, int64_t last) {
    for (int64_t low = first; low < last;) {
        int n = run_from(p, piece, low, last);
        update_run(s + (low - first), theta + (low - first), weight_at(p, *piece, low),
                   residual ? residual + low : NULL, factor, n, p->dtype[*piece]);
        low += n;
    }
}

/* ---- stores past the caches: of what nobody reads soon, so that its old contents need not be fetched first ---- */

enum { PAST_CACHES = 1 << 20 };  /* elements of a vector from which on no cache keeps it for long */

static inline void store(char *to, const float *from, int n, int past_caches) {
#if defined(__AVX2__)
    if (past_caches && (uintptr_t)to % 32 == 0 && n % 8 == 0) {
        for (int i = 0; i < n; i += 8) _mm256_stream_ps((float *)(void *)to + i, _mm256_loadu_ps(from + i));
        return;
    }
#endif
    (void)past_caches;
    memcpy(to, from, 4 * (size_t)n);
}

/* After such stores, before another thread reads. */
static inline void finish_stores(void) {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

/* ---- threads: each works on some of the blocks ---- */

typedef struct {
    const void *call;     /* what all threads share */
    int64_t first, last;  /* the blocks of this one */
    uint64_t digest;      /* what it found */
    int64_t bad;
    double squares;
} Share;

/* Cuts the work into `count` shares and runs `work` on each, on one of them in this thread. */
static inline void share_among(int count, void *(*work)(void *), const void *call, int64_t blocks, Share *shares) {
    pthread_t started[MAX_THREADS];
    char runs[MAX_THREADS];
    for (int k = 0; k < count; k++)
        shares[k] = (Share){.call = call, .first = blocks * k / count, .last = blocks * (k + 1) / count, .bad = -1};
    for (int k = 1; k < count; k++) runs[k] = pthread_create(&started[k], NULL, work, &shares[k]) == 0;
    work(&shares[0]);
    for (int k = 1; k < count; k++) {
        if (runs[k]) pthread_join(started[k], NULL);
        else work(&shares[k]);  /* there was no thread to be had */
    }
}

/* As many shares as are worth a thread. -> how many there were */
static inline int share_out(void *(*work)(void *), const void *call, int64_t blocks, int threads, Share *shares) {
    /* Starting a thread costs as much as some dozens of blocks. */
    int count = (int)smaller(smaller(threads, blocks / 64 + 1), MAX_THREADS);
    if (count < 1) count = 1;
    share_among(count, work, call, blocks, shares);
    return count;
}

#endif
