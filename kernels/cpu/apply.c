/* Apply, steps 5 to 8, in place: the residual, the mean, the outer step, the weights. */

#include "steps.h"

static void *apply_share(void *argument) {
    Share *share = argument;
    const Apply *c = share->call;
    int64_t reading = piece_at(&c->pieces, share->first * BLOCK), writing = reading;
    int past_caches = !c->residual && c->n >= PAST_CACHES;  /* with a residual they have just been read */
    for (int64_t b = share->first; b < share->last; b++) {
        int64_t first = b * BLOCK, last = smaller(first + BLOCK, c->n);
        int n = (int)(last - first);
        if (c->residual) {
            float s[BLOCK];
            update_block(s, c->anchor + first, c->residual, c->factor, &c->pieces, &reading, first, last);
            take_sent(s, c->own, c->returned, b, n);
            memcpy(c->residual + first, s, 4 * (size_t)n);
            share->squares += sum_of_squares(s, n);
        }
        take_outer_step(c, b, first, last);
        write_block(c->anchor + first, &c->pieces, &writing, first, last, past_caches);
    }
    finish_stores();
    return NULL;
}

/* `entries`: this site's own, what is returned (with no starts: nothing), then each contribution.
 * -> the sum of the new residual's squares
 * Nothing here can fail: the other sites already count on this round. */
double loco_apply(int64_t n, float *anchor, float *momentum, float *residual, int64_t pieces, const int64_t *address,
                  const int64_t *start, const int32_t *dtype, int64_t contributions, const Entries *entries,
                  float factor, float divisor, float lr, float mu, int nesterov, int threads) {
    Apply call = {n, anchor, momentum, residual, {pieces, address, start, dtype}, entries, entries + 1,
                  contributions, entries + 2, factor, divisor, lr, mu, nesterov};
    Share shares[MAX_THREADS];
    int count = share_out(apply_share, &call, blocks_of(n), threads, shares);
    double squares = 0;
    for (int k = 0; k < count; k++) squares += shares[k].squares;
    return squares;
}
