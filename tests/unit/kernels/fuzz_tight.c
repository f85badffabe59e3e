/* Gives loco_unpack and loco_check_blocks bytes that no encoder wrote, in memory of exactly the size promised, and
 * looks at what they accept. Built with the sanitizers and run by test_tight_hostile.py: cases, seed.
 * Prints how many cases there were, and how many of each kind were accepted. */

#include <math.h>

#include "fuzz.h"

int64_t loco_pack_room(int64_t, int64_t);
int64_t loco_pack(int64_t, const float *, const float *, const int64_t *, const uint8_t *, const float *, int, int, uint32_t,
                  uint32_t, int, uint8_t *);
int loco_unpack(const uint8_t *, int64_t, int64_t, int64_t, const float *, const float *, int, int64_t *, uint8_t *, float *);
int loco_check_blocks(int64_t, const char *, int, int64_t, const uint8_t *, const char *, int64_t, int, int64_t *);

/* ---- frames to start from ---- */

typedef struct {
    int64_t n, count, size;
    float *anchor, *momentum;  /* momentum may be NULL */
    uint8_t *frame;
} Sample;

enum { SAMPLES = 96, MANY_PARTS = 4 };  /* the last four have more than one part */
static Sample samples[SAMPLES];

static void make_sample(Sample *s, int which) {
    static const int formats[4][2] = {{7, -126}, {10, -14}, {3, -6}, {2, -14}};
    static const int64_t sizes[] = {1, 3, 40, 64, 100, 255, 256, 257, 300, 520};
    const int *format = formats[one_in(2) ? 0 : below(4)];
    int large = which >= SAMPLES - MANY_PARTS;
    s->n = large ? (1 << 18) + 1 + 300 * which : sizes[which % 10];
    int64_t blocks = (s->n + 255) / 256;
    s->anchor = malloc(4 * (size_t)s->n);
    s->momentum = which % 3 ? malloc(4 * (size_t)s->n) : NULL;
    int64_t *starts = malloc(8 * (size_t)(blocks + 1));
    uint8_t *offsets = malloc((size_t)s->n);
    float *values = malloc(4 * (size_t)s->n);
    uint32_t chance = large ? 1u << 21 : which % 5 == 0 ? UINT32_MAX : 1u << 29;
    s->count = 0;
    for (int64_t i = 0; i < s->n; i++) {
        s->anchor[i] = (float)(int32_t)draw() * 0x1p-36f;
        if (s->momentum) s->momentum[i] = (float)(int32_t)draw() * 0x1p-50f;
        if (i % 256 == 0) starts[i / 256] = s->count;
        if (draw() > chance && i) continue;
        offsets[s->count] = (uint8_t)i;
        uint32_t theta, power;
        float half_ulp;
        memcpy(&theta, &s->anchor[i], 4);
        power = theta >> 23 & 255;
        power = (power > 24 ? power - 24 : 1) << 23;
        memcpy(&half_ulp, &power, 4);
        values[s->count++] = (float)((int32_t)draw() >> below(32)) * (one_in(40) ? 0x1p-70f : half_ulp);
    }
    starts[blocks] = s->count;
    uint8_t *room = malloc((size_t)loco_pack_room(s->n, s->count));
    s->size = loco_pack(s->n, s->anchor, s->momentum, starts, offsets, values, format[0], format[1], 256,
                        which % 7 ? 0 : 1000, 1, room);
    demand(s->size > 0, "no sample");
    s->frame = malloc((size_t)s->size);
    memcpy(s->frame, room, (size_t)s->size);
    free(room), free(starts), free(offsets), free(values);
}

/* ---- what a peer may make of them ---- */

static uint8_t *hostile(const Sample *s, int64_t *size) {
    const Sample *other = &samples[below(SAMPLES - MANY_PARTS)];
    uint8_t room[1 << 14], *at = room, *bytes;
    int64_t k = s->size;
    if (s->n > 1000) at = malloc((size_t)k + 64);
    else demand(k + 64 + other->size <= (int64_t)sizeof room, "a sample larger than its room");
    memcpy(at, s->frame, (size_t)k);
    switch (below(10)) {
    case 0: k = below(k) + 1; break;                                                            /* cut off */
    case 1: for (int64_t more = below(64) + 1; more; more--) at[k++] = (uint8_t)draw(); break;  /* too long */
    case 2: memcpy(at + k / 2, other->frame, (size_t)(other->size < k / 2 ? other->size : k / 2)); break;
    case 9: memcpy(at, other->frame, (size_t)below(other->size < k ? other->size : k)); break;   /* another's head */
    case 3: for (int64_t i = below(k); i < k; i++) at[i] = (uint8_t)draw(); break;              /* noise to the end */
    case 4:
        for (int64_t i = below(k), stop = i + 1 + below(8); i < k && i < stop; i++) at[i] = one_in(2) ? 0 : 0xFF;
        break;
    case 5: at[below(k < 21 ? k : 20)] = (uint8_t)draw(); break;  /* in the head */
    default: for (int64_t flips = 1 + below(4); flips; flips--) at[below(k)] ^= (uint8_t)(1 << below(8));
    }
    bytes = exactly((size_t)k);
    memcpy(bytes, at, (size_t)k);
    if (at != room) free(at);
    *size = k;
    return bytes;
}

/* -> whether these are entries of a vector of n elements; written to be seen to be right */
static int in_order(int64_t n, int64_t count, const int64_t *starts, const uint8_t *offsets, const char *values) {
    int64_t blocks = (n + 255) / 256;
    if (starts[0] || starts[blocks] != count) return 0;
    for (int64_t b = 0; b < blocks; b++) {
        if (starts[b + 1] < starts[b] || starts[b + 1] > starts[b] + 256) return 0;
        if (starts[b + 1] > count) return 0;
    }
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t j = starts[b]; j < starts[b + 1]; j++) {
            float value;
            memcpy(&value, values + 4 * j, 4);
            if (j > starts[b] && offsets[j] <= offsets[j - 1]) return 0;
            if (256 * b + offsets[j] >= n || !isfinite(value)) return 0;
        }
    return 1;
}

static int try_unpack(void) {
    const Sample *s = &samples[one_in(20000) ? SAMPLES - 1 - below(MANY_PARTS) : below(SAMPLES - MANY_PARTS)];
    const Sample *theirs = one_in(8) ? &samples[below(SAMPLES - MANY_PARTS)] : s;  /* another model */
    int64_t n = theirs->n, blocks = (n + 255) / 256, size;
    int64_t count = one_in(8) ? 1 + below(n) : s->count < n ? s->count : n;
    const float *momentum = one_in(16) ? NULL : theirs->momentum;
    uint8_t *body = hostile(s, &size), *offsets = exactly((size_t)count);
    int64_t *starts = exactly(8 * (size_t)(blocks + 1));
    float *values = exactly(4 * (size_t)count);
    int threads = one_in(64) ? 3 : 1;
    int fine = loco_unpack(body, size, count, n, theirs->anchor, momentum, threads, starts, offsets, values) == 0;
    if (fine) demand(in_order(n, count, starts, offsets, (const char *)values), "unpack made no entries");
    free(body), free(offsets), free(starts), free(values);
    return fine;
}

static int try_check(void) {
    int64_t n = below(1100), blocks = (n + 255) / 256, sum = 0;
    int wide = one_in(2), step = (int)below(5), negative = 0;
    char *counts = exactly((size_t)blocks << wide);
    for (int64_t b = 0; b < blocks; b++) {
        int16_t count = (int16_t)(wide && one_in(40) ? draw() : one_in(4) ? below(257) : below(8));
        if (wide) memcpy(counts + 2 * b, &count, 2);
        else counts[b] = (char)count, count = (uint8_t)count;
        negative |= count < 0 || count > 256;
        sum += count;
    }
    int64_t count = sum < 0 || sum > 4000 || one_in(8) ? below(40) : sum;
    uint8_t *offsets = exactly((size_t)count);
    char *values = exactly(4 * (size_t)count);
    int64_t *starts = exactly(8 * (size_t)(blocks + 1)), *expected = exactly(8 * (size_t)(blocks + 1)), k = 0;
    expected[0] = 0;
    for (int64_t b = 0; b < blocks; b++) {
        int16_t of_block;
        if (wide) memcpy(&of_block, counts + 2 * b, 2); else of_block = (uint8_t)counts[b];
        expected[b + 1] = expected[b] + of_block;
        for (int64_t j = 0; j < of_block && k < count; j++) offsets[k++] = (uint8_t)(of_block > 60 ? j : j * step);
    }
    for (; k < count; k++) offsets[k] = (uint8_t)k;
    for (int64_t j = 0; j < count; j++) {
        uint32_t value = one_in(2000) ? 0x7F800000 : draw() & 0xBFFFFFFF;
        memcpy(values + 4 * j, &value, 4);
    }
    for (int64_t damage = one_in(2) ? below(3) : 0; damage && count; damage--) offsets[below(count)] = (uint8_t)draw();
    int fine = loco_check_blocks(blocks, counts, wide, count, offsets, values, n, one_in(64) ? 3 : 1, starts);
    demand(fine == (!negative && in_order(n, count, expected, offsets, values)), "check_blocks is wrong");
    if (fine) demand(!memcmp(starts, expected, 8 * (size_t)(blocks + 1)), "check_blocks found other starts");
    free(counts), free(offsets), free(values), free(starts), free(expected);
    return fine;
}

int main(int argc, char **argv) {
    int64_t cases = argc > 1 ? strtoll(argv[1], NULL, 10) : 100000, unpacked = 0, checked = 0;
    seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    for (int k = 0; k < SAMPLES; k++) make_sample(&samples[k], k);
    for (int64_t k = 0; k < cases; k++)
        if (k % 4) unpacked += try_unpack();
        else checked += try_check();
    printf("%" PRId64 " cases, %" PRId64 " unpacked, %" PRId64 " checked\n", cases, unpacked, checked);
    for (int k = 0; k < SAMPLES; k++) free(samples[k].anchor), free(samples[k].momentum), free(samples[k].frame);
    return 0;
}
