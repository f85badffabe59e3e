/* What a frame of the tight code says of its entries as a whole: what suits them, and the tables to code them with. */

#ifndef LOCO_STATISTICS_H
#define LOCO_STATISTICS_H

#include "tight.h"

typedef struct {
    uint32_t every[MOST_CONTEXTS], sent[MOST_CONTEXTS], near[MOST_CONTEXTS], symbol[8][SYMBOLS];
} Counts;

typedef struct {
    int64_t n;
    const float *anchor, *momentum;
    const int64_t *starts;
    const uint8_t *offsets;
    const float *values;
    Frame frame;
    uint8_t chance[MOST_CONTEXTS], side[MOST_CONTEXTS];  /* codes of probabilities */
    Tables tables;
    Slot answer[512], symbol[8][SYMBOLS];  /* by code, and yes 256 behind no; by level and symbol */
    Counts *counts;      /* one for each part */
    uint8_t *symbols;    /* of each entry: its symbol, and 128 if it goes to the nearest border */
    uint8_t *room;       /* each part has its own */
    int64_t *room_of;    /* where that begins; one more than there are parts */
    uint32_t *plain;     /* bytes of plain bits, at the room's beginning but for the states' place */
    uint32_t *words;     /* and words, at its end */
    uint64_t (*states)[LANES];
} Pack;

static int64_t first_entry(const Pack *c, int64_t block) { return c->starts[block] - c->starts[0]; }

static int median(const uint64_t *of_exponent, uint64_t count) {
    uint64_t seen = 0;
    int e = 0;
    while ((seen += of_exponent[e]) <= count / 2) e++;
    return e;
}

/* What suits the entries of a frame. */
static void choose_frame(Pack *c, int64_t blocks) {
    Frame *f = &c->frame;
    uint64_t zeros[32] = {0}, of_s[256] = {0}, of_m[256] = {0}, k = (uint64_t)first_entry(c, blocks), odd = 0;
    int32_t highest = -1000;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t j = c->starts[b]; j < c->starts[b + 1]; j++) {
            int64_t i = b * BLOCK + c->offsets[j];
            View v = view(c->anchor[i], f->mantissa, f->emin);
            int64_t whole = multiple(c->values[j], v.exponent);
            if (whole < 0) odd++;
            else if (whole > 0) zeros[at_most(__builtin_ctzll((uint64_t)whole), 31)]++;
            else odd++;
            highest = at_least(highest, v.octave);
            of_s[bits(c->values[j]) >> 23 & 255]++;
            if (c->momentum) of_m[bits(c->momentum[i]) >> 23 & 255]++;
        }
    /* An escape costs about 32 bits; each bit of the shift saves one of all others. */
    int64_t cost = 32 * (int64_t)odd;
    for (int s = 1; s < 32; s++) {
        odd += zeros[s - 1];
        int64_t now = 32 * (int64_t)odd - s * (int64_t)(k - odd);
        if (now < cost) cost = now, f->shift = s;
    }
    static const int levels[5] = {3, 2, 1, 1, 0}, pulls[5] = {1, 1, 2, 3, 3};
    int size = (k >= 2048) + (k >= 8192) + (k >= 32768) + (k >= 131072);
    f->levels = c->momentum ? levels[size] : at_least(levels[size] - 1, 0);
    f->pulls = c->momentum ? pulls[size] : 0;
    f->e0 = median(of_s, k) + f->mantissa - 3;  /* the lowest of the 8: borders a sixteenth of a usual s apart */
    f->d0 = highest - PLACES + 2;               /* in the last place nothing is sent */
    f->m0 = c->momentum ? median(of_m, k) - 2 : 0;
}

static int symbol_of(float value, View v, int near, const Frame *f, uint64_t *bits_, int *plain) {
    int64_t m = multiple(value, v.exponent);
    if (m >= 0 && (m & (((int64_t)1 << f->shift) - 1)) == 0) {
        /* Nobody can foretell its sign, so there is no branch on it. */
        int64_t x = (m >> f->shift) - least_sent(v, near, f), below = -(int64_t)(x < 0);
        uint64_t y = (uint64_t)(x ^ below);  /* − x − 1 of what lies below */
        int b = bucket(y, plain);
        *bits_ = y & (((uint64_t)1 << *plain) - 1);
        if (b < BUCKETS) return b + (BUCKETS & (int)below);
    }
    *plain = 32;
    *bits_ = bits(value);
    return ESCAPE;
}

/* Counts what occurs in some parts, and writes their plain bits. */
static void *count_parts(void *argument) {
    Share *share = argument;
    Pack *c = (Pack *)(intptr_t)share->call;
    const Frame *f = &c->frame;
    int64_t blocks = blocks_of(c->n);
    uint16_t context[BLOCK];
    for (int64_t p = share->first; p < share->last; p++) {
        Counts *counts = &c->counts[p];
        uint8_t *const begin = c->room + c->room_of[p] + STATES, *out = begin;
        uint64_t held = 0;
        uint32_t length = 0;
        for (int64_t b = p * PART_BLOCKS; b < smaller((p + 1) * PART_BLOCKS, blocks); b++) {
            int64_t first = b * BLOCK;
            int n = (int)smaller(BLOCK, c->n - first);
            contexts_of(c->anchor + first, c->momentum ? c->momentum + first : NULL, n, f, context);
            for (int i = 0; i < n; i++) counts->every[context[i]]++;
            for (int64_t j = c->starts[b]; j < c->starts[b + 1]; j++) {
                int i = c->offsets[j], plain;
                uint64_t rest;
                View v = view(c->anchor[first + i], f->mantissa, f->emin);
                int near = (int)(bits(c->values[j]) >> 31 ^ v.negative ^ 1), symbol = symbol_of(c->values[j], v, near, f, &rest, &plain);
                counts->sent[context[i]]++;
                counts->near[context[i]] += (uint32_t)near;
                counts->symbol[level_of(context[i], f)][symbol]++;
                c->symbols[j - c->starts[0]] = (uint8_t)(symbol | near << 7);
                held |= rest << length;
                length += (uint32_t)plain;
                memcpy(out, &held, 8);  /* what is not full yet is written again; words will end behind it */
                out += length / 8, held >>= length / 8 * 8, length %= 8;
            }
        }
        out += length > 0;
        c->plain[p] = (uint32_t)(out - begin);
    }
    return NULL;
}

/* The code of the probability next to yes / of. */
static uint8_t code_of(uint64_t yes, uint64_t of) {
    int low = 1, high = 255;  /* the least code whose probability is not below it, or 255 */
    while (low < high) {
        int middle = (low + high) / 2;
        if (probability(middle) * of >= yes << 16) high = middle; else low = middle + 1;
    }
    uint64_t above = probability(low) * of, below = low > 1 ? probability(low - 1) * of : 0;
    if (low > 1 && (int64_t)((yes << 16) - below) < (int64_t)(above - (yes << 16))) low--;
    return (uint8_t)low;
}

/* The largest share, the first of several. */
static int largest(const uint16_t *share) {
    int best = 0;
    for (int s = 1; s < SYMBOLS; s++) if (share[s] > share[best]) best = s;
    return best;
}

/* Shares of 4096 for the symbols that occur, none of them 0. */
static void share_symbols(const uint32_t *count, uint16_t *share) {
    uint64_t total = 0;
    int sum = 0;
    for (int s = 0; s < SYMBOLS; s++) total += count[s];
    if (!total) return;
    for (int s = 0; s < SYMBOLS; s++) {
        uint64_t part = count[s] * (uint64_t)4096 / total;
        sum += share[s] = (uint16_t)(count[s] && !part ? 1 : part);
    }
    for (; sum > 4096; sum--) share[largest(share)]--;
    share[largest(share)] += (uint16_t)(4096 - sum);
}

/* The tables, from all parts' counts. */
static void make_tables(Pack *c, int64_t parts) {
    Tables *t = &c->tables;
    Counts *all = &c->counts[0];
    for (int64_t p = 1; p < parts; p++)
        for (size_t k = 0; k < sizeof(Counts) / 4; k++) ((uint32_t *)all)[k] += ((uint32_t *)&c->counts[p])[k];
    for (int k = 0; k < contexts_in(&c->frame); k++)
        if (all->sent[k]) {
            c->chance[k] = code_of(all->sent[k], all->every[k]);
            c->side[k] = code_of(all->near[k], all->sent[k]);
        }
    int levels = 8 >> c->frame.levels;
    for (int l = 0; l < levels; l++) share_symbols(all->symbol[l], t->share[l]);
    add_starts(t, levels);
    for (int l = 0; l < levels; l++)
        for (int s = 0; s < SYMBOLS; s++)
            if (t->share[l][s]) c->symbol[l][s] = slot(t->start[l][s], t->share[l][s], 12);
    for (int code = 1; code < 256; code++) {
        uint32_t yes = probability(code);
        c->answer[code] = slot(yes, 65536 - yes, 16);
        c->answer[256 + code] = slot(0, yes, 16);
    }
}

#endif
