/* Packs entries in the tight code, bit for bit as ../reference_tight.py does. */

#include "statistics.h"

enum { MOST_WORDS = 3 * BLOCK };  /* that a block can take */

/* Asks for a block that is wanted soon: that blocks come from the last to the first, a CPU does not guess. */
static inline void fetch(const Pack *c, int64_t first) {
    for (int i = 0; i < BLOCK; i += 16) __builtin_prefetch(c->anchor + first + i);
    for (int i = 0; i < BLOCK && c->momentum; i += 16) __builtin_prefetch(c->momentum + first + i);
}

/* Codes some parts, from the last element to the first. A part that finds no room has `words` of UINT32_MAX. */
static void *code_parts(void *argument) {
    Share *share = argument;
    Pack *c = (Pack *)(intptr_t)share->call;
    const Frame *f = &c->frame;
    int64_t blocks = blocks_of(c->n);
    uint16_t context[BLOCK];
    uint16_t asked[BLOCK], sent[BLOCK];  /* answers by their slots; 256 where an entry is */
    for (int64_t p = share->first; p < share->last; p++) {
        uint32_t *end = (uint32_t *)(void *)(c->room + c->room_of[p + 1]), *words = end;
        uint8_t *low = c->room + c->room_of[p] + STATES + c->plain[p];
        uint64_t state[LANES] = {LOW, LOW, LOW, LOW};
        c->words[p] = UINT32_MAX;
        int64_t b = smaller((p + 1) * PART_BLOCKS, blocks) - 1;
        for (; b >= p * PART_BLOCKS && (uint8_t *)(words - MOST_WORDS) >= low; b--) {
            int64_t first = b * BLOCK, entry = c->starts[b];
            int n = (int)smaller(BLOCK, c->n - first), count = (int)(c->starts[b + 1] - entry);
            contexts_of(c->anchor + first, c->momentum ? c->momentum + first : NULL, n, f, context);
            if (b >= 2) fetch(c, first - 2 * BLOCK);
            for (int j = count - 1; j >= 0; j--) {
                int k = context[c->offsets[entry + j]], level = level_of(k, f);
                int symbol = c->symbols[entry + j - c->starts[0]];
                put(&state[j % LANES], &words, &c->symbol[level][symbol & 127]);
                put(&state[j % LANES], &words, &c->answer[(symbol >> 7) << 8 | c->side[k]]);
            }
            memset(sent, 0, sizeof sent);
            for (int j = 0; j < count; j++) sent[c->offsets[entry + j]] = 256;
            int turns = 0;
            for (int i = 0; i < n; i++) {
                uint8_t code = c->chance[context[i]];
                asked[turns & 255] = sent[i] | code;
                turns += code != 0;
            }
            while (turns % LANES) turns--, put(&state[turns % LANES], &words, &c->answer[asked[turns]]);
            /* Indices that the compiler knows keep the states in registers. */
            uint64_t s[LANES] = {state[0], state[1], state[2], state[3]};
            for (; turns; turns -= LANES)
                for (int l = LANES - 1; l >= 0; l--) put(&s[l], &words, &c->answer[asked[turns - LANES + l]]);
            memcpy(state, s, sizeof state);
        }
        if (b >= p * PART_BLOCKS) continue;
        c->words[p] = (uint32_t)(end - words);
        memcpy(c->states[p], state, sizeof state);
    }
    return NULL;
}

static void put_bitmap(uint8_t *at, int bit, int set) { if (set) at[bit / 8] |= (uint8_t)(1 << bit % 8); }

/* The head and the tables. -> where they end */
static uint8_t *put_head(const Pack *c, uint8_t *at) {
    const Frame *f = &c->frame;
    int contexts = contexts_in(f);
    memset(at, 0, HEAD);
    at[0] = (uint8_t)f->mantissa, at[1] = (uint8_t)f->emin;
    put16(at + 2, f->reach), put32(at + 4, f->least);
    at[8] = (uint8_t)f->shift, at[9] = (uint8_t)f->levels, at[10] = (uint8_t)f->pulls;
    put16(at + 12, (uint32_t)f->e0), put16(at + 14, (uint32_t)f->d0), put16(at + 16, (uint32_t)f->m0);
    at += HEAD;
    memset(at, 0, (size_t)contexts / 8);
    for (int k = 0; k < contexts; k++) put_bitmap(at, k, c->chance[k] != 0);
    at += contexts / 8;
    for (int k = 0; k < contexts; k++) if (c->chance[k]) *at++ = c->chance[k];
    for (int k = 0; k < contexts; k++) if (c->chance[k]) *at++ = c->side[k];
    for (int l = 0; l < 8 >> f->levels; l++) {
        memset(at, 0, BITMAP);
        for (int s = 0; s < SYMBOLS; s++) put_bitmap(at, s, c->tables.share[l][s] != 0);
        at += BITMAP;
        for (int s = 0; s < SYMBOLS; s++) if (c->tables.share[l][s]) put16(at, c->tables.share[l][s]), at += 2;
    }
    return at;
}

/* Room for one part, wherever its entries lie. Rare ones find it too small. */
static int64_t room_for(int64_t elements, int64_t entries) {
    return (STATES + elements / 4 + 8 * entries + 4 * MOST_WORDS + 7) / 8 * 8;
}

enum { MOST_HEAD = HEAD + MOST_CONTEXTS / 8 + 2 * MOST_CONTEXTS + 8 * (BITMAP + 2 * SYMBOLS) };

/* Bytes that loco_pack needs for a frame. */
int64_t loco_pack_room(int64_t n, int64_t entries) {
    return MOST_HEAD + (parts_of(n) + 1) * (SIZES + room_for(BLOCK, 0)) + n / 4 + 8 * entries;
}

/* A frame, written to `out`, which has `loco_pack_room` bytes and is aligned to 8. There are entries.
 * -> its bytes, 0 if the entries take more than a plain code would, −1 for want of memory */
int64_t loco_pack(int64_t n, const float *anchor, const float *momentum, const int64_t *starts, const uint8_t *offsets,
                  const float *values, int mantissa, int emin, uint32_t reach, uint32_t least, int threads, uint8_t *out) {
    int64_t blocks = blocks_of(n), parts = parts_of(n), k = starts[blocks] - starts[0], written = -1;
    int64_t front = (MOST_HEAD + parts * SIZES + 7) / 8 * 8;
    Pack *c = calloc(1, sizeof(Pack));
    int64_t *room_of = calloc((size_t)parts + 1, 8);
    uint32_t *sizes = calloc((size_t)parts, 8);
    uint64_t (*states)[LANES] = calloc((size_t)parts, sizeof *states);
    Counts *counts = calloc((size_t)parts, sizeof(Counts));
    uint8_t *symbols = malloc((size_t)k);
    if (c && room_of && sizes && states && counts && symbols) {
        *c = (Pack){.n = n, .anchor = anchor, .momentum = momentum, .starts = starts, .offsets = offsets, .values = values,
                    .frame = {.mantissa = mantissa, .emin = emin, .reach = reach, .least = least}, .counts = counts,
                    .symbols = symbols, .room = out, .room_of = room_of, .plain = sizes, .words = sizes + parts,
                    .states = states};
        room_of[0] = front;
        for (int64_t p = 0; p < parts; p++) {
            int64_t first = p * PART_BLOCKS, last = smaller(first + PART_BLOCKS, blocks);
            room_of[p + 1] = room_of[p] + room_for((last - first) * BLOCK, starts[last] - starts[first]);
        }
        int count = (int)smaller(smaller(at_least(threads, 1), parts), MAX_THREADS);
        Share shares[MAX_THREADS];
        choose_frame(c, blocks);
        share_among(count, count_parts, c, parts, shares);
        make_tables(c, parts);
        share_among(count, code_parts, c, parts, shares);

        uint8_t *at = put_head(c, out);
        for (int64_t p = 0; p < parts; p++) {
            int64_t first = p * PART_BLOCKS, last = smaller(first + PART_BLOCKS, blocks);
            put32(at, (uint32_t)(starts[last] - starts[first])), put32(at + 4, c->words[p]), put32(at + 8, c->plain[p]);
            at += SIZES;
        }
        written = 0;
        for (int64_t p = 0; p < parts; p++) {
            if (c->words[p] == UINT32_MAX) break;
            /* No part's place begins before all parts in front of it have been moved. */
            size_t words = 4 * (size_t)c->words[p], plain = c->plain[p];
            memcpy(at, states[p], STATES), at += STATES;
            memmove(at, out + room_of[p] + STATES, plain), at += plain;
            memmove(at, out + room_of[p + 1] - words, words), at += words;
            if (p == parts - 1) written = at - out;
        }
    }
    free(c), free(room_of), free(sizes), free(states), free(counts), free(symbols);
    return written;
}
