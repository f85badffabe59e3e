/* What an exchange does with entries, bit for bit as in ../reference_entries.py: adding up several sites', writing
 * them into a message, and checking a peer's. */

#include "economise.h"

/* ---- adding up ---- */

/* Where entries go that are yet to be found. */
typedef struct {
    int64_t *starts;
    uint8_t *offsets;
    float *values;
} Room;

typedef struct {
    int64_t n, contributions;
    const Entries *contribution;
    const float *theta;
    float margin;
    int rooms;  /* 2: what is at most `margin` ulp(θ) goes to the second one */
    Room room[2];
} Sum;

/* How many entries all contributions have before a block: what its sums need of a room begins there at the latest. */
static int64_t entries_before(const Sum *c, int64_t block) {
    int64_t count = 0;
    for (int64_t r = 0; r < c->contributions; r++) count += c->contribution[r].starts[block] - c->contribution[r].starts[0];
    return count;
}

/* The marks of a block, each 0 or 1, as bits; and no marks any more. */
static inline void take_all_marks(uint8_t *marks, uint64_t *marked) {
    for (int word = 0; word < BLOCK / 64; word++) {
        marked[word] = 0;
        for (int i = 0; i < 64; i += 8) {
            uint64_t eight;
            memcpy(&eight, marks + 64 * word + i, 8);
            marked[word] |= ((eight * 0x0102040810204080u) >> 56) << i;
        }
    }
    memset(marks, 0, BLOCK);
}

/* Marks and adds up the entries that some contributions have in a block. `total` and `marks` are all zeros before, and
 * `marks` after. */
static inline void add_block(const Sum *c, int64_t block, int64_t entries, float *total, uint8_t *marks, uint64_t *marked) {
    enum { FEW = 40 };  /* entries: to mark each as a bit is quicker than to look at all marks of the block */
    memset(marked, 0, BLOCK / 8);
    for (int64_t r = 0; r < c->contributions; r++) {
        const Entries *e = &c->contribution[r];
        int64_t first = e->starts[block], last = e->starts[block + 1];
        if (entries <= FEW)
            for (int64_t k = first; k < last; k++) marked[e->offsets[k] / 64] |= (uint64_t)1 << e->offsets[k] % 64;
        else
            for (int64_t k = first; k < last; k++) marks[e->offsets[k]] = 1;
        for (int64_t k = first; k < last; k++) total[e->offsets[k]] += e->values[k];
    }
    if (entries > FEW) take_all_marks(marks, marked);
}

/* Which of the marked sums are above `margin` ulp(θ). `marks` are all zeros, before and after. */
static inline void mark_large(const Sum *c, int64_t block, int64_t entries, const float *total, uint8_t *marks,
                              const uint64_t *marked, uint64_t *large) {
    enum { MANY = 24 };  /* entries: to look at all elements of the block, eight and more at a time, is quicker */
    const float *theta = c->theta + block * BLOCK;
    memset(large, 0, BLOCK / 8);
    if (entries >= MANY && c->n - block * BLOCK >= BLOCK) {
#if defined(__AVX2__)
        for (int i = 0; i < BLOCK; i += 8) {
            __m256 powers = powers_of(_mm256_loadu_si256((const __m256i *)(const void *)(theta + i)));
            large[i / 64] |= (uint64_t)are_above(_mm256_loadu_ps(total + i), c->margin, powers) << i % 64;
        }
#else
        for (int i = 0; i < BLOCK; i++) marks[i] = is_above(total[i], c->margin, power_of(theta[i])) != 0;
        take_all_marks(marks, large);
#endif
        for (int word = 0; word < BLOCK / 64; word++) large[word] &= marked[word];
        return;
    }
    for (int word = 0; word < BLOCK / 64; word++)
        for (uint64_t left = marked[word]; left; left &= left - 1) {
            int i = 64 * word + __builtin_ctzll(left);
            large[word] |= (uint64_t)(is_above(total[i], c->margin, power_of(theta[i])) != 0) << i % 64;
        }
}

/* The marked sums of a block go to the next places of a room, and leave zeros behind. -> the next place */
static inline int64_t take_sums(const uint64_t *marked, float *total, const Room *room, int64_t next) {
    for (int word = 0; word < BLOCK / 64; word++)
        for (uint64_t left = marked[word]; left; left &= left - 1) {
            int i = 64 * word + __builtin_ctzll(left);
            room->offsets[next] = (uint8_t)i;
            room->values[next++] = total[i];
            total[i] = 0.0f;
        }
    return next;
}

/* How many entries all contributions have in a block; and if one of them has them all, which. */
static inline int64_t entries_in(const Sum *c, int64_t block, const Entries **only) {
    int64_t entries = 0;
    int some = 0;
    for (int64_t r = 0; r < c->contributions; r++) {
        const Entries *e = &c->contribution[r];
        int64_t count = e->starts[block + 1] - e->starts[block];
        if (!count) continue;
        entries += count;
        *only = e;
        some++;
    }
    if (some != 1) *only = NULL;
    return entries;
}

static void *add_share(void *argument) {
    Share *share = argument;
    const Sum *c = share->call;
    float total[BLOCK] = {0};
    uint8_t marks[BLOCK] = {0};
    uint64_t marked[BLOCK / 64], large[BLOCK / 64], small[BLOCK / 64];
    int64_t begin = entries_before(c, share->first), next[2] = {begin, begin};
    const Room *leave = &c->room[0], *stay = &c->room[1];
    for (int64_t b = share->first; b < share->last; b++) {
        const Entries *only = NULL;
        int64_t entries = entries_in(c, b, &only);
        if (only && c->rooms == 1) {
            int64_t first = only->starts[b];
            memcpy(leave->offsets + next[0], only->offsets + first, (size_t)entries);
            for (int64_t k = 0; k < entries; k++) leave->values[next[0] + k] = 0.0f + only->values[first + k];
            next[0] += entries;
        } else if (entries) {
            add_block(c, b, entries, total, marks, marked);
            if (c->rooms == 1)
                next[0] = take_sums(marked, total, leave, next[0]);
            else {
                mark_large(c, b, entries, total, marks, marked, large);
                for (int word = 0; word < BLOCK / 64; word++) small[word] = marked[word] & ~large[word];
                next[0] = take_sums(large, total, leave, next[0]);
                next[1] = take_sums(small, total, stay, next[1]);
            }
        }
        leave->starts[b + 1] = next[0];
        if (c->rooms == 2) stay->starts[b + 1] = next[1];
    }
    return NULL;
}

/* Moves what each share found behind what the ones before it did. */
static void close_up(const Sum *c, const Room *room, int shared, const Share *shares) {
    room->starts[0] = 0;
    for (int k = 1; k < shared; k++) {
        int64_t first = shares[k].first, last = shares[k].last;
        int64_t to = room->starts[first], from = entries_before(c, first), count = room->starts[last] - from;
        memmove(room->offsets + to, room->offsets + from, (size_t)count);
        memmove(room->values + to, room->values + from, 4 * (size_t)count);
        for (int64_t b = first; b < last; b++) room->starts[b + 1] -= from - to;
    }
}

/* The sums of some contributions, none of them whole. Both rooms are for as many entries as all of these have; what is
 * at most `margin` ulp(θ) goes to `stay`. If there is no such room, nothing does, and θ is not read. */
void loco_add_up(int64_t n, int64_t contributions, const Entries *contribution, int threads, const float *theta,
                 float margin, const Room *leave, const Room *stay) {
    Sum call = {n, contributions, contribution, theta, margin, stay ? 2 : 1, {*leave}};
    Share shares[MAX_THREADS];
    if (stay) call.room[1] = *stay;
    int shared = share_out(add_share, &call, blocks_of(n), threads, shares);
    for (int r = 0; r < call.rooms; r++) close_up(&call, &call.room[r], shared, shares);
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
        memcpy(c->room[0].values + first, total, 4 * (size_t)n);
    }
    return NULL;
}

void loco_add_whole(int64_t n, int64_t contributions, const Entries *contribution, int threads, float *values) {
    Sum call = {n, contributions, contribution, NULL, 0.0f, 1, {{NULL, NULL, values}}};
    Share shares[MAX_THREADS];
    share_out(add_whole_share, &call, blocks_of(n), threads, shares);
}

/* ---- writing ---- */

typedef struct {
    const int64_t *starts;
    const uint8_t *offsets;
    const float *values;
    int wide;  /* counts have 2 bytes, else 1 */
    char *values_to, *offsets_to, *counts_to;
} Writing;

static void *write_share(void *argument) {
    Share *share = argument;
    const Writing *c = share->call;
    int64_t first = c->starts[share->first], count = c->starts[share->last] - first, before = first - c->starts[0];
    memcpy(c->values_to + 4 * before, c->values + first, 4 * (size_t)count);
    memcpy(c->offsets_to + before, c->offsets + first, (size_t)count);
    for (int64_t b = share->first; b < share->last; b++) {
        int16_t of_block = (int16_t)(c->starts[b + 1] - c->starts[b]);
        if (c->wide)
            memcpy(c->counts_to + 2 * b, &of_block, 2);
        else
            c->counts_to[b] = (char)of_block;
    }
    return NULL;
}

/* Writes values, offsets and how many entries each block has. There is room for counts of 2 bytes. -> bytes */
int64_t loco_write_blocks(int64_t blocks, const int64_t *starts, const uint8_t *offsets, const float *values,
                          int threads, char *room) {
    int64_t count = starts[blocks] - starts[0];
    Writing call = {starts, offsets, values, 0, room, room + 4 * count, room + 5 * count};
    Share shares[MAX_THREADS];
    for (int64_t b = 0; b < blocks; b++) call.wide |= starts[b + 1] - starts[b] > UINT8_MAX;
    share_out(write_share, &call, blocks, threads, shares);
    return 5 * count + (call.wide ? 2 : 1) * blocks;
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
