/* The tight code, bit for bit as in ../reference_tight.py: entries as few bytes, given what all sites hold. */

#include <stdlib.h>

#include "contexts.h"

enum { PART = 1 << 18, PART_BLOCKS = PART / BLOCK, HEAD = 20, SIZES = 12, STATES = 8 * LANES, BITMAP = (SYMBOLS + 7) / 8,
       MOST_WORDS = 3 * BLOCK };  /* that a block can take */

static int64_t parts_of(int64_t n) { return (n + PART - 1) / PART; }

static void put16(uint8_t *at, uint32_t x) { at[0] = (uint8_t)x; at[1] = (uint8_t)(x >> 8); }
static void put32(uint8_t *at, uint32_t x) { put16(at, x); put16(at + 2, x >> 16); }
static uint32_t get16(const uint8_t *at) { return at[0] | (uint32_t)at[1] << 8; }
static uint32_t get32(const uint8_t *at) { return get16(at) | get16(at + 2) << 16; }

typedef struct {
    uint8_t chance[MOST_CONTEXTS], side[MOST_CONTEXTS];  /* codes of probabilities */
    uint16_t share[8][SYMBOLS], start[8][SYMBOLS];
} Tables;

/* ---- encoding ---- */

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
    Tables tables;
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
        int64_t x = (m >> f->shift) - least_sent(v, near, f);
        uint64_t y = (uint64_t)(x >= 0 ? x : -x - 1);
        int b = bucket(y, plain);
        *bits_ = y & (((uint64_t)1 << *plain) - 1);
        if (b < BUCKETS) return x >= 0 ? b : BUCKETS + b;
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
        int length = 0;
        for (int64_t b = p * PART_BLOCKS; b < smaller((p + 1) * PART_BLOCKS, blocks); b++) {
            int64_t first = b * BLOCK;
            int n = (int)smaller(BLOCK, c->n - first);
            contexts_of(c->anchor + first, c->momentum ? c->momentum + first : NULL, n, f, context);
            for (int i = 0; i < n; i++) counts->every[context[i]]++;
            for (int64_t j = c->starts[b]; j < c->starts[b + 1]; j++) {
                int i = c->offsets[j], plain;
                uint64_t rest;
                View v = view(c->anchor[first + i], f->mantissa, f->emin);
                int near = (bits(c->values[j]) >> 31) == v.negative, symbol = symbol_of(c->values[j], v, near, f, &rest, &plain);
                counts->sent[context[i]]++;
                counts->near[context[i]] += (uint32_t)near;
                counts->symbol[level_of(context[i], f)][symbol]++;
                c->symbols[j - c->starts[0]] = (uint8_t)(symbol | near << 7);
                held |= rest << length;
                for (length += plain; length >= 8; length -= 8, held >>= 8) *out++ = (uint8_t)held;
            }
        }
        if (length) *out++ = (uint8_t)held;
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

static void add_starts(Tables *t, int levels) {
    for (int l = 0; l < levels; l++)
        for (int s = 0, start = 0; s < SYMBOLS; start += t->share[l][s++]) t->start[l][s] = (uint16_t)start;
}

/* The tables, from all parts' counts. */
static void make_tables(Pack *c, int64_t parts) {
    Tables *t = &c->tables;
    Counts *all = &c->counts[0];
    for (int64_t p = 1; p < parts; p++)
        for (size_t k = 0; k < sizeof(Counts) / 4; k++) ((uint32_t *)all)[k] += ((uint32_t *)&c->counts[p])[k];
    for (int k = 0; k < contexts_in(&c->frame); k++)
        if (all->sent[k]) {
            t->chance[k] = code_of(all->sent[k], all->every[k]);
            t->side[k] = code_of(all->near[k], all->sent[k]);
        }
    int levels = 8 >> c->frame.levels;
    for (int l = 0; l < levels; l++) share_symbols(all->symbol[l], t->share[l]);
    add_starts(t, levels);
}

static void put_yes_or_no(uint64_t *state, uint32_t **words, int yes, uint32_t chance) {
    put(state, words, yes ? 0 : chance, yes ? chance : 65536 - chance, 16);
}

/* Codes some parts, from the last element to the first. A part that finds no room has `words` of UINT32_MAX. */
static void *code_parts(void *argument) {
    Share *share = argument;
    Pack *c = (Pack *)(intptr_t)share->call;
    const Frame *f = &c->frame;
    const Tables *t = &c->tables;
    int64_t blocks = blocks_of(c->n);
    uint32_t chance[MOST_CONTEXTS], side[MOST_CONTEXTS];
    for (int k = 0; k < contexts_in(f); k++) chance[k] = probability(t->chance[k]), side[k] = probability(t->side[k]);
    uint16_t context[BLOCK];
    uint8_t active[BLOCK], sent[BLOCK];
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
            for (int j = count - 1; j >= 0; j--) {
                int k = context[c->offsets[entry + j]], level = level_of(k, f);
                int symbol = c->symbols[entry + j - c->starts[0]];
                put(&state[j % LANES], &words, t->start[level][symbol & 127], t->share[level][symbol & 127], 12);
                put_yes_or_no(&state[j % LANES], &words, symbol >> 7, side[k]);
            }
            memset(sent, 0, sizeof sent);
            for (int j = 0; j < count; j++) sent[c->offsets[entry + j]] = 1;
            int turns = 0;
            for (int i = 0; i < n; i++) {
                active[turns & 255] = (uint8_t)i;
                turns += chance[context[i]] != 0;
            }
            for (int turn = turns - 1; turn >= 0; turn--) {
                int i = active[turn];
                put_yes_or_no(&state[turn % LANES], &words, sent[i], chance[context[i]]);
            }
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
    const Tables *t = &c->tables;
    int contexts = contexts_in(f);
    memset(at, 0, HEAD);
    at[0] = (uint8_t)f->mantissa, at[1] = (uint8_t)f->emin;
    put16(at + 2, f->reach), put32(at + 4, f->least);
    at[8] = (uint8_t)f->shift, at[9] = (uint8_t)f->levels, at[10] = (uint8_t)f->pulls;
    put16(at + 12, (uint32_t)f->e0), put16(at + 14, (uint32_t)f->d0), put16(at + 16, (uint32_t)f->m0);
    at += HEAD;
    memset(at, 0, (size_t)contexts / 8);
    for (int k = 0; k < contexts; k++) put_bitmap(at, k, t->chance[k] != 0);
    at += contexts / 8;
    for (int k = 0; k < contexts; k++) if (t->chance[k]) *at++ = t->chance[k];
    for (int k = 0; k < contexts; k++) if (t->chance[k]) *at++ = t->side[k];
    for (int l = 0; l < 8 >> f->levels; l++) {
        memset(at, 0, BITMAP);
        for (int s = 0; s < SYMBOLS; s++) put_bitmap(at, s, t->share[l][s] != 0);
        at += BITMAP;
        for (int s = 0; s < SYMBOLS; s++) if (t->share[l][s]) put16(at, t->share[l][s]), at += 2;
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

/* ---- decoding: of bytes that anybody may have made ---- */

/* What is wrong with a frame; ../reference_tight.py has the same in words. */
enum { FINE, SHORT, HEAD_RANGE, NO_MOMENTUM, STRAY_BITS, NO_CHANCE, BAD_SHARES, PART_COUNTS, BAD_STATE, NO_SYMBOLS,
       BAD_VALUE, LEFT_OVER, NOT_FINITE, NO_MEMORY };

typedef struct {
    int64_t n;
    const float *anchor, *momentum;
    Frame frame;
    Tables tables;
    uint32_t chance[MOST_CONTEXTS], side[MOST_CONTEXTS];
    uint8_t symbol_at[8][4096];  /* by a state's last 12 bits */
    char has_symbols[8];
    const uint8_t **part;        /* where each begins */
    const uint8_t *sizes;
    int64_t *first;              /* entry of each part */
    int64_t *starts;
    uint8_t *offsets;
    float *values;
    int *wrong;                  /* of each part */
} Unpack;

typedef struct {
    const uint8_t *at, *end;
    uint64_t held;
    int length;
} Bits;

/* -> the next bits, at most 32; `*wrong` if there are none */
static inline uint64_t take_bits(Bits *b, int size, int *wrong) {
    while (b->length < size) {
        if (b->at == b->end) { *wrong = SHORT; return 0; }
        b->held |= (uint64_t)*b->at++ << b->length;
        b->length += 8;
    }
    uint64_t taken = b->held & (((uint64_t)1 << size) - 1);
    b->held >>= size;
    b->length -= size;
    return taken;
}

/* Takes one symbol out of a state. */
static inline uint64_t advance(uint64_t x, uint32_t start, uint32_t share, int scale, const uint8_t **words,
                               const uint8_t *end, int *wrong) {
    x = share * (x >> scale) + (x & (((uint64_t)1 << scale) - 1)) - start;
    if (x < LOW) {
        if (*words == end) { *wrong = SHORT; return LOW; }
        x = x << 32 | get32(*words);
        *words += 4;
    }
    return x;
}

static inline uint64_t take_yes_or_no(uint64_t x, uint32_t chance, int *yes, const uint8_t **words, const uint8_t *end,
                                      int *wrong) {
    *yes = (x & 0xFFFF) < chance;
    return advance(x, *yes ? 0 : chance, *yes ? chance : 65536 - chance, 16, words, end, wrong);
}

static float value_of(int symbol, View v, int near, const Frame *f, Bits *plain, int *wrong) {
    if (symbol == ESCAPE) return from_bits((uint32_t)take_bits(plain, 32, wrong));
    int b = symbol % BUCKETS, size = b < 2 ? 0 : b / 2 - 1;
    int64_t x = b < 2 ? b : (int64_t)(2 + b % 2) << size, least = least_sent(v, near, f);
    x += (int64_t)take_bits(plain, size, wrong);
    int64_t m = symbol < BUCKETS ? least + x : least - x - 1;
    if (m < 0 || m >= (int64_t)1 << (52 - f->shift)) { *wrong = BAD_VALUE; return 0; }
    float a = (float)((double)(m << f->shift) * half_ulp(v.exponent - 151));
    return from_bits(bits(a) | ((uint32_t)near == v.negative ? 0x80000000 : 0));
}

static int unpack_part(Unpack *c, int64_t p) {
    const Frame *f = &c->frame;
    const Tables *t = &c->tables;
    const uint8_t *at = c->part[p];
    uint32_t entries = get32(c->sizes + SIZES * p), word_count = get32(c->sizes + SIZES * p + 4);
    uint64_t state[LANES];
    memcpy(state, at, STATES);
    for (int l = 0; l < LANES; l++) if (state[l] < LOW || state[l] >> 63) return BAD_STATE;
    at += STATES;
    Bits plain = {at, at + get32(c->sizes + SIZES * p + 8), 0, 0};
    const uint8_t *words = plain.end, *end = words + 4 * (size_t)word_count;
    uint16_t context[BLOCK];
    uint8_t active[BLOCK], here[BLOCK];
    int64_t entry = c->first[p], last = entry + entries, blocks = blocks_of(c->n);
    int wrong = FINE;
    for (int64_t b = p * PART_BLOCKS; b < smaller((p + 1) * PART_BLOCKS, blocks); b++) {
        int64_t first = b * BLOCK;
        int n = (int)smaller(BLOCK, c->n - first), turns = 0, count = 0;
        contexts_of(c->anchor + first, c->momentum ? c->momentum + first : NULL, n, f, context);
        for (int i = 0; i < n; i++) {
            active[turns & 255] = (uint8_t)i;
            turns += c->chance[context[i]] != 0;
        }
        for (int turn = 0; turn < turns; turn++) {
            int yes;
            state[turn % LANES] = take_yes_or_no(state[turn % LANES], c->chance[context[active[turn]]], &yes, &words, end, &wrong);
            here[count & 255] = active[turn];
            count += yes;
        }
        if (wrong || count > last - entry) return wrong ? wrong : PART_COUNTS;
        float *values = c->values + entry;
        memcpy(c->offsets + entry, here, (size_t)count);
        uint32_t worst = 0;
        for (int j = 0; j < count && !wrong; j++) {
            int near, i = here[j], level = level_of(context[i], f), symbol;
            uint64_t x = take_yes_or_no(state[j % LANES], c->side[context[i]], &near, &words, end, &wrong);
            if (!c->has_symbols[level]) return NO_SYMBOLS;
            symbol = c->symbol_at[level][x & 4095];
            state[j % LANES] = advance(x, t->start[level][symbol], t->share[level][symbol], 12, &words, end, &wrong);
            values[j] = value_of(symbol, view(c->anchor[first + i], f->mantissa, f->emin), near, f, &plain, &wrong);
            uint32_t a = bits(values[j]) & 0x7FFFFFFF;
            worst = a > worst ? a : worst;
        }
        if (wrong || worst >= 0x7F800000) return wrong ? wrong : NOT_FINITE;
        entry += count;
        c->starts[b + 1] = entry;
    }
    if (entry != last) return PART_COUNTS;
    for (int l = 0; l < LANES; l++) if (state[l] != LOW) return LEFT_OVER;
    return words == end && plain.at == plain.end && plain.length < 8 && !plain.held ? FINE : LEFT_OVER;
}

static void *unpack_parts(void *argument) {
    Share *share = argument;
    Unpack *c = (Unpack *)(intptr_t)share->call;
    for (int64_t p = share->first; p < share->last; p++) c->wrong[p] = unpack_part(c, p);
    return NULL;
}

/* -> whether all set bits mean something */
static int read_bitmap(const uint8_t *at, int size, uint8_t *set) {
    for (int k = 0; k < size; k++) set[k] = at[k / 8] >> k % 8 & 1;
    return size % 8 == 0 || at[size / 8] >> size % 8 == 0;
}

/* The head and the tables. -> what is wrong with them; `*at` moves past them */
static int read_head(Unpack *c, const uint8_t **at_, const uint8_t *end) {
    const uint8_t *at = *at_;
    Frame *f = &c->frame;
    uint8_t set[MOST_CONTEXTS];
    if (end - at < HEAD) return SHORT;
    *f = (Frame){at[0], (int8_t)at[1], get16(at + 2), get32(at + 4), at[8], at[9], at[10],
                 (int16_t)get16(at + 12), (int16_t)get16(at + 14), (int16_t)get16(at + 16)};
    int format = f->mantissa << 8 | at[1];
    if (format != (7 << 8 | 130) && format != (10 << 8 | 242) && format != (3 << 8 | 250) && format != (2 << 8 | 242))
        return HEAD_RANGE;
    if (f->levels > 3 || f->pulls > 3 || f->shift > 31 || f->least > (uint32_t)1 << 31 || at[11] || at[18] || at[19])
        return HEAD_RANGE;
    if (f->pulls && !c->momentum) return NO_MOMENTUM;
    at += HEAD;

    int contexts = contexts_in(f), used = 0;
    if (end - at < contexts / 8) return SHORT;
    read_bitmap(at, contexts, set);
    at += contexts / 8;
    for (int k = 0; k < contexts; k++) used += set[k];
    if (end - at < 2 * used) return SHORT;
    for (int k = 0; k < contexts; k++)
        if (set[k]) {
            if (!at[0] || !at[used]) return NO_CHANCE;
            c->chance[k] = probability(at[0]), c->side[k] = probability(at[used]);
            at++;
        }
    at += used;
    for (int l = 0; l < 8 >> f->levels; l++) {
        int sum = 0;
        if (end - at < BITMAP) return SHORT;
        if (!read_bitmap(at, SYMBOLS, set)) return STRAY_BITS;
        at += BITMAP;
        for (int s = 0; s < SYMBOLS; s++)
            if (set[s]) {
                if (end - at < 2) return SHORT;
                int share = (int)get16(at);
                at += 2;
                if (!share || sum + share > 4096) return BAD_SHARES;
                memset(c->symbol_at[l] + sum, s, (size_t)share);
                c->tables.share[l][s] = (uint16_t)share;
                sum += share;
            }
        if (sum && sum != 4096) return BAD_SHARES;
        c->has_symbols[l] = sum != 0;
    }
    add_starts(&c->tables, 8 >> f->levels);
    *at_ = at;
    return FINE;
}

/* Where the parts and their entries begin. -> what is wrong with their sizes */
static int read_sizes(Unpack *c, const uint8_t *at, const uint8_t *end, int64_t parts, int64_t count) {
    if (end - at < parts * SIZES) return SHORT;
    c->sizes = at;
    at += parts * SIZES;
    c->first[0] = 0;
    for (int64_t p = 0; p < parts; p++) {
        const uint8_t *s = c->sizes + SIZES * p;
        uint64_t size = STATES + 4 * (uint64_t)get32(s + 4) + get32(s + 8);
        if ((uint64_t)(end - at) < size) return SHORT;
        c->part[p] = at;
        at += size;
        c->first[p + 1] = c->first[p] + get32(s);
        if (c->first[p + 1] > count) return PART_COUNTS;
    }
    return c->first[parts] != count ? PART_COUNTS : at != end ? LEFT_OVER : FINE;
}

/* The `count` entries of a frame of `size` bytes, to `starts`, `offsets` and `values`. -> what is wrong, or FINE */
int loco_unpack(const uint8_t *body, int64_t size, int64_t count, int64_t n, const float *anchor, const float *momentum,
                int threads, int64_t *starts, uint8_t *offsets, float *values) {
    int64_t parts = parts_of(n);
    Unpack *c = calloc(1, sizeof(Unpack));
    const uint8_t **part = calloc((size_t)parts, sizeof *part);
    int64_t *first = calloc((size_t)parts + 1, 8);
    int *wrong = calloc((size_t)parts, sizeof(int)), found = NO_MEMORY;
    if (c && part && first && wrong) {
        c->n = n, c->anchor = anchor, c->momentum = momentum, c->part = part, c->first = first;
        c->starts = starts, c->offsets = offsets, c->values = values, c->wrong = wrong;
        const uint8_t *at = body, *end = body + size;
        found = read_head(c, &at, end);
        if (!found) found = read_sizes(c, at, end, parts, count);
        if (!found) {
            Share shares[MAX_THREADS];
            starts[0] = 0;
            share_among((int)smaller(smaller(at_least(threads, 1), parts), MAX_THREADS), unpack_parts, c, parts, shares);
            for (int64_t p = parts - 1; p >= 0; p--) if (wrong[p]) found = wrong[p];
        }
    }
    free(c), free(part), free(first), free(wrong);
    return found;
}
