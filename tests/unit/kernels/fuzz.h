/* What the programs that read hostile bytes share: numbers by chance, memory that is guarded, and what must hold. */

#ifndef LOCO_FUZZ_H
#define LOCO_FUZZ_H

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t seed;

static uint32_t draw(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}
static int64_t below(int64_t n) { return (int64_t)(((uint64_t)draw() * (uint64_t)n) >> 32); }
static int one_in(int n) { return below(n) == 0; }
static void *exactly(size_t size) { return malloc(size ? size : 1); }  /* what lies beyond is guarded */

static void demand(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "%s\n", what);
    abort();
}

#endif
