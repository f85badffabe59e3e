/* Apply, steps 5 to 8, in place: the residual, the mean, the outer step, the weights. */

#include "flat.h"

typedef struct {
    int64_t n;
    float *anchor, *momentum, *residual;
    Pieces pieces;
    Entries own, returned;
    int64_t contributions;
    const Entries *contribution;
    float sites, lr, mu;
    int nesterov;
} Apply;

/* Step 5 of one block: what is sent does not stay, and what comes back to this site alone does. */
static void take_sent(float *restrict s, const Entries *own, const Entries *returned, int64_t block, int n) {
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
static void add(float *restrict total, const Entries *c, int64_t block, int n) {
    const float *values = c->values;
    if (!c->starts)
        for (int i = 0; i < n; i++) total[i] += values[block * BLOCK + i];
    else
        for (int64_t k = c->starts[block]; k < c->starts[block + 1]; k++) total[c->offsets[k]] += values[k];
}

/* Step 7 of one block. */
static void outer_step(float *restrict theta, float *restrict m, const float *restrict total, int n, float sites,
                       float lr, float mu, int nesterov) {
    if (!m)
        for (int i = 0; i < n; i++) theta[i] -= lr * (total[i] / sites);
    else if (nesterov)
        for (int i = 0; i < n; i++) {
            float g = total[i] / sites, next = mu * m[i] + g;
            m[i] = next;
            theta[i] -= lr * (g + mu * next);
        }
    else
        for (int i = 0; i < n; i++) {
            float next = mu * m[i] + total[i] / sites;
            m[i] = next;
            theta[i] -= lr * next;
        }
}

/* Step 8 in one piece: w = cast(θ). */
static void write_run(char *restrict w, const float *restrict theta, int n, int dtype, int past_caches) {
    uint16_t *half = (uint16_t *)w;
    if (dtype == FLOAT32) store(w, theta, n, past_caches);
    else if (dtype == BFLOAT16) for (int i = 0; i < n; i++) half[i] = float_to_bf16(theta[i]);
    else for (int i = 0; i < n; i++) half[i] = float_to_fp16(theta[i]);
}

static void write_block(const float *anchor, const Pieces *p, int64_t *piece, int64_t first, int64_t last,
                        int past_caches) {
    for (int64_t low = first; low < last;) {
        int n = run_from(p, piece, low, last);
        write_run(weight_at(p, *piece, low), anchor + low, n, p->dtype[*piece], past_caches);
        low += n;
    }
}

static double sum_of_squares(const float *x, int n) {
    double sums[8] = {0}, sum = 0;
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += (double)x[i + j] * (double)x[i + j];
    for (; i < n; i++) sum += (double)x[i] * (double)x[i];
    for (int j = 0; j < 8; j++) sum += sums[j];
    return sum;
}

static void *apply_share(void *argument) {
    Share *share = argument;
    const Apply *c = share->call;
    float s[BLOCK], total[BLOCK];
    int64_t reading = piece_at(&c->pieces, share->first * BLOCK), writing = reading;
    int past_caches = !c->residual && c->n >= PAST_CACHES;  /* with a residual they have just been read */
    for (int64_t b = share->first; b < share->last; b++) {
        int64_t first = b * BLOCK, last = smaller(first + BLOCK, c->n);
        int n = (int)(last - first);
        if (c->residual) {
            update_block(s, c->anchor, c->residual, &c->pieces, &reading, first, last);
            take_sent(s, &c->own, &c->returned, b, n);
            memcpy(c->residual + first, s, 4 * (size_t)n);
            share->squares += sum_of_squares(s, n);
        }
        memset(total, 0, sizeof total);
        for (int64_t r = 0; r < c->contributions; r++) add(total, &c->contribution[r], b, n);
        outer_step(c->anchor + first, c->momentum ? c->momentum + first : NULL, total, n, c->sites, c->lr, c->mu,
                   c->nesterov);
        write_block(c->anchor, &c->pieces, &writing, first, last, past_caches);
    }
    finish_stores();
    return NULL;
}

/* `entries`: this site's own, what is returned (with no starts: nothing), then each contribution.
 * -> the sum of the new residual's squares
 * Nothing here can fail: the other sites already count on this round. */
double loco_apply(int64_t n, float *anchor, float *momentum, float *residual, int64_t pieces, const int64_t *address,
                  const int64_t *start, const int32_t *dtype, int64_t contributions, const Entries *entries,
                  float sites, float lr, float mu, int nesterov, int threads) {
    Apply call = {n, anchor, momentum, residual, {pieces, address, start, dtype}, entries[0], entries[1],
                  contributions, entries + 2, sites, lr, mu, nesterov};
    Share shares[MAX_THREADS];
    int count = share_out(apply_share, &call, blocks_of(n), threads, shares);
    double squares = 0;
    for (int k = 0; k < count; k++) squares += shares[k].squares;
    return squares;
}

static void *write_share(void *argument) {
    Share *share = argument;
    const Apply *c = share->call;
    int64_t piece = piece_at(&c->pieces, share->first * BLOCK);
    write_block(c->anchor, &c->pieces, &piece, share->first * BLOCK, smaller(share->last * BLOCK, c->n),
                c->n >= PAST_CACHES);
    finish_stores();
    return NULL;
}

/* Step 8 alone. */
void loco_write_weights(int64_t n, float *anchor, int64_t pieces, const int64_t *address, const int64_t *start,
                        const int32_t *dtype, int threads) {
    Apply call = {.n = n, .anchor = anchor, .pieces = {pieces, address, start, dtype}};
    Share shares[MAX_THREADS];
    share_out(write_share, &call, blocks_of(n), threads, shares);
}
