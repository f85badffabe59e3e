/* Ranked changes as bytes, and back, byte for byte as ../reference_ranked.py does. What is read may be any bytes. */

#include <stdlib.h>

#include "patch_coder.h"

enum { SIZE = 4 };  /* bytes in front of all bodies, for each part: the size of its body */

/* Room for a part's body: its lowest field, 16 counts of at most 3 bytes, the coder's bytes. */
enum { BODY_HEAD = 1 + 3 * CLASSES, CODED = 16, FINISH = 15 };

/* ---- to bytes ---- */

static uint8_t *room_of(const Bodies *b, int64_t part) {
    return b->out + SIZE * b->parts + (BODY_HEAD + FINISH) * part + CODED * b->first[part];
}

/* The bytes that `Bodies` need. */
int64_t loco_patch_room(int64_t n, int64_t entries) {
    return (SIZE + BODY_HEAD + FINISH) * (int64_t)parts_of_patch(n) + CODED * entries;
}

static uint8_t *put_varint(uint8_t *at, uint32_t x) {
    for (; x >= 128; x >>= 7) *at++ = (uint8_t)(x | 128);
    *at++ = (uint8_t)x;
    return at;
}

void loco_patch_code_part(const Bodies *to, int64_t part, const RankedPart *from) {
    uint8_t *out = room_of(to, part), *at = out;
    to->size[part] = 0;
    if (to->first[part] == to->first[part + 1]) return;
    *at++ = (uint8_t)from->low;
    for (int k = 0; k < CLASSES; k++) at = put_varint(at, from->count[k]);
    Model model;
    start_model(&model);
    Coder coder = start_coder(at, room_of(to, part + 1) - at, 0);
    const uint32_t *rank = from->rank;
    const int64_t *step = from->step;
    for (int k = 0; k < CLASSES; k++) {
        uint32_t next = 0;
        begin_class(&model);
        for (uint32_t j = 0; j < from->count[k]; j++, rank++, step++) {
            code_gap(&coder, &model, *rank - next, 0);
            code_step(&coder, &model, k, *step, 0);
            next = *rank + 1;
        }
    }
    int64_t size = finish_encoder(&coder);
    to->size[part] = coder.failed ? -1 : at - out + size;
}

/* -> the bytes of the patch; less than 0: there was no memory, or no room */
int64_t loco_patch_join(const Bodies *b) {
    int64_t written = SIZE * b->parts;
    for (int64_t p = 0; p < b->parts; p++) {
        if (b->size[p] < 0) return -1;
        for (int i = 0; i < SIZE; i++) b->out[SIZE * p + i] = (uint8_t)((uint64_t)b->size[p] >> 8 * i);
        memmove(b->out + written, room_of(b, p), (size_t)b->size[p]);
        written += b->size[p];
    }
    return written;
}

/* ---- from bytes ---- */

/* -> the bytes read, 0 if there is no such number */
static int take_varint(const uint8_t *at, const uint8_t *end, uint32_t *x) {
    *x = 0;
    for (int i = 0; i < 3 && at + i < end; i++) {
        *x |= (uint32_t)(at[i] & 127) << 7 * i;
        if (at[i] < 128) return i && !at[i] ? 0 : i + 1;
    }
    return 0;
}

/* The head of a part's body. -> its bytes, 0 if there is none such */
static int64_t take_head(const uint8_t *body, int64_t size, int32_t *low, uint32_t *count, int64_t *entries) {
    int64_t at = 1;
    *entries = 0;
    if (!size) return 0;
    *low = body[0];
    for (int k = 0; k < CLASSES; k++) {
        int read = take_varint(body + at, body + size, &count[k]);
        if (!read) return 0;
        at += read, *entries += count[k];
    }
    return at;
}

/* The body of a part whose head is known to be one. -> what is wrong */
int loco_patch_decode_part(const uint8_t *body, int64_t size, RankedPart *into) {
    int64_t entries, head = take_head(body, size, &into->low, into->count, &entries);
    Model model;
    start_model(&model);
    Coder coder = start_coder((uint8_t *)(intptr_t)body + head, size - head, 1);
    uint32_t *rank = into->rank;
    int64_t *step = into->step;
    for (int k = 0; k < CLASSES; k++) {
        int64_t last = -1;
        begin_class(&model);
        for (uint32_t j = 0; j < into->count[k]; j++, rank++, step++) {
            int64_t gap = code_gap(&coder, &model, 0, 1);
            if (gap < 0 || (last += gap + 1) >= PATCH_PART) return BAD_GAP;
            *rank = (uint32_t)last;
            if (!(*step = code_step(&coder, &model, k, 0, 1))) return BAD_STEP;
        }
    }
    return is_finished(&coder) ? FINE : LEFT_OVER;
}

/* Where the bodies of the parts begin, and the entries of each: both have one more than there are parts. -> what is
 * wrong */
int loco_patch_read_parts(const uint8_t *body, int64_t size, int64_t n, int64_t *begin, int64_t *first) {
    int64_t parts = (int64_t)parts_of_patch(n);
    if (size < SIZE * parts) return SHORT;
    begin[0] = SIZE * parts, first[0] = 0;
    for (int64_t p = 0; p < parts; p++) {
        uint32_t bytes = 0, count[CLASSES];
        int32_t low;
        int64_t entries = 0;
        for (int i = 0; i < SIZE; i++) bytes |= (uint32_t)body[SIZE * p + i] << 8 * i;
        begin[p + 1] = begin[p] + bytes;
        if (begin[p + 1] > size) return PART_SIZES;
        if (bytes && !take_head(body + begin[p], bytes, &low, count, &entries)) return BAD_COUNTS;
        if (bytes && (!entries || entries > part_size(n, p))) return BAD_COUNTS;
        first[p + 1] = first[p] + entries;
    }
    return begin[parts] == size ? FINE : PART_SIZES;
}

/* -> how many elements a patch changes; if that can't be, less than 0: what is wrong */
int64_t loco_patch_count(const uint8_t *body, int64_t size, int64_t n) {
    size_t bytes = (size_t)(parts_of_patch(n) + 1) * 8;
    int64_t *begin = malloc(bytes), *first = malloc(bytes), result = NO_MEMORY;
    if (begin && first) result = loco_patch_read_parts(body, size, n, begin, first);
    result = result ? -result : first[parts_of_patch(n)];
    free(begin), free(first);
    return result;
}

/* ---- of weights that lie elsewhere ---- */

typedef struct {
    const uint8_t *body;   /* of what is decoded */
    const int64_t *begin;  /* of each part's body */
    Bodies bodies;         /* of what is coded */
    const int64_t *first;
    uint8_t *lowest;       /* of each part */
    int32_t *counts;       /* of each part, CLASSES of them */
    uint32_t *ranks;
    int64_t *steps;
    int *wrong;            /* of each part */
    int64_t parts, *taken;
} RankedParts;

static RankedPart ranked_part(const RankedParts *c, int64_t part) {
    RankedPart one = {.low = c->lowest[part], .rank = c->ranks + c->first[part], .step = c->steps + c->first[part]};
    memcpy(one.count, c->counts + CLASSES * part, sizeof one.count);
    return one;
}

static void *code_parts(void *argument) {
    const RankedParts *c = ((Share *)argument)->call;
    for (int64_t p; (p = take_part(c->taken)) < c->parts;) {
        RankedPart one = ranked_part(c, p);
        loco_patch_code_part(&c->bodies, p, &one);
    }
    return NULL;
}

static void *decode_parts(void *argument) {
    const RankedParts *c = ((Share *)argument)->call;
    for (int64_t p; (p = take_part(c->taken)) < c->parts;) {
        RankedPart one = ranked_part(c, p);
        if (c->first[p] == c->first[p + 1]) continue;
        c->wrong[p] = loco_patch_decode_part(c->body + c->begin[p], c->begin[p + 1] - c->begin[p], &one);
        c->lowest[p] = (uint8_t)one.low;
        memcpy(c->counts + CLASSES * p, one.count, sizeof one.count);
    }
    return NULL;
}

/* `out` has loco_patch_room bytes. -> those of the patch; less than 0: there is no memory */
int64_t loco_patch_code(int64_t parts, uint8_t *lowest, int32_t *counts, uint32_t *ranks, int64_t *steps, int threads,
                        uint8_t *out) {
    int64_t *first = malloc((size_t)(parts + 1) * 8), *size = malloc((size_t)(parts + 1) * 8), written = -1, taken = 0;
    if (first && size) {
        first[0] = 0;
        for (int64_t p = 0; p < parts; p++) {
            first[p + 1] = first[p];
            for (int k = 0; k < CLASSES; k++) first[p + 1] += counts[CLASSES * p + k];
        }
        RankedParts call = {.bodies = {parts, first, out, size}, .first = first, .lowest = lowest, .counts = counts,
                            .ranks = ranks, .steps = steps, .parts = parts, .taken = &taken};
        work_on_parts(code_parts, &call, parts, threads);
        written = loco_patch_join(&call.bodies);
    }
    free(first), free(size);
    return written;
}

/* `lowest` and `counts` are zeros, `ranks` and `steps` have room for what loco_patch_count says. -> what is wrong */
int loco_patch_decode(const uint8_t *body, int64_t size, int64_t n, int threads, uint8_t *lowest, int32_t *counts,
                      uint32_t *ranks, int64_t *steps) {
    int64_t parts = (int64_t)parts_of_patch(n), taken = 0;
    int64_t *begin = malloc((size_t)(parts + 1) * 8), *first = malloc((size_t)(parts + 1) * 8);
    int *wrong = calloc((size_t)(parts + 1), sizeof(int)), result = NO_MEMORY;
    if (begin && first && wrong && !(result = loco_patch_read_parts(body, size, n, begin, first))) {
        RankedParts call = {.body = body, .begin = begin, .first = first, .lowest = lowest, .counts = counts,
                            .ranks = ranks, .steps = steps, .wrong = wrong, .parts = parts, .taken = &taken};
        work_on_parts(decode_parts, &call, parts, threads);
        for (int64_t p = 0; p < parts && !result; p++) result = wrong[p];
    }
    free(begin), free(first), free(wrong);
    return result;
}
