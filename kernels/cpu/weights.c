/* The weights alone: step 8, and whether they are still what it made of them. */

#include "ahead.h"
#include "steps.h"

static void *write_share(void *argument) {
    Share *share = argument;
    const Apply *c = share->call;
    int64_t piece = piece_at(&c->pieces, share->first * BLOCK);
    int64_t first = share->first * BLOCK, last = smaller(share->last * BLOCK, c->n);
    write_block(c->anchor + first, &c->pieces, &piece, first, last, c->n >= PAST_CACHES);
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

typedef struct {
    int64_t n;
    const float *anchor;
    Pieces pieces;
    const Entries *sent;  /* NULL: nothing */
    float beta;
} Check;

/* Whether all weights of a run are the cast of what is expected, in values: +0 equals −0, and NaN nothing. */
static inline int are_casts(const float *restrict expected, const char *restrict w, int n, int dtype) {
    const float *full = (const float *)w;
    const uint16_t *half = (const uint16_t *)w;
    int equal = 1;
    if (dtype == FLOAT32) for (int i = 0; i < n; i++) equal &= expected[i] == full[i];
    else if (dtype == BFLOAT16)
        for (int i = 0; i < n; i++) equal &= bf16_to_float(float_to_bf16(expected[i])) == bf16_to_float(half[i]);
    else for (int i = 0; i < n; i++) equal &= fp16_to_float(float_to_fp16(expected[i])) == fp16_to_float(half[i]);
    return equal;
}

static void *check_share(void *argument) {
    Share *share = argument;
    const Check *c = share->call;
    int64_t piece = piece_at(&c->pieces, share->first * BLOCK);
    for (int64_t b = share->first; b < share->last && share->bad < 0; b++) {
        int64_t first = b * BLOCK, last = smaller(first + BLOCK, c->n);
        float expected[BLOCK];
        run_ahead_of(expected, c->anchor + first, (int)(last - first), c->sent, b, c->beta);
        for (int64_t low = first; low < last && share->bad < 0;) {
            int n = run_from(&c->pieces, &piece, low, last), dtype = c->pieces.dtype[piece];
            const char *w = weight_at(&c->pieces, piece, low);
            if (!are_casts(expected + (low - first), w, n, dtype)) share->bad = low;
            low += n;
        }
    }
    return NULL;
}

/* -> the first run of weights, by its first position, that are not all cast(θ − β·v); −1 if all are. `sent`: whether
 * there is a v. */
int64_t loco_first_changed(int64_t n, const float *anchor, int64_t pieces, const int64_t *address,
                           const int64_t *start, const int32_t *dtype, int sent, const Entries *entries, float beta,
                           int threads) {
    Check call = {n, anchor, {pieces, address, start, dtype}, sent ? entries : NULL, beta};
    Share shares[MAX_THREADS];
    int count = share_out(check_share, &call, blocks_of(n), threads, shares);
    for (int k = 0; k < count; k++)
        if (shares[k].bad >= 0) return shares[k].bad;
    return -1;
}
