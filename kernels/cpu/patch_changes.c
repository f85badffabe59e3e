/* What changed between two versions of some weights, and the changes brought into weights: ../reference_patch.py. */

#include "patch.h"

typedef struct {
    int64_t n;
    Pieces old, fresh;  /* of the same sizes */
    int width, from_float;
    int64_t *positions;
    char *bits;
} FindChanges;

/* Which of two blocks' elements differ: a byte each, of whole rows. */
static inline void mark_changes(const char *old, const char *fresh, int n, int width, uint8_t *restrict differs) {
    if (n < BLOCK) memset(differs + n, 0, (size_t)(BLOCK - n));
    if (width == 2) for (int i = 0; i < n; i++) differs[i] = read_bits(old + 2 * i, 2) != read_bits(fresh + 2 * i, 2);
    else if (width == 1) for (int i = 0; i < n; i++) differs[i] = old[i] != fresh[i];
    else for (int i = 0; i < n; i++) differs[i] = read_bits(old + 4 * i, 4) != read_bits(fresh + 4 * i, 4);
}

/* FP32 cast to the format of the old weights. */
static inline const char *cast_run(const char *fresh, int n, int to, uint16_t *restrict out) {
    if (to == BFLOAT16) for (int i = 0; i < n; i++) out[i] = float_to_bf16(from_bits(read_bits(fresh + 4 * i, 4)));
    else for (int i = 0; i < n; i++) out[i] = float_to_fp16(from_bits(read_bits(fresh + 4 * i, 4)));
    return (const char *)out;
}

static void *find_changes(void *argument) {
    Share *share = argument;
    const FindChanges *c = share->call;
    int64_t piece = piece_at(&c->old, share->first * BLOCK), k = share->first * BLOCK, last;
    int64_t end = smaller(share->last * BLOCK, c->n);
    uint16_t cast[BLOCK];
    uint8_t differs[BLOCK];
    for (int64_t first = k; first < end; first = last) {
        int n = run_from(&c->old, &piece, first, smaller(first + BLOCK, end));
        last = first + n;
        const char *old = bits_at(&c->old, piece, first, c->width);
        const char *fresh = bits_at(&c->fresh, piece, first, c->from_float ? 4 : c->width);
        if (c->from_float) fresh = cast_run(fresh, n, c->from_float, cast);
        mark_changes(old, fresh, n, c->width, differs);
        for (int row = 0; row < n; row += ROW) {
            for (uint64_t changed = bits_of_bytes(differs + row, 0); changed; changed &= changed - 1, k++) {
                int i = row + __builtin_ctzll(changed);
                c->positions[k] = first + i;
                write_bits(c->bits + k * c->width, read_bits(fresh + i * c->width, c->width), c->width);
            }
        }
    }
    share->bad = k - share->first * BLOCK;
    return NULL;
}

/* `positions` and `bits` have room for n, of which only what is needed is touched. -> how many changed */
int64_t loco_patch_find(int64_t n, int64_t pieces, const int64_t *old, const int64_t *fresh, const int64_t *start,
                        const int32_t *dtype, int width, int from_float, int threads, int64_t *positions, char *bits) {
    FindChanges call = {.n = n, .old = {pieces, old, start, dtype}, .fresh = {pieces, fresh, start, dtype},
                        .width = width, .from_float = from_float, .positions = positions, .bits = bits};
    Share shares[MAX_THREADS];
    int count = n ? share_out(find_changes, &call, blocks_of(n), threads, shares) : 0;
    int64_t found = 0;
    for (int k = 0; k < count; k++) {
        int64_t begin = shares[k].first * BLOCK;
        memmove(positions + found, positions + begin, (size_t)shares[k].bad * 8);
        memmove(bits + found * width, bits + begin * width, (size_t)(shares[k].bad * width));
        found += shares[k].bad;
    }
    return found;
}

/* Σ over the elements of a piece, which are taken as words: as the digest of numbers.h, of one word each. */
static inline uint64_t term(uint32_t bits, uint32_t position) { return digest_words(&bits, 1, position); }

typedef struct {
    Pieces pieces;
    int width;
    const int64_t *positions;
    char *bits;
    uint64_t *change;  /* of each piece, for each share */
    int shares;
    int64_t entries;
} SwapBits;

enum { AHEAD = 16 };  /* changes: the weights lie far apart, and a memory access takes as long as so many of them */

static void *swap_bits(void *argument) {
    Share *share = argument;
    const SwapBits *c = share->call;
    const Pieces *p = &c->pieces;
    for (int64_t s = share->first; s < share->last; s++) {
        int64_t begin = c->entries * s / c->shares, end = c->entries * (s + 1) / c->shares;
        int64_t piece = begin < end ? piece_at(p, c->positions[begin]) : 0;
        uint64_t *change = c->change + s * p->count;
        for (int64_t k = begin; k < end; k++) {
            while (p->start[piece + 1] <= c->positions[k]) piece++;
            if (k + AHEAD < end) __builtin_prefetch(bits_at(p, piece, c->positions[k + AHEAD], c->width), 1);
            char *at = bits_at(p, piece, c->positions[k], c->width), *mine = c->bits + k * c->width;
            uint32_t old = read_bits(at, c->width), fresh = read_bits(mine, c->width);
            uint32_t position = (uint32_t)(c->positions[k] - p->start[piece]);
            change[piece] += term(fresh, position) - term(old, position);
            write_bits(at, fresh, c->width);
            write_bits(mine, old, c->width);
        }
    }
    return NULL;
}

/* Writes bits to some elements, and puts what was there in their place. `change` has a row of pieces for each share,
 * all zeros, in which these put what that adds to the pieces' digests. */
void loco_patch_swap(int64_t pieces, const int64_t *address, const int64_t *start, const int32_t *dtype, int width,
                     int64_t entries, const int64_t *positions, char *bits, int count, uint64_t *change) {
    SwapBits call = {{pieces, address, start, dtype}, width, positions, bits, change, count, entries};
    Share shares[MAX_THREADS];
    share_among(count, swap_bits, &call, count, shares);
}

typedef struct {
    Pieces old;
    int width;
    int64_t entries[2];  /* of the earlier changes, and of the later ones */
    const int64_t *positions[2];
    const char *bits[2];
    int64_t *out_positions;
    char *out_bits;
    int64_t *found;  /* by each share */
    int shares;
} MergeChanges;

/* How many positions come before one. */
static int64_t rank_of(const int64_t *positions, int64_t entries, int64_t position) {
    int64_t low = 0, high = entries;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (positions[middle] < position) low = middle + 1; else high = middle;
    }
    return low;
}

/* Where a share begins in both lists: at the same element, and evenly in the longer one. */
static void cut_lists(const MergeChanges *c, int64_t s, int64_t cut[2]) {
    int longer = c->entries[1] > c->entries[0];
    cut[longer] = c->entries[longer] * s / c->shares;
    cut[!longer] = cut[longer] == c->entries[longer] ? c->entries[!longer] : s == 0 ? 0
                 : rank_of(c->positions[!longer], c->entries[!longer], c->positions[longer][cut[longer]]);
}

static void *merge_changes(void *argument) {
    Share *share = argument;
    const MergeChanges *c = share->call;
    const int64_t *const earlier = c->positions[0], *const later = c->positions[1];
    for (int64_t s = share->first; s < share->last; s++) {
        int64_t at[2], end[2];
        cut_lists(c, s, at), cut_lists(c, s + 1, end);
        int64_t k = at[0] + at[1], begin = k, piece = -1;
        while (at[0] < end[0] || at[1] < end[1]) {
            int takes_later = at[0] == end[0] || (at[1] < end[1] && later[at[1]] <= earlier[at[0]]);
            int64_t position = takes_later ? later[at[1]] : earlier[at[0]];
            uint32_t fresh = read_bits(c->bits[takes_later] + at[takes_later] * c->width, c->width);
            if (takes_later && at[0] < end[0] && earlier[at[0]] == position) at[0]++;
            at[takes_later]++;
            if (piece < 0) piece = piece_at(&c->old, position);
            while (c->old.start[piece + 1] <= position) piece++;
            c->out_positions[k] = position;
            write_bits(c->out_bits + k * c->width, fresh, c->width);
            k += read_bits(bits_at(&c->old, piece, position, c->width), c->width) != fresh;
        }
        c->found[s] = k - begin;
    }
    return NULL;
}

/* `positions` and `bits` have room for all entries of both lists. -> how many there are then */
int64_t loco_patch_merge(int64_t pieces, const int64_t *address, const int64_t *start, const int32_t *dtype, int width,
                         int64_t earlier_entries, const int64_t *earlier, const char *earlier_bits, int64_t later_entries,
                         const int64_t *later, const char *later_bits, int count, int64_t *positions, char *bits) {
    int64_t found[MAX_THREADS], cut[2], total = 0;
    MergeChanges call = {{pieces, address, start, dtype}, width, {earlier_entries, later_entries}, {earlier, later},
                         {earlier_bits, later_bits}, positions, bits, found, count};
    Share shares[MAX_THREADS];
    share_among(count, merge_changes, &call, count, shares);
    for (int s = 0; s < count; s++) {
        cut_lists(&call, s, cut);
        memmove(positions + total, positions + cut[0] + cut[1], (size_t)found[s] * 8);
        memmove(bits + total * width, bits + (cut[0] + cut[1]) * width, (size_t)(found[s] * width));
        total += found[s];
    }
    return total;
}

/* The bits of the elements `first` … `first` + n, at most a block. `piece` moves on to the last one's. */
static inline void load_bits(const Pieces *p, int64_t *piece, int64_t first, int n, int width, uint32_t *restrict out) {
    for (int64_t low = first, last = first + n; low < last;) {
        int run = run_from(p, piece, low, last);
        const char *at = bits_at(p, *piece, low, width);
        if (width == 2) for (int i = 0; i < run; i++) out[i] = read_bits(at + 2 * i, 2);
        else if (width == 1) for (int i = 0; i < run; i++) out[i] = read_bits(at + i, 1);
        else for (int i = 0; i < run; i++) out[i] = read_bits(at + 4 * i, 4);
        out += run, low += run;
    }
}

typedef struct {
    const char *at;
    int64_t n;
    int width;
} DigestBits;

static void *digest_bits(void *argument) {
    Share *share = argument;
    const DigestBits *c = share->call;
    uint32_t word[BLOCK];
    int64_t start[2] = {0, c->n}, address = (int64_t)(intptr_t)c->at, piece = 0;
    Pieces p = {1, &address, start, NULL};
    for (int64_t first = share->first * BLOCK; first < smaller(share->last * BLOCK, c->n); first += BLOCK) {
        int n = (int)smaller(BLOCK, c->n - first);
        load_bits(&p, &piece, first, n, c->width, word);
        share->digest += digest_words(word, n, (uint32_t)first);
    }
    return NULL;
}

uint64_t loco_patch_digest(const char *at, int64_t n, int width, int threads) {
    DigestBits call = {at, n, width};
    Share shares[MAX_THREADS];
    int count = n ? share_out(digest_bits, &call, blocks_of(n), threads, shares) : 0;
    uint64_t sum = 0;
    for (int k = 0; k < count; k++) sum += shares[k].digest;
    return sum;
}
