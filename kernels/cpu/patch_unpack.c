/* Unpacks patches, of bytes that anybody may have made. */

#include <stdlib.h>

#include "patch_rows.h"

enum { NEVER = 2 * PATCH_PART };

typedef struct {
    int64_t n;
    Pieces old;
    Format format;
    const uint8_t *body;
    const int64_t *begin;  /* of each part's body; one more than there are parts */
    const int64_t *first;  /* of each part its first entry */
    int64_t *positions;
    char *bits;
    int *wrong;            /* of each part */
    int64_t parts, most, *taken;  /* parts, entries of one, parts */
} UnpackPatch;

/* What of the ranks of a class is still to come. */
typedef struct {
    const uint32_t *next, *end;
} Ranks;

/* Marks the elements of a class that change. The first is known to be in the block: `left` of the class come before it.
 * -> how many of those after the block come before the next that changes */
static inline uint32_t mark_changes(const Block *b, int k, uint32_t left, Ranks *ranks, uint64_t *changed, int *count) {
    uint64_t mask[ROWS];
    uint32_t before[ROWS + 1] = {0};  /* the members in earlier rows */
    for (int r = 0; r < ROWS; r++) mask[r] = members(&b->row[r], k), before[r + 1] = before[r] + ones(mask[r]);
    do {
        /* Sums of conditions, not branches on them: nothing could predict these. */
        int r = (left >= before[1]) + (left >= before[2]) + (left >= before[3]);
        changed[r] |= (uint64_t)1 << select_bit(mask[r], left - before[r]);
        uint32_t gap = ranks->next[1] - ranks->next[0];
        left = ++ranks->next < ranks->end ? left + gap : NEVER;
        ++*count;
    } while (left < before[ROWS]);
    return left - before[ROWS];
}

/* Finds the elements of which these are the ranks. -> what is wrong */
static int place_part(const UnpackPatch *c, int64_t part, const RankedPart *ranked) {
    int64_t begin = part * PATCH_PART, end = begin + part_size(c->n, part);
    int64_t entry = c->first[part], entries = c->first[part + 1] - entry;
    int width = c->format.width;
    int64_t half = (int64_t)1 << (8 * width - 1);
    Ranks ranks[CLASSES];
    const int64_t *step[CLASSES];
    uint32_t left[CLASSES];  /* how many of a class come before the next that changes: a part has fewer than NEVER */
    for (uint32_t k = 0, sum = 0; k < CLASSES; k++) {
        step[k] = ranked->step + sum, ranks[k].next = ranked->rank + sum;
        sum += ranked->count[k], ranks[k].end = ranked->rank + sum;
        left[k] = ranked->count[k] ? *ranks[k].next : NEVER;
    }
    int64_t piece = piece_at(&c->old, begin);
    Block block;
    for (int64_t first = begin; first < end && entries; first += BLOCK) {
        read_block(&block, &c->old, &piece, first, (int)smaller(BLOCK, end - first), c->format, ranked->low);
        uint64_t changed[ROWS] = {0};
        uint32_t here[CLASSES], change = 0;
        int count = 0;
        count_members(&block, here);
        for (int k = 0; k < CLASSES; k++) change |= (uint32_t)(left[k] < here[k]) << k, left[k] -= here[k];
        for (; change; change &= change - 1) {
            int k = __builtin_ctz(change);
            left[k] = mark_changes(&block, k, left[k] + here[k], &ranks[k], changed, &count);
        }
        entries -= count;
        for (; count; count--, entry++) {
            int row = !changed[0] + !(changed[0] | changed[1]) + !(changed[0] | changed[1] | changed[2]);
            int i = ROW * row + __builtin_ctzll(changed[row]);
            changed[row] &= changed[row] - 1;
            int64_t fresh = ordered(read_bits(block.bits + i * width, width), width) + *step[block.class[i]]++;
            if (fresh < -half || fresh >= half) return BAD_STEP;
            c->positions[entry] = first + i;
            write_bits(c->bits + entry * width, from_ordered(fresh, width), width);
        }
    }
    return entries ? NO_SUCH_ELEMENT : FINE;
}

static void *unpack_parts(void *argument) {
    const UnpackPatch *c = ((Share *)argument)->call;
    size_t most = (size_t)c->most + 1;  /* a look at the next rank goes one past the last */
    RankedPart ranked = {.rank = malloc(most * sizeof(uint32_t)), .step = malloc(most * sizeof(int64_t))};
    for (int64_t p; (p = take_part(c->taken)) < c->parts;) {
        int64_t size = c->begin[p + 1] - c->begin[p];
        if (!size) continue;
        c->wrong[p] = NO_MEMORY;
        if (!ranked.rank || !ranked.step) continue;
        c->wrong[p] = loco_patch_decode_part(c->body + c->begin[p], size, &ranked);
        if (!c->wrong[p]) c->wrong[p] = place_part(c, p, &ranked);
    }
    free(ranked.rank), free(ranked.step);
    return NULL;
}

/* `positions` and `bits` have room for as many as loco_patch_count says. -> 0, or what is wrong */
int loco_patch_unpack(const uint8_t *body, int64_t size, int64_t n, int64_t pieces, const int64_t *address,
                      const int64_t *start, const int32_t *dtype, int width, int mantissa, int threads,
                      int64_t *positions, char *bits) {
    int64_t parts = (int64_t)parts_of_patch(n), taken = 0;
    int64_t *begin = malloc((size_t)(parts + 1) * 8), *first = malloc((size_t)(parts + 1) * 8);
    int *wrong = calloc((size_t)(parts + 1), sizeof(int)), result = NO_MEMORY;
    if (begin && first && wrong && !(result = loco_patch_read_parts(body, size, n, begin, first))) {
        UnpackPatch call = {n, {pieces, address, start, dtype}, {width, mantissa}, body, begin, first, positions, bits,
                            wrong, parts, most_entries(first, parts), &taken};
        work_on_parts(unpack_parts, &call, parts, threads);
        for (int64_t p = 0; p < parts && !result; p++) result = wrong[p];
    }
    free(begin), free(first), free(wrong);
    return result;
}
