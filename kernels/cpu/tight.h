/* The layout of a frame of the tight code, as in ../reference_tight.py: what pack.c writes and unpack.c reads. */

#ifndef LOCO_TIGHT_H
#define LOCO_TIGHT_H

#include <stdlib.h>

#include "contexts.h"

enum { PART = 1 << 18, PART_BLOCKS = PART / BLOCK, HEAD = 20, SIZES = 12, STATES = 8 * LANES, BITMAP = (SYMBOLS + 7) / 8 };

static inline int64_t parts_of(int64_t n) { return (n + PART - 1) / PART; }

static inline void put16(uint8_t *at, uint32_t x) { at[0] = (uint8_t)x; at[1] = (uint8_t)(x >> 8); }
static inline void put32(uint8_t *at, uint32_t x) { put16(at, x); put16(at + 2, x >> 16); }
static inline uint32_t get16(const uint8_t *at) { return at[0] | (uint32_t)at[1] << 8; }
static inline uint32_t get32(const uint8_t *at) { return get16(at) | get16(at + 2) << 16; }

/* Of 4096, for each level: how many belong to a symbol, and where they start. */
typedef struct {
    uint16_t share[8][SYMBOLS], start[8][SYMBOLS];
} Tables;

static inline void add_starts(Tables *t, int levels) {
    for (int l = 0; l < levels; l++)
        for (int s = 0, start = 0; s < SYMBOLS; start += t->share[l][s++]) t->start[l][s] = (uint16_t)start;
}

#endif
