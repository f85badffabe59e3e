/* Unpacks frames of the tight code, of bytes that anybody may have made. */

#include "tight.h"

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
    if (b->end - b->at >= 8) {
        uint64_t next;
        int bytes = (63 - b->length) / 8;  /* that fit, at most 7 */
        memcpy(&next, b->at, 8);
        b->held |= (next & (((uint64_t)1 << 8 * bytes) - 1)) << b->length;
        b->at += bytes, b->length += 8 * bytes;
    } else
        for (; b->length < size; b->length += 8) {
            if (b->at == b->end) { *wrong = SHORT; return 0; }
            b->held |= (uint64_t)*b->at++ << b->length;
        }
    uint64_t taken = b->held & (((uint64_t)1 << size) - 1);
    b->held >>= size;
    b->length -= size;
    return taken;
}

static inline uint64_t refilled(uint64_t x, const uint8_t **words, const uint8_t *end, int *wrong) {
    if (x < LOW) {
        if (*words == end) { *wrong = SHORT; return LOW; }
        x = x << 32 | get32(*words);
        *words += 4;
    }
    return x;
}

/* Takes one symbol out of a state. */
static inline uint64_t advance(uint64_t x, uint32_t start, uint32_t share, int scale, const uint8_t **words,
                               const uint8_t *end, int *wrong) {
    return refilled(share * (x >> scale) + (x & (((uint64_t)1 << scale) - 1)) - start, words, end, wrong);
}

static inline uint64_t take_yes_or_no(uint64_t x, uint32_t chance, int *yes, const uint8_t **words, const uint8_t *end,
                                      int *wrong) {
    /* Nobody can foretell it, so there is no branch on it. */
    uint32_t is = (x & 0xFFFF) < chance, no = is - 1;
    *yes = (int)is;
    return advance(x, no & chance, (no & (65536 - 2 * chance)) + chance, 16, words, end, wrong);
}

#if defined(__AVX2__)
/* By a mask of four questions: where their places are among the bytes, and how many. */
typedef struct {
    uint32_t bytes;
    int count;
} Chosen;

static const Chosen chosen_of[16] = {
    {0x80808080, 0}, {0x80808002, 1}, {0x80808006, 1}, {0x80800602, 2}, {0x8080800A, 1}, {0x80800A02, 2},
    {0x80800A06, 2}, {0x800A0602, 3}, {0x8080800E, 1}, {0x80800E02, 2}, {0x80800E06, 2}, {0x800E0602, 3},
    {0x80800E0A, 2}, {0x800E0A02, 3}, {0x800E0A06, 3}, {0x0E0A0602, 4}};

/* As take_yes_or_no, of all states at once. `asked`: the chance of yes, and above 16 bits the place, which is written
 * to `here` if it is yes. -> how many are */
static inline int take_four(uint64_t *state, const uint32_t *asked, int turns, uint8_t *here,
                            const uint8_t **words, const uint8_t *end, int *wrong) {
    __m256i x = _mm256_loadu_si256((const __m256i *)(void *)state), low = _mm256_set1_epi64x((int64_t)LOW);
    int count = 0;
    for (int turn = 0; turn < turns; turn += LANES) {
        __m128i four = _mm_loadu_si128((const __m128i *)(const void *)(asked + turn));
        __m256i p = _mm256_and_si256(_mm256_cvtepu32_epi64(four), _mm256_set1_epi64x(0xFFFF));
        __m256i rest = _mm256_and_si256(x, _mm256_set1_epi64x(0xFFFF)), times = _mm256_srli_epi64(x, 16);
        __m256i yes = _mm256_cmpgt_epi64(p, rest), start = _mm256_andnot_si256(yes, p);
        __m256i share = _mm256_blendv_epi8(_mm256_sub_epi64(_mm256_set1_epi64x(65536), p), p, yes);
        __m256i above = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(times, 32), share), 32);
        x = _mm256_add_epi64(_mm256_add_epi64(_mm256_mul_epu32(times, share), above), _mm256_sub_epi64(rest, start));
        Chosen chosen = chosen_of[_mm256_movemask_pd(_mm256_castsi256_pd(yes))];
        int32_t found = _mm_cvtsi128_si32(_mm_shuffle_epi8(four, _mm_cvtsi32_si128((int)chosen.bytes)));
        memcpy(here + count, &found, 4);
        count += chosen.count;
        __m256i empty = _mm256_cmpgt_epi64(low, x);
        if (__builtin_expect(_mm256_movemask_epi8(empty) != 0, 0)) {
            _mm256_storeu_si256((__m256i *)(void *)state, x);
            for (int l = 0; l < LANES; l++) state[l] = refilled(state[l], words, end, wrong);
            x = _mm256_loadu_si256((const __m256i *)(void *)state);
        }
    }
    _mm256_storeu_si256((__m256i *)(void *)state, x);
    return count;
}
#else
static inline int take_four(uint64_t *state, const uint32_t *asked, int turns, uint8_t *here,
                            const uint8_t **words, const uint8_t *end, int *wrong) {
    /* Indices that the compiler knows keep the states in registers. */
    uint64_t s[LANES] = {state[0], state[1], state[2], state[3]};
    int count = 0;
    for (int turn = 0; turn < turns; turn += LANES)
        for (int l = 0; l < LANES; l++) {
            int yes;
            s[l] = take_yes_or_no(s[l], asked[turn + l] & 0xFFFF, &yes, words, end, wrong);
            here[count & 255] = (uint8_t)(asked[turn + l] >> 16);
            count += yes;
        }
    memcpy(state, s, sizeof s);
    return count;
}
#endif

static float value_of(int symbol, View v, int near, const Frame *f, Bits *plain, int *wrong) {
    if (symbol == ESCAPE) return from_bits((uint32_t)take_bits(plain, 32, wrong));
    /* Nobody can foretell the bucket, so there is no branch on it. */
    int64_t below = -(int64_t)(symbol >= BUCKETS), least = least_sent(v, near, f);
    int b = symbol - (BUCKETS & (int)below), size = at_least(b / 2 - 1, 0);
    int64_t x = (int64_t)(b - 2 * size) << size;
    x += (int64_t)take_bits(plain, size, wrong);
    int64_t m = least + (x ^ below);  /* − x − 1 of the latter */
    if (m < 0 || m >= (int64_t)1 << (52 - f->shift)) { *wrong = BAD_VALUE; return 0; }
    float a = (float)((double)(m << f->shift) * half_ulp(v.exponent - 151));
    return from_bits(bits(a) | ((uint32_t)near ^ v.negative ^ 1) << 31);
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
    uint32_t asked[BLOCK];
    uint8_t here[BLOCK + LANES];
    int64_t entry = c->first[p], last = entry + entries, blocks = blocks_of(c->n);
    int wrong = FINE;
    for (int64_t b = p * PART_BLOCKS; b < smaller((p + 1) * PART_BLOCKS, blocks); b++) {
        int64_t first = b * BLOCK;
        int n = (int)smaller(BLOCK, c->n - first), turns = 0, count = 0;
        contexts_of(c->anchor + first, c->momentum ? c->momentum + first : NULL, n, f, context);
        for (int i = 0; i < n; i++) {
            uint32_t chance = c->chance[context[i]];
            asked[turns & 255] = (uint32_t)i << 16 | chance;
            turns += chance != 0;
        }
        int whole = turns / LANES * LANES;
        count = take_four(state, asked, whole, here, &words, end, &wrong);
        for (int turn = whole; turn < turns; turn++) {
            int yes;
            uint64_t *x = &state[turn % LANES];
            *x = take_yes_or_no(*x, asked[turn] & 0xFFFF, &yes, &words, end, &wrong);
            here[count & 255] = (uint8_t)(asked[turn] >> 16);
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
