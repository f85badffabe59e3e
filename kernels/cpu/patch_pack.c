/* Packs what changed in some weights, byte for byte as ../reference_patch.py does. */

#include <stdlib.h>

#include "patch_rows.h"

typedef struct {
    int64_t n;
    Pieces old;
    Format format;
    const int64_t *positions;
    const char *bits;      /* of the new weights at these positions */
    Bodies bodies;
    int64_t most, *taken;  /* entries of a part; parts */
} PackPatch;

/* The field of class 15 is the highest that at most a few of the weights exceed. -> that of class 0 */
static int32_t lowest_field(const PackPatch *c, int64_t first, int64_t last) {
    /* Four tables: neighbours are often of one field, and adding to a number waits for the addition before. */
    uint32_t seen[4][1 << 8] = {{0}};
    int width = c->format.width;
    int64_t piece = piece_at(&c->old, first), sampled = (last - first + SAMPLED - 1) / SAMPLED, above = 0;
    for (int64_t i = first; i < last;) {
        while (c->old.start[piece + 1] <= i) piece++;
        const char *at = bits_at(&c->old, piece, i, width);
        int64_t run = (smaller(c->old.start[piece + 1], last) - i + SAMPLED - 1) / SAMPLED;
        for (int64_t k = 0; k < run; k++, at += SAMPLED * width)
            seen[k % 4][field_of(read_bits(at, width), c->format)]++;
        i += run * SAMPLED;
    }
    int32_t top = 256;
    do top--, above += seen[0][top] + seen[1][top] + seen[2][top] + seen[3][top];
    while (above * RARE <= sampled);
    return top < CLASSES ? 0 : top - (CLASSES - 1);
}

typedef struct {
    uint32_t class, rank;
    int64_t step;
} Change;

/* Finds the rank and the step of every change, and sorts them by class. `found` has room for them. */
static void rank_part(const PackPatch *c, int64_t part, Change *found, RankedPart *into) {
    int64_t begin = part * PATCH_PART, end = begin + part_size(c->n, part);
    int64_t entry = c->bodies.first[part], entries = c->bodies.first[part + 1] - entry;
    int width = c->format.width;
    uint32_t seen[CLASSES] = {0}, here[CLASSES];
    int64_t piece = piece_at(&c->old, begin), made = 0;
    Block block;
    memset(into->count, 0, sizeof into->count);
    into->low = lowest_field(c, begin, end);
    for (int64_t first = begin; first < end && made < entries; first += BLOCK) {
        int n = (int)smaller(BLOCK, end - first);
        read_block(&block, &c->old, &piece, first, n, c->format, into->low);
        for (; made < entries && c->positions[entry] < first + n; entry++) {
            int i = (int)(c->positions[entry] - first), row = i / ROW, k = block.class[i];
            uint32_t rank = seen[k] + ones(members(&block.row[row], k) & (((uint64_t)1 << i % ROW) - 1));
            for (int r = 0; r < ROWS - 1; r++) rank += ones(members(&block.row[r], k)) & -(uint32_t)(r < row);
            uint32_t old = read_bits(block.bits + i * width, width), fresh = read_bits(c->bits + entry * width, width);
            found[made++] = (Change){(uint32_t)k, rank, ordered(fresh, width) - ordered(old, width)};
            into->count[k]++;
        }
        count_members(&block, here);
        for (int k = 0; k < CLASSES; k++) seen[k] += here[k];
    }
    uint32_t place[CLASSES];
    for (uint32_t k = 0, sum = 0; k < CLASSES; sum += into->count[k++]) place[k] = sum;
    for (int64_t j = 0; j < entries; j++) {
        uint32_t at = place[found[j].class]++;
        into->rank[at] = found[j].rank, into->step[at] = found[j].step;
    }
}

static void *pack_parts(void *argument) {
    const PackPatch *c = ((Share *)argument)->call;
    size_t most = (size_t)(c->most ? c->most : 1);
    Change *found = malloc(most * sizeof(Change));
    RankedPart ranked = {.rank = malloc(most * sizeof(uint32_t)), .step = malloc(most * sizeof(int64_t))};
    for (int64_t p; (p = take_part(c->taken)) < c->bodies.parts;) {
        c->bodies.size[p] = -1;
        if (!found || !ranked.rank || !ranked.step) continue;
        if (c->bodies.first[p] < c->bodies.first[p + 1]) rank_part(c, p, found, &ranked);
        loco_patch_code_part(&c->bodies, p, &ranked);
    }
    free(found), free(ranked.rank), free(ranked.step);
    return NULL;
}

/* `out` has loco_patch_room bytes. -> those of the patch; less than 0: there is no memory */
int64_t loco_patch_pack(int64_t n, int64_t pieces, const int64_t *address, const int64_t *start, const int32_t *dtype,
                        int width, int mantissa, int64_t entries, const int64_t *positions, const char *bits,
                        int threads, uint8_t *out) {
    int64_t parts = (int64_t)parts_of_patch(n), written = -1, taken = 0;
    int64_t *first = malloc((size_t)(parts + 1) * 8), *size = malloc((size_t)(parts + 1) * 8);
    if (first && size) {
        for (int64_t p = 0, k = 0; p <= parts; p++) {
            while (k < entries && positions[k] < p * PATCH_PART) k++;
            first[p] = k;
        }
        PackPatch call = {n, {pieces, address, start, dtype}, {width, mantissa}, positions, bits,
                          {parts, first, out, size}, most_entries(first, parts), &taken};
        work_on_parts(pack_parts, &call, parts, threads);
        written = loco_patch_join(&call.bodies);
    }
    free(first), free(size);
    return written;
}
