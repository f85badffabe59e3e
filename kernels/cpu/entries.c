/* What an exchange does with entries, bit for bit as in ../reference_entries.py: adding up several sites', splitting
 * their sums, and checking a peer's. */

#include "economies.h"

/* ---- adding up: counted first, so that the sum takes no more memory than it has entries ---- */

typedef struct {
    int64_t n, contributions;
    const Entries *contribution;
    int64_t *starts;
    uint8_t *offsets;
    float *values;
} Sum;

enum { WORDS = BLOCK / 64 };

/* Which elements of a block any contribution has, a bit each. */
static int64_t count_block(const Sum *c, int64_t block) {
    uint64_t any[WORDS] = {0};
    for (int64_t r = 0; r < c->contributions; r++) {
        const Entries *e = &c->contribution[r];
        for (int64_t k = e->starts[block]; k < e->starts[block + 1]; k++) any[e->offsets[k] >> 6] |= 1ull << (e->offsets[k] & 63);
    }
    int64_t count = 0;
    for (int w = 0; w < WORDS; w++) count += __builtin_popcountll(any[w]);
    return count;
}

/* Each block's count, to the place behind the one of its start. */
static void *count_share(void *argument) {
    Share *share = argument;
    const Sum *c = share->call;
    for (int64_t b = share->first; b < share->last; b++) c->starts[b + 1] = count_block(c, b);
    return NULL;
}

static void *add_share(void *argument) {
    Share *share = argument;
    const Sum *c = share->call;
    float total[BLOCK] = {0};
    for (int64_t b = share->first; b < share->last; b++) {
        uint64_t any[WORDS] = {0};
        for (int64_t r = 0; r < c->contributions; r++) {
            const Entries *e = &c->contribution[r];
            for (int64_t k = e->starts[b]; k < e->starts[b + 1]; k++) {
                int i = e->offsets[k];
                any[i >> 6] |= 1ull << (i & 63);
                total[i] += e->values[k];
            }
        }
        int64_t k = c->starts[b];
        for (int w = 0; w < WORDS; w++)
            for (uint64_t left = any[w]; left; left &= left - 1) {
                int i = 64 * w + __builtin_ctzll(left);
                c->offsets[k] = (uint8_t)i;
                c->values[k++] = total[i];
                total[i] = 0.0f;
            }
    }
    return NULL;
}

/* The sum may lie where a contribution does. */
static void *add_whole_share(void *argument) {
    Share *share = argument;
    const Sum *c = share->call;
    float total[BLOCK];
    for (int64_t b = share->first; b < share->last; b++) {
        int64_t first = b * BLOCK;
        int n = (int)smaller(BLOCK, c->n - first);
        memset(total, 0, sizeof total);  /* 0 + −0 is +0 */
        for (int64_t r = 0; r < c->contributions; r++) {
            const float *values = c->contribution[r].values + first;
            for (int i = 0; i < n; i++) total[i] += values[i];
        }
        memcpy(c->values + first, total, 4 * (size_t)n);
    }
    return NULL;
}

/* From each block's count, behind the place of its start, to the starts. -> how many there are in all */
static int64_t starts_from_counts(int64_t *starts, int64_t blocks) {
    starts[0] = 0;
    for (int64_t b = 0; b < blocks; b++) starts[b + 1] += starts[b];
    return starts[blocks];
}

/* `starts` of the sum of some contributions, none of them whole. -> how many entries it has */
int64_t loco_count_union(int64_t n, int64_t contributions, const Entries *contribution, int threads, int64_t *starts) {
    Sum call = {.n = n, .contributions = contributions, .contribution = contribution, .starts = starts};
    int64_t blocks = blocks_of(n);
    Share shares[MAX_THREADS];
    share_out(count_share, &call, blocks, threads, shares);
    return starts_from_counts(starts, blocks);
}

/* The sum itself. Without `starts` all contributions are whole, and so is it. */
void loco_add_up(int64_t n, int64_t contributions, const Entries *contribution, int threads, int64_t *starts,
                 uint8_t *offsets, float *values) {
    Sum call = {n, contributions, contribution, starts, offsets, values};
    Share shares[MAX_THREADS];
    share_out(starts ? add_share : add_whole_share, &call, blocks_of(n), threads, shares);
}

/* ---- splitting sums: those larger than some ulps leave, the others stay. Counted first, as above ---- */

typedef struct {
    Entries sums;
    const float *theta;
    float margin;
    uint8_t *leaves;     /* whether, for each entry: θ is read once, since its lines are seldom in a cache */
    int64_t *starts[2];  /* of what stays, and of what leaves */
    uint8_t *offsets[2];
    float *values[2];
} Split;

static void *count_leaving_share(void *argument) {
    Share *share = argument;
    const Split *c = share->call;
    for (int64_t b = share->first; b < share->last; b++) {
        int64_t first = c->sums.starts[b], last = c->sums.starts[b + 1], count = 0;
        const float *theta = c->theta + b * BLOCK;
        for (int64_t k = first; k < last; k++) {
            float power = power_of(theta[c->sums.offsets[k]]);
            count += c->leaves[k - c->sums.starts[0]] = is_above(c->sums.values[k], c->margin, power);
        }
        c->starts[0][b + 1] = last - first - count;
        c->starts[1][b + 1] = count;
    }
    return NULL;
}

static void *split_share(void *argument) {
    Share *share = argument;
    const Split *c = share->call;
    for (int64_t b = share->first; b < share->last; b++) {
        int64_t next[2] = {c->starts[0][b], c->starts[1][b]};
        for (int64_t k = c->sums.starts[b]; k < c->sums.starts[b + 1]; k++) {
            int which = c->leaves[k - c->sums.starts[0]];
            c->offsets[which][next[which]] = c->sums.offsets[k];
            c->values[which][next[which]++] = c->sums.values[k];
        }
    }
    return NULL;
}

/* Which entries leave, and `starts` of both parts. -> how many leave */
int64_t loco_count_leaving(int64_t n, const Entries *sums, int threads, uint8_t *leaves, const float *theta,
                           float margin, int64_t *stay_starts, int64_t *leave_starts) {
    Split call = {*sums, theta, margin, leaves, {stay_starts, leave_starts}, {NULL}, {NULL}};
    int64_t blocks = blocks_of(n);
    Share shares[MAX_THREADS];
    share_out(count_leaving_share, &call, blocks, threads, shares);
    starts_from_counts(stay_starts, blocks);
    return starts_from_counts(leave_starts, blocks);
}

/* The parts themselves. */
void loco_split_sums(int64_t n, const Entries *sums, int threads, uint8_t *leaves, const Entries *stay,
                     const Entries *leave) {
    Split call = {
        *sums, NULL, 0.0f, leaves,
        {(int64_t *)stay->starts, (int64_t *)leave->starts},
        {(uint8_t *)stay->offsets, (uint8_t *)leave->offsets},
        {(float *)stay->values, (float *)leave->values},
    };
    Share shares[MAX_THREADS];
    share_out(split_share, &call, blocks_of(n), threads, shares);
}

/* ---- checking: of bytes that anybody may have made ---- */

typedef struct {
    const char *counts;
    int wide;  /* counts have 2 bytes, else 1 */
    const uint8_t *offsets;
    const char *values;  /* FP32, at any address */
    int64_t *starts;
} Check;

static inline int64_t count_at(const Check *c, int64_t block) {
    int16_t count;
    if (!c->wide) return (uint8_t)c->counts[block];
    memcpy(&count, c->counts + 2 * block, 2);
    return count;
}

/* How many entries some blocks have, to `share->bad`; −1 if one can't have what it says. */
static void *sum_counts(void *argument) {
    Share *share = argument;
    const Check *c = share->call;
    int64_t sum = 0;
    int bad = 0;
    for (int64_t b = share->first; b < share->last; b++) {
        int64_t count = count_at(c, b);
        bad |= (count < 0) | (count > BLOCK);
        sum += count;
    }
    share->bad = bad ? -1 : sum;
    return NULL;
}

/* The entries `first` … `last`: how many positions are at or below the one before them, and whether all is finite. */
static int64_t falls_in(const Check *c, int64_t first, int64_t last, int *infinite) {
    uint32_t falls = 0, worst = 0;
    for (int64_t k = first ? first : 1; k < last; k++) falls += c->offsets[k] <= c->offsets[k - 1];
    for (int64_t k = first; k < last; k++) {
        uint32_t u;
        memcpy(&u, c->values + 4 * k, 4);
        u &= 0x7FFFFFFF;
        worst = u > worst ? u : worst;
    }
    *infinite |= worst >= 0x7F800000;
    return falls;
}

/* In order means: no position is at or below the one before it but at the beginning of a block. */
static void *check_share(void *argument) {
    enum { AT_ONCE = 64 };  /* blocks: what they hold stays in the cache */
    Share *share = argument;
    const Check *c = share->call;
    int64_t next = c->starts[share->first];
    int infinite = 0, disorder = 0;
    for (int64_t b = share->first; b < share->last;) {
        int64_t first = next, falls = 0;
        for (int64_t stop = smaller(b + AT_ONCE, share->last); b < stop; b++) {
            int64_t count = count_at(c, b);
            c->starts[b] = next;
            if (count && next) falls += c->offsets[next] <= c->offsets[next - 1];
            next += count;
        }
        disorder |= falls_in(c, first, next, &infinite) != falls;
    }
    share->bad = disorder | infinite;
    return NULL;
}

/* Writes `starts` of `count` entries of a vector of n elements, given how many each block has. -> whether they can be
 * such entries; what is wrong with them is for the reference to say */
int loco_check_blocks(int64_t blocks, const char *counts, int wide, int64_t count, const uint8_t *offsets,
                      const char *values, int64_t n, int threads, int64_t *starts) {
    Check call = {counts, wide, offsets, values, starts};
    Share shares[MAX_THREADS];
    int shared = share_out(sum_counts, &call, blocks, threads, shares);
    int64_t sum = 0, bad = 0;
    for (int k = 0; k < shared; k++) {
        if (shares[k].bad < 0) return 0;
        starts[shares[k].first] = sum;
        sum += shares[k].bad;
    }
    starts[blocks] = sum;
    if (sum != count) return 0;
    shared = share_out(check_share, &call, blocks, threads, shares);
    for (int k = 0; k < shared; k++) bad |= shares[k].bad;
    int last_block_has_some = count && starts[blocks - 1] < count;
    return !bad && !(last_block_has_some && n % BLOCK && offsets[count - 1] >= n % BLOCK);
}
