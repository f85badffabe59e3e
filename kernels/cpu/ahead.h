/* What a site has sent and θ has not got yet, v, of which the site's weights run ahead: they are cast(θ − β·v). */

#ifndef LOCO_AHEAD_H
#define LOCO_AHEAD_H

#include "flat.h"

/* θ − β·v of one block of `n` elements. `offsets`: NULL for `count` = n elements one after the other. */
static inline void run_ahead(float *restrict ahead, const float *restrict theta, int n, int64_t count,
                             const uint8_t *offsets, const float *values, float beta) {
    if (!offsets && count)
        for (int i = 0; i < n; i++) ahead[i] = theta[i] - beta * values[i];
    else {
        memcpy(ahead, theta, 4 * (size_t)n);
        for (int64_t k = 0; k < count; k++) ahead[offsets[k]] -= beta * values[k];
    }
}

/* The same, of block `b` of all entries. `sent`: NULL if there is no v. */
static inline void run_ahead_of(float *ahead, const float *theta, int n, const Entries *sent, int64_t b, float beta) {
    if (!sent) memcpy(ahead, theta, 4 * (size_t)n);
    else if (!sent->starts) run_ahead(ahead, theta, n, n, NULL, sent->values + b * BLOCK, beta);
    else {
        int64_t begin = sent->starts[b], count = sent->starts[b + 1] - begin;
        run_ahead(ahead, theta, n, count, sent->offsets + begin, sent->values + begin, beta);
    }
}

#endif
