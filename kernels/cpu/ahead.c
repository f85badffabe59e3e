/* What a site has sent and θ has not got yet, of which it runs ahead: see collect_sent and send_off of ../reference.py. */

#include "flat.h"

typedef struct {
    int64_t n;
    const float *anchor;
    float *residual;
    Pieces pieces;
    Entries sent;
    float beta;
    int collects;
} Ahead;

static float cast_and_back(float x, int dtype) {
    if (dtype == BFLOAT16) return bf16_to_float(float_to_bf16(x));
    if (dtype == FLOAT16) return fp16_to_float(float_to_fp16(x));
    return x;
}

static float read_weight(const char *w, int dtype) {
    uint16_t half;
    float full;
    if (dtype == FLOAT32) { memcpy(&full, w, 4); return full; }
    memcpy(&half, w, 2);
    return dtype == BFLOAT16 ? bf16_to_float(half) : fp16_to_float(half);
}

static void write_weight(char *w, float x, int dtype) {
    uint16_t half = dtype == BFLOAT16 ? float_to_bf16(x) : float_to_fp16(x);
    if (dtype == FLOAT32) memcpy(w, &x, 4);
    else memcpy(w, &half, 2);
}

static void *ahead_share(void *argument) {
    Share *share = argument;
    const Ahead *c = share->call;
    const Entries *sent = &c->sent;
    int64_t piece = piece_at(&c->pieces, share->first * BLOCK);
    for (int64_t b = share->first; b < share->last; b++) {
        int64_t first = b * BLOCK, last = smaller(first + BLOCK, c->n);
        int64_t k = sent->starts ? sent->starts[b] : first, end = sent->starts ? sent->starts[b + 1] : last;
        for (; k < end; k++) {
            int64_t i = sent->starts ? first + sent->offsets[k] : k;
            while (c->pieces.start[piece + 1] <= i) ++piece;
            int dtype = c->pieces.dtype[piece];
            char *w = weight_at(&c->pieces, piece, i);
            float theta = c->anchor[i], v = sent->values[k], scaled = c->beta * v, e = c->residual[i];
            if (c->collects) {
                c->residual[i] = (cast_and_back(theta - scaled, dtype) - read_weight(w, dtype)) + e;
                write_weight(w, theta, dtype);
            } else {
                float left = e - v;
                c->residual[i] = left;
                share->squares += (double)left * (double)left - (double)e * (double)e;
                write_weight(w, theta - scaled, dtype);
            }
        }
    }
    return NULL;
}

/* -> by how much the sum of the residual's squares has changed, if nothing is collected */
double loco_ahead(int64_t n, const float *anchor, float *residual, int64_t pieces, const int64_t *address,
                  const int64_t *start, const int32_t *dtype, const Entries *sent, float beta, int collects,
                  int threads) {
    Ahead call = {n, anchor, residual, {pieces, address, start, dtype}, *sent, beta, collects};
    Share shares[MAX_THREADS];
    int count = share_out(ahead_share, &call, blocks_of(n), threads, shares);
    double squares = 0;
    for (int k = 0; k < count; k++) squares += shares[k].squares;
    return squares;
}
