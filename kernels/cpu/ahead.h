/* What a site has sent and θ has not got yet, of which the site's weights run ahead. */

#ifndef LOCO_AHEAD_H
#define LOCO_AHEAD_H

#include "flat.h"

static inline float cast_and_back(float x, int dtype) {
    if (dtype == BFLOAT16) return bf16_to_float(float_to_bf16(x));
    if (dtype == FLOAT16) return fp16_to_float(float_to_fp16(x));
    return x;
}

static inline float read_weight(const char *w, int dtype) {
    uint16_t half;
    float full;
    if (dtype == FLOAT32) { memcpy(&full, w, 4); return full; }
    memcpy(&half, w, 2);
    return dtype == BFLOAT16 ? bf16_to_float(half) : fp16_to_float(half);
}

static inline void write_weight(char *w, float x, int dtype) {
    uint16_t half = dtype == BFLOAT16 ? float_to_bf16(x) : float_to_fp16(x);
    if (dtype == FLOAT32) memcpy(w, &x, 4);
    else memcpy(w, &half, 2);
}

static inline int is_finite(float x) { return (bits(x) & 0x7FFFFFFF) < 0x7F800000; }

/* Of the block that begins with the element `first`: e = (float(cast(θ − β·v)) − float(w)) + e, or 0 + e if that is
 * infinite or NaN; w = cast(θ). `offsets`: NULL for `count` elements one after the other. -> the first that was, or
 * −1 */
static inline int64_t collect_sent(const float *anchor, float *residual, const Pieces *p, int64_t *piece, int64_t first,
                                int64_t count, const uint8_t *offsets, const float *values, float beta) {
    int64_t bad = -1;
    for (int64_t k = 0; k < count; k++) {
        int64_t i = first + (offsets ? offsets[k] : k);
        while (p->start[*piece + 1] <= i) ++*piece;
        int dtype = p->dtype[*piece];
        char *w = weight_at(p, *piece, i);
        float theta = anchor[i], scaled = beta * values[k];
        float s = (cast_and_back(theta - scaled, dtype) - read_weight(w, dtype)) + residual[i];
        if (!is_finite(s) && bad < 0) bad = i;
        residual[i] = is_finite(s) ? s : 0.0f + residual[i];
        write_weight(w, theta, dtype);
    }
    return bad;
}

/* e = e − v, w = cast(θ − β·v) */
static inline void send_off(const float *anchor, float *residual, const Pieces *p, int64_t *piece, int64_t first,
                            int64_t count, const uint8_t *offsets, const float *values, float beta) {
    for (int64_t k = 0; k < count; k++) {
        int64_t i = first + (offsets ? offsets[k] : k);
        while (p->start[*piece + 1] <= i) ++*piece;
        float v = values[k], scaled = beta * v;
        residual[i] -= v;
        write_weight(weight_at(p, *piece, i), anchor[i] - scaled, p->dtype[*piece]);
    }
}

#endif
