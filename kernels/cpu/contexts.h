/* What sender and receiver of a frame both see of a weight, and the coder: as in ../reference_tight.py. */

#ifndef LOCO_CONTEXTS_H
#define LOCO_CONTEXTS_H

#include "flat.h"

enum { PLACES = 16, MOST_CONTEXTS = 8 * PLACES * 8, BUCKETS = 56, ESCAPE = 2 * BUCKETS, SYMBOLS = 2 * BUCKETS + 1 };

typedef struct {
    int mantissa, emin;
    uint32_t reach, least;
    int shift, levels, pulls, e0, d0, m0;
} Frame;

static inline int contexts_in(const Frame *f) { return (8 >> f->levels) * PLACES << f->pulls; }

static inline int32_t at_least(int32_t a, int32_t b) { return a > b ? a : b; }
static inline int32_t at_most(int32_t a, int32_t b) { return a < b ? a : b; }

/* One weight. */
typedef struct {
    int32_t exponent, distance, step, octave;
    uint32_t negative;  /* 1: s < 0 goes to the nearest border */
} View;

static inline __attribute__((always_inline)) View view(float theta, int mantissa, int emin) {
    View v;
    int32_t u = (int32_t)bits(theta), field = (u >> 23) & 255, mant = (u & 0x7FFFFF) | (int32_t)choose(field, 0x800000, 0);
    v.exponent = at_least(field, 1);
    int32_t drop = at_most(23 - mantissa + at_least(emin + 127 - v.exponent, 0), 25);
    v.step = 1 << drop;
    int32_t past = (v.step >> 1) - (mant & (v.step - 1));
    v.distance = past < 0 ? -past : past;
    v.negative = (uint32_t)(past > 0) ^ ((uint32_t)u >> 31);
    /* t ≤ 2^24 is a float, whose exponent is ⌊log2 t⌋; of 0 it is −127. */
    v.octave = v.exponent + at_least((int32_t)(bits((float)v.distance) >> 23) - 127, -1);
    return v;
}

static inline __attribute__((always_inline)) void contexts_run(const float *restrict theta, const float *restrict m,
                                                               int n, const Frame *f, int mantissa, int emin, int pulls,
                                                               uint16_t *restrict context) {
    int32_t e0 = f->e0, d0 = f->d0, m0 = f->m0, levels = f->levels;
    for (int i = 0; i < n; i++) {
        View v = view(theta[i], mantissa, emin);
        int32_t level = at_most(at_least(v.exponent - e0, 0), 7) >> levels;
        int32_t c = level * PLACES + at_most(at_least(v.octave - d0, 0), PLACES - 1);
        if (pulls) {
            uint32_t u = bits(m[i]);
            int32_t size = at_most(at_least((int32_t)(u >> 23 & 255) - m0, 0), 3) >> (3 - pulls);
            c = c << pulls | size << 1 | (int32_t)((u >> 31) == v.negative);
        }
        context[i] = (uint16_t)c;
    }
}

/* The contexts of a block. */
static inline void contexts_of(const float *theta, const float *m, int n, const Frame *f, uint16_t *context) {
    /* For the usual gate the compiler knows how many bits are dropped. */
    if (f->mantissa == 7 && f->emin == -126) {
        if (f->pulls == 3) contexts_run(theta, m, n, f, 7, -126, 3, context);
        else if (f->pulls == 0) contexts_run(theta, m, n, f, 7, -126, 0, context);
        else contexts_run(theta, m, n, f, 7, -126, f->pulls, context);
    } else contexts_run(theta, m, n, f, f->mantissa, f->emin, f->pulls, context);
}

static inline int level_of(int context, const Frame *f) { return context >> f->pulls >> 4; }

/* What the gate lets pass towards one border, in 2^shift half ulps. */
static inline int64_t least_sent(View v, int near, const Frame *f) {
    /* To the far border: step − t. Which one it is nobody can foretell, so there is no branch on it. */
    int32_t far = near - 1, away = (v.distance ^ far) - far + (far & v.step);
    int64_t least = (int64_t)((uint64_t)away * f->reach >> 7);
    least = least > (int64_t)f->least ? least : (int64_t)f->least;
    return (least + ((int64_t)1 << f->shift) - 1) >> f->shift;
}

/* 2^(exponent − 151): half an FP32 ulp. */
static inline double half_ulp(int power) {
    uint64_t u = (uint64_t)(power + 1023) << 52;
    double x;
    memcpy(&x, &u, 8);
    return x;
}

/* |value| in half ulps if it is a whole number below 2^52, else −1. */
static inline int64_t multiple(float value, int exponent) {
    double scaled = (double)from_bits(bits(value) & 0x7FFFFFFF) * half_ulp(151 - exponent);
    if (!(scaled < 0x1p52)) return -1;
    int64_t whole = (int64_t)scaled;
    return (double)whole == scaled ? whole : -1;
}

/* The bucket of x, two to an octave, and how many of its bits that leaves. */
static inline int bucket(uint64_t x, int *plain) {
    *plain = at_least(62 - __builtin_clzll(x | 1), 0);
    return 2 * *plain + (int)(x >> *plain);
}

/* ---- probabilities ---- */

/* By their codes, in 1/65536: the odds are 2^((code − 128) / 8). */
static inline uint32_t probability(int code) {
    static const uint64_t step[8] = {65536, 71468, 77936, 84990, 92682, 101070, 110218, 120194};  /* 2^(j/8) */
    if (code == 0) return 0;
    int c = code < 128 ? 128 - code : code - 128;
    uint64_t odds = step[c % 8] << (c / 8);
    uint32_t p = (uint32_t)((odds << 16) / (odds + 65536));
    return code < 128 ? 65536 - p : p;
}

/* ---- the coder: states that take turns, each in LOW … 2^63 ---- */

enum { LANES = 4 };
#define LOW ((uint64_t)1 << 31)

/* Where a symbol lies in a power of two, and what makes a multiplication of the division by its share. */
typedef struct {
    uint64_t reciprocal;  /* ⌈2^(63 + shift) / share⌉ */
    uint64_t full;        /* a state from here on has no room for it, and gives up a word */
    uint32_t start, share, others, shift;  /* others: their shares together */
} Slot;

static inline Slot slot(uint32_t start, uint32_t share, int scale) {
    uint64_t all = (uint64_t)1 << 63;
    uint32_t shift = 0;
    while ((uint32_t)1 << shift < share) shift++;
    return (Slot){(all / share << shift) + ((all % share << shift) + share - 1) / share,
                  (uint64_t)share << (63 - scale), start, share, ((uint32_t)1 << scale) - share, shift};
}

/* x / share of an x below 2^63, exactly: what the reciprocal is too large by is less than share ≤ 2^shift, so x times
 * that stays below 2^(63 + shift). */
static inline uint64_t divided(uint64_t x, const Slot *by) {
#if defined(__SIZEOF_INT128__)
    return (uint64_t)((unsigned __int128)(2 * x) * by->reciprocal >> 64) >> by->shift;
#else
    return x / by->share;
#endif
}

/* Puts one symbol in front of those that a state already holds. */
static inline void put(uint64_t *state, uint32_t **words, const Slot *at) {
    uint64_t x = *state;
    if (x >= at->full) {
        *--*words = (uint32_t)x;
        x >>= 32;
    }
    *state = x + divided(x, at) * at->others + at->start;
}

#endif
