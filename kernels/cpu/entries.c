/* What an exchange does with entries, bit for bit as in ../reference_entries.py: adding up several sites', and checking
 * a peer's. */

#include "economies.h"

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

/* The marks, each 0 or 1, of eight elements as bits, the first one lowest; and no marks any more. */
static inline uint32_t take_marks(uint8_t *marks) {
    uint64_t eight;
    memcpy(&eight, marks, 8);
    memset(marks, 0, 8);
    return (uint32_t)((eight * 0x0102040810204080u) >> 56);
}

/* The sums of a block. `total` and `marks` are all zeros, before and after. -> how many there are */
static inline int add_block(const Sum *c, int64_t block, float *total, uint8_t *marks, uint8_t *offsets, float *values) {
    const Entries *only = NULL;
    int some = 0;
    for (int64_t r = 0; r < c->contributions; r++) {
        const Entries *e = &c->contribution[r];
        if (e->starts[block] == e->starts[block + 1]) continue;
        only = e;
        some++;
    }
    if (!some) return 0;
    if (some == 1) {
        int64_t first = only->starts[block], count = only->starts[block + 1] - first;
        memcpy(offsets, only->offsets + first, (size_t)count);
        for (int64_t k = 0; k < count; k++) values[k] = 0.0f + only->values[first + k];
        return (int)count;
    }
    for (int64_t r = 0; r < c->contributions; r++) {
        const Entries *e = &c->contribution[r];
        for (int64_t k = e->starts[block]; k < e->starts[block + 1]; k++) {
            int i = e->offsets[k];
            marks[i] = 1;
            total[i] += e->values[k];
        }
    }
    int count = 0;
    for (int first = 0; first < BLOCK; first += 64) {
        uint64_t left = 0;
        for (int i = 0; i < 64; i += 8) left |= (uint64_t)take_marks(marks + first + i) << i;
        for (; left; left &= left - 1) {
            int i = first + __builtin_ctzll(left);
            offsets[count] = (uint8_t)i;
            values[count++] = total[i];
            total[i] = 0.0f;
        }
    }
    return count;
}

/* Each sum is written to the next place of both rooms, and one of them moves on. */
static void split_block(const Sum *c, int64_t block, int count, const uint8_t *offsets, const float *values, int64_t *next) {
    const float *theta = c->theta + block * BLOCK;
    const Room *leave = &c->room[0], *stay = &c->room[1];
    int64_t leaving = next[0], staying = next[1];
    int above[BLOCK];
    for (int k = 0; k < count; k++) above[k] = is_above(values[k], c->margin, power_of(theta[offsets[k]]));
    for (int k = 0; k < count; k++) {
        leave->offsets[leaving] = stay->offsets[staying] = offsets[k];
        leave->values[leaving] = stay->values[staying] = values[k];
        leaving += above[k];
        staying += 1 - above[k];
    }
    next[0] = leaving, next[1] = staying;
}

static void *add_share(void *argument) {
    Share *share = argument;
    const Sum *c = share->call;
    float total[BLOCK] = {0}, values[BLOCK];
    uint8_t marks[BLOCK] = {0}, offsets[BLOCK];
    int64_t begin = entries_before(c, share->first), next[2] = {begin, begin};
    for (int64_t b = share->first; b < share->last; b++) {
        if (c->rooms == 2) {
            int count = add_block(c, b, total, marks, offsets, values);
            split_block(c, b, count, offsets, values, next);
            c->room[1].starts[b + 1] = next[1];
        } else
            next[0] += add_block(c, b, total, marks, c->room[0].offsets + next[0], c->room[0].values + next[0]);
        c->room[0].starts[b + 1] = next[0];
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
