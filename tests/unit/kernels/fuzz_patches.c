/* Gives loco_patch_count and loco_patch_unpack bytes that no encoder wrote, in memory of exactly the size promised, and
 * looks at what they accept. Built with the sanitizers and run by test_patches_hostile.py: cases, seed, and one of how
 * many cases has several parts, for several threads.
 * Prints how many cases there were, of how many the changes could be counted, and how many were accepted. */

#include "fuzz.h"

int64_t loco_patch_find(int64_t, int64_t, const int64_t *, const int64_t *, const int64_t *, const int32_t *, int, int, int,
                        int64_t *, char *);
void loco_patch_swap(int64_t, const int64_t *, const int64_t *, const int32_t *, int, int64_t, const int64_t *, char *,
                     int, uint64_t *);
uint64_t loco_patch_digest(const char *, int64_t, int, int);
int64_t loco_patch_room(int64_t, int64_t);
int64_t loco_patch_pack(int64_t, int64_t, const int64_t *, const int64_t *, const int32_t *, int, int, int64_t,
                        const int64_t *, const char *, int, uint8_t *);
int64_t loco_patch_count(const uint8_t *, int64_t, int64_t);
int loco_patch_unpack(const uint8_t *, int64_t, int64_t, int64_t, const int64_t *, const int64_t *, const int32_t *, int, int,
                      int, int64_t *, char *);

static int large_one_in = 2000;

/* ---- weights in up to three pieces, and patches of them to start from ---- */

enum { SAMPLES = 120, MANY_PARTS = 3, MOST_PIECES = 3, PART = 1 << 20 };  /* the last ones have more than one part */

typedef struct {
    int64_t n, size, pieces, address[MOST_PIECES], start[MOST_PIECES + 1];
    int32_t dtype[MOST_PIECES];
    int width, mantissa;
    uint8_t *patch;
} Sample;

static Sample samples[SAMPLES];

static char *weight(const Sample *s, int64_t at) {
    int64_t piece = 0;
    while (s->start[piece + 1] <= at) piece++;
    return (char *)(intptr_t)s->address[piece] + (at - s->start[piece]) * s->width;
}

/* Of a few exponents, or any bits. */
static uint32_t any_weight(const Sample *s, int which) {
    uint32_t all = s->width == 4 ? UINT32_MAX : (1u << 8 * s->width) - 1;
    if (which % 3 == 0) return draw() & all;
    uint32_t exponent = (uint32_t)(below(1 + which % 14) + 2) << s->mantissa;
    return (exponent | (draw() & ((1u << s->mantissa) - 1)) | (one_in(2) ? 1u << (8 * s->width - 1) : 0)) & all;
}

static void make_sample(Sample *s, int which) {
    static const int formats[6][2] = {{4, 23}, {2, 7}, {2, 10}, {1, 3}, {1, 2}, {2, 7}};
    static const int64_t sizes[] = {1, 2, 30, 64, 100, 255, 256, 257, 300, 520};
    int large = which >= SAMPLES - MANY_PARTS;
    s->width = formats[which % 6][0], s->mantissa = formats[which % 6][1];
    s->n = large ? PART + 1 + 300 * (which % 5) : sizes[which % 10];
    s->pieces = s->n < 3 ? 1 : 1 + which % MOST_PIECES;
    for (int64_t k = 0; k <= s->pieces; k++) s->start[k] = k * s->n / s->pieces;
    for (int64_t k = 0; k < s->pieces; k++)
        s->address[k] = (int64_t)(intptr_t)malloc((size_t)((s->start[k + 1] - s->start[k]) * s->width));
    int64_t *positions = malloc(8 * (size_t)s->n), entries = 0;
    char *bits = malloc((size_t)(s->n * s->width));
    uint32_t chance = large ? 1u << 18 : which % 5 == 0 ? UINT32_MAX : 1u << 29;
    for (int64_t i = 0; i < s->n; i++) {
        uint32_t old = any_weight(s, which);
        memcpy(weight(s, i), &old, (size_t)s->width);
        if (draw() > chance && i) continue;
        uint32_t fresh = which % 2 ? old ^ 1 : old ^ (1u << below(8 * s->width));
        memcpy(bits + entries * s->width, &fresh, (size_t)s->width);
        positions[entries++] = i;
    }
    uint8_t *room = malloc((size_t)loco_patch_room(s->n, entries));
    s->size = loco_patch_pack(s->n, s->pieces, s->address, s->start, s->dtype, s->width, s->mantissa, entries, positions,
                              bits, 1, room);
    demand(s->size > 0, "no sample");
    s->patch = malloc((size_t)s->size);
    memcpy(s->patch, room, (size_t)s->size);
    free(room), free(positions), free(bits);
}

/* ---- what a stranger may make of them ---- */

static uint8_t *hostile(const Sample *s, int64_t *size) {
    const Sample *other = &samples[below(SAMPLES - MANY_PARTS)];
    int64_t head = s->n > PART ? 8 : 4, k = s->size, room = k + 64 + other->size;
    uint8_t *at = malloc((size_t)room), *bytes;
    memcpy(at, s->patch, (size_t)k);
    int64_t inside = head + below(k - head);  /* a byte behind the sizes of the parts */
    int64_t rest = k - inside < other->size - 4 ? k - inside : other->size - 4;
    switch (below(12)) {
    case 0: k = inside; break;                                                                  /* cut off */
    case 1: for (int64_t more = below(64) + 1; more; more--) at[k++] = (uint8_t)draw(); break;  /* too long */
    case 2: memcpy(at + inside, other->patch + other->size - rest, (size_t)rest); break;
    case 3: memcpy(at + head, other->patch + 4, (size_t)(rest < k - head ? rest : k - head)); break;  /* another's head */
    case 4: for (int64_t i = inside; i < k; i++) at[i] = (uint8_t)draw(); break;                /* noise to the end */
    case 5: for (int64_t i = inside, stop = i + 1 + below(9); i < k && i < stop; i++) at[i] = one_in(2) ? 0 : 0xFF; break;
    case 6: for (int64_t i = inside; i < k; i++) at[i] = 0xFF; break;
    case 7: at[head + below(k - head < 17 ? k - head : 17)] = (uint8_t)draw(); break;           /* in the head */
    case 8: at[below(head)] ^= (uint8_t)(1 << below(8)); break;                                 /* in the sizes */
    default: for (int64_t flips = 1 + below(3); flips; flips--) at[head + below(k - head)] ^= (uint8_t)(1 << below(8));
    }
    if (head == 4 && !one_in(16)) for (int i = 0; i < 4; i++) at[i] = (uint8_t)((uint64_t)(k - 4) >> 8 * i);
    bytes = exactly((size_t)k);
    memcpy(bytes, at, (size_t)k);
    free(at);
    *size = k;
    return bytes;
}

/* What a patch says is found again, is taken back, and is what a patch of it says. */
static void look_at(const Sample *s, int threads, int64_t entries, const int64_t *positions, char *bits) {
    Sample was = *s;
    size_t width = (size_t)s->width;
    uint64_t change[MOST_PIECES] = {0};
    for (int64_t k = 0; k < s->pieces; k++) {
        size_t bytes = (size_t)(s->start[k + 1] - s->start[k]) * width;
        was.address[k] = (int64_t)(intptr_t)malloc(bytes);
        memcpy((char *)(intptr_t)was.address[k], (char *)(intptr_t)s->address[k], bytes);
    }
    int64_t *found = malloc(8 * (size_t)s->n);
    char *fresh = malloc((size_t)s->n * width);
    loco_patch_swap(s->pieces, s->address, s->start, s->dtype, s->width, entries, positions, bits, 1, change);
    for (int64_t k = 0; k < s->pieces; k++) {
        int64_t n = s->start[k + 1] - s->start[k];
        demand(loco_patch_digest((char *)(intptr_t)s->address[k], n, s->width, threads) -
                       loco_patch_digest((char *)(intptr_t)was.address[k], n, s->width, threads) == change[k],
               "another digest");
    }
    demand(loco_patch_find(s->n, s->pieces, was.address, s->address, s->start, s->dtype, s->width, 0, threads, found, fresh) ==
                   entries && !memcmp(found, positions, 8 * (size_t)entries), "other changes");
    int64_t *merged = exactly(16 * (size_t)entries);
    char *to = exactly(2 * (size_t)entries * width);
    demand(!loco_patch_merge(s->pieces, was.address, s->start, s->dtype, s->width, entries, positions, fresh, entries, positions,
                             bits, threads, merged, to), "changes that are taken back change something");
    int64_t half = below(entries + 1), rest = entries - half, begin = one_in(2) ? 0 : rest;  /* in either order */
    demand(loco_patch_merge(s->pieces, was.address, s->start, s->dtype, s->width, half, positions + begin,
                            fresh + (size_t)begin * width, rest, positions + (begin ? 0 : half),
                            fresh + (begin ? 0 : (size_t)half * width), threads, merged, to) == entries &&
           !memcmp(merged, positions, 8 * (size_t)entries) && !memcmp(to, fresh, (size_t)entries * width), "another whole");
    free(merged), free(to);
    loco_patch_swap(s->pieces, s->address, s->start, s->dtype, s->width, entries, positions, bits, 1, change);
    demand(!memcmp(bits, fresh, (size_t)entries * width), "what was swapped twice is something else");
    int64_t room = loco_patch_room(s->n, entries);
    uint8_t *patch = exactly((size_t)room);
    int64_t size = loco_patch_pack(s->n, s->pieces, s->address, s->start, s->dtype, s->width, s->mantissa, entries, found,
                                   fresh, threads, patch);
    demand(size > 0 && loco_patch_count(patch, size, s->n) == entries, "no patch of what a patch says");
    memset(found, 0, 8 * (size_t)entries);
    memset(fresh, 0, (size_t)entries * width);
    demand(!loco_patch_unpack(patch, size, s->n, s->pieces, s->address, s->start, s->dtype, s->width, s->mantissa, threads, found,
                              fresh), "a patch that can't be read");
    demand(!memcmp(found, positions, 8 * (size_t)entries) && !memcmp(fresh, bits, (size_t)entries * width),
           "another patch");
    for (int64_t k = 0; k < s->pieces; k++) free((char *)(intptr_t)was.address[k]);
    free(found), free(fresh), free(patch);
}

static void try_unpack(int64_t *counted, int64_t *unpacked) {
    const Sample *s = &samples[one_in(large_one_in) ? SAMPLES - 1 - below(MANY_PARTS) : below(SAMPLES - MANY_PARTS)];
    const Sample *theirs = one_in(8) ? &samples[below(SAMPLES - MANY_PARTS)] : s;  /* another model */
    int64_t size;
    int threads = s->n > PART || one_in(64) ? 3 : 1;
    uint8_t *body = hostile(s, &size);
    int64_t entries = loco_patch_count(body, size, theirs->n);
    demand(entries <= theirs->n, "more changes than weights");
    if (entries >= 0) {
        int64_t *positions = exactly(8 * (size_t)entries);
        char *bits = exactly((size_t)(entries * theirs->width));
        ++*counted;
        if (!loco_patch_unpack(body, size, theirs->n, theirs->pieces, theirs->address, theirs->start, theirs->dtype,
                               theirs->width, theirs->mantissa, threads, positions, bits)) {
            for (int64_t k = 0; k < entries; k++) {
                demand(positions[k] >= (k ? positions[k - 1] + 1 : 0) && positions[k] < theirs->n, "a wrong position");
                demand(memcmp(bits + k * theirs->width, weight(theirs, positions[k]), (size_t)theirs->width),
                       "a change that changes nothing");
            }
            ++*unpacked;
            if (one_in(8)) look_at(theirs, threads, entries, positions, bits);
        }
        free(positions), free(bits);
    }
    free(body);
}

int main(int argc, char **argv) {
    int64_t cases = argc > 1 ? strtoll(argv[1], NULL, 10) : 100000, counted = 0, unpacked = 0;
    seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    if (argc > 3) large_one_in = atoi(argv[3]);
    for (int k = 0; k < SAMPLES; k++) make_sample(&samples[k], k);
    for (int64_t k = 0; k < cases; k++) try_unpack(&counted, &unpacked);
    printf("%" PRId64 " cases, %" PRId64 " counted, %" PRId64 " unpacked\n", cases, counted, unpacked);
    for (int k = 0; k < SAMPLES; k++) {
        for (int64_t p = 0; p < samples[k].pieces; p++) free((char *)(intptr_t)samples[k].address[p]);
        free(samples[k].patch);
    }
    return 0;
}
