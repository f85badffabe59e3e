/* Steps 5 to 8 of a block: the residual, the mean, the outer step, the weights. */

#ifndef LOCO_STEPS_H
#define LOCO_STEPS_H

#include "flat.h"

typedef struct {
    int64_t n;
    float *anchor, *momentum, *residual;
    Pieces pieces;
    const Entries *own, *returned;
    int64_t contributions;
    const Entries *contribution;
    float factor, divisor, lr, mu;
    int nesterov;
} Apply;

/* Step 5 of one block: what is sent does not stay, and what comes back to this site alone does. */
static inline void take_sent(float *restrict s, const Entries *own, const Entries *returned, int64_t block, int n) {
    if (!own->starts) memset(s, 0, 4 * (size_t)n);
    else if (!returned->starts || returned->starts[block] == returned->starts[block + 1])
        for (int64_t k = own->starts[block]; k < own->starts[block + 1]; k++) s[own->offsets[k]] -= own->values[k];
    else {
        float sent[BLOCK] = {0};
        for (int64_t k = own->starts[block]; k < own->starts[block + 1]; k++) sent[own->offsets[k]] = own->values[k];
        for (int64_t k = returned->starts[block]; k < returned->starts[block + 1]; k++)
            sent[returned->offsets[k]] -= returned->values[k];
        for (int i = 0; i < n; i++) s[i] -= sent[i];
    }
}

/* Step 6 of one block and one site. Who did not send adds nothing, not even a zero. */
static inline void add(float *restrict total, const Entries *c, int64_t block, int n) {
    const float *values = c->values;
    if (!c->starts)
        for (int i = 0; i < n; i++) total[i] += values[block * BLOCK + i];
    else
        for (int64_t k = c->starts[block]; k < c->starts[block + 1]; k++) total[c->offsets[k]] += values[k];
}

/* Step 7 of one block. */
static inline void outer_step(float *restrict theta, float *restrict m, const float *restrict total, int n, float divisor,
                       float lr, float mu, int nesterov) {
    if (!m)
        for (int i = 0; i < n; i++) theta[i] -= lr * (total[i] / divisor);
    else if (nesterov)
        for (int i = 0; i < n; i++) {
            float g = total[i] / divisor, next = mu * m[i] + g;
            m[i] = next;
            theta[i] -= lr * (g + mu * next);
        }
    else
        for (int i = 0; i < n; i++) {
            float next = mu * m[i] + total[i] / divisor;
            m[i] = next;
            theta[i] -= lr * next;
        }
}

/* Step 8 in one piece: w = cast(θ). */
static inline void write_run(char *restrict w, const float *restrict theta, int n, int dtype, int past_caches) {
    uint16_t *half = (uint16_t *)w;
    if (dtype == FLOAT32) store(w, theta, n, past_caches);
    else if (dtype == BFLOAT16) for (int i = 0; i < n; i++) half[i] = float_to_bf16(theta[i]);
    else for (int i = 0; i < n; i++) half[i] = float_to_fp16(theta[i]);
}

/* Of the elements `first` … `last`, whose θ are given. */
static inline void write_block(const float *theta, const Pieces *p, int64_t *piece, int64_t first, int64_t last,
                               int past_caches) {
    for (int64_t low = first; low < last;) {
        int n = run_from(p, piece, low, last);
        write_run(weight_at(p, *piece, low), theta + (low - first), n, p->dtype[*piece], past_caches);
        low += n;
    }
}

static inline double sum_of_squares(const float *x, int n) {
    double sums[8] = {0}, sum = 0;
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += (double)x[i + j] * (double)x[i + j];
    for (; i < n; i++) sum += (double)x[i] * (double)x[i];
    for (int j = 0; j < 8; j++) sum += sums[j];
    return sum;
}

/* Steps 6 and 7, in place, of the block that has the elements `first` … `last`. */
static inline void take_outer_step(const Apply *c, int64_t b, int64_t first, int64_t last) {
    float total[BLOCK] = {0};
    for (int64_t r = 0; r < c->contributions; r++) add(total, &c->contribution[r], b, (int)(last - first));
    outer_step(c->anchor + first, c->momentum ? c->momentum + first : NULL, total, (int)(last - first), c->divisor, c->lr,
               c->mu, c->nesterov);
}

#endif
