/* Encode, steps 2 to 5: what to send, the digest of θ and the first bad position, in one pass that writes nothing
 * of the state. And cross, which is what apply and encode do, and what overlapped rounds add to them, in one pass: a
 * block after the other, so that memory is read and written once. */

#define _DEFAULT_SOURCE  /* for madvise */
#include <stdlib.h>
#include <sys/mman.h>

#include "ahead.h"
#include "economise.h"
#include "steps.h"
#include "usual_block.h"

/* What overlapped rounds do to a block before it is encoded, and after. */
typedef struct {
    Apply apply;
    const Entries *sent;  /* at the boundary before; NULL: nothing */
    int64_t returns;
    const Entries *returned;  /* what e is given first */
    float beta_before, beta;
    int sends;            /* otherwise nothing is encoded */
} Boundary;

typedef struct {
    int64_t n;
    const float *anchor, *residual;
    Pieces pieces;
    int gate;
    float factor, gain, margin, fraction;  /* the last two of 2^(E − 127), as economies.h takes them; 0: off */
    int64_t *starts;
    uint8_t *offsets;
    float *values;
    /* Threads take chunks of blocks in order, and in order put down what they found. */
    int64_t chunk;
    pthread_mutex_t *lock;
    pthread_cond_t *moved_on;
    int64_t *taken, *put_down, *entries;
    const Boundary *boundary;  /* NULL: encode alone */
} Encode;

/* ---- a block ---- */

static inline __attribute__((always_inline)) void mark_visible(uint32_t *restrict mark, const float *restrict theta,
                                                              const float *restrict s, int n, float gain, int gate) {
    for (int i = 0; i < n; i++) mark[i] = visible(theta[i], s[i], gain, gate);
}

/* Packs a block's visible s and their offsets. May write one place past the last. -> how many */
static int pack(const float *theta, const float *s, int n, float gain, int gate, float *values, uint8_t *offsets) {
    uint32_t mark[BLOCK];
    switch (gate) {  /* each with its own loop, in which the gate is a constant */
    case GATE_BF16: mark_visible(mark, theta, s, n, gain, GATE_BF16); break;
    case GATE_FP16: mark_visible(mark, theta, s, n, gain, GATE_FP16); break;
    case GATE_E4M3: mark_visible(mark, theta, s, n, gain, GATE_E4M3); break;
    case GATE_E5M2: mark_visible(mark, theta, s, n, gain, GATE_E5M2); break;
    }
    int k = 0;
    for (int i = 0; i < n; i++) {
        values[k] = s[i];
        offsets[k] = (uint8_t)i;
        k += (int)mark[i];
    }
    return k;
}

/* The place of the first s that is infinite or NaN, or −1. */
static int first_bad(const float *s, int n) {
    uint32_t worst = 0;
    for (int i = 0; i < n; i++) {
        uint32_t a = bits(s[i]) & 0x7FFFFFFF;
        worst = a > worst ? a : worst;
    }
    if (worst >= 0x7F800000)
        for (int i = 0; i < n; i++)
            if ((bits(s[i]) & 0x7FFFFFFF) >= 0x7F800000) return i;
    return -1;
}

/* The visible entries of one block, packed into `values` and `offsets`. -> how many */
static int visible_of_block(Share *share, int64_t first, int64_t *piece, float *values, uint8_t *offsets) {
    const Encode *c = share->call;
    int64_t last = smaller(first + BLOCK, c->n);
    int n = (int)(last - first), count = -1;
    const float *theta = c->anchor + first;
#if defined(__AVX2__)
    if (c->gate != OPEN && c->residual && run_from(&c->pieces, piece, first, last) == BLOCK) {
        Pack *pack_it = usual[c->pieces.dtype[*piece]][c->gate];
        count = pack_it(theta, weight_at(&c->pieces, *piece, first), c->residual + first, c->factor, c->gain,
                        (uint32_t)first, values, offsets, &share->digest);
    }
#endif
    if (count >= 0) return count;
    float s[BLOCK];
    update_block(s, theta, c->residual, c->factor, &c->pieces, piece, first, last);
    share->digest += digest_words(theta, n, (uint32_t)first);
    int bad = first_bad(s, n);
    if (bad >= 0 && share->bad < 0) share->bad = first + bad;
    if (c->gate != OPEN) return pack(theta, s, n, c->gain, c->gate, values, offsets);
    store((char *)(c->values + first), s, n, c->n >= PAST_CACHES);
    return 0;
}

/* Of packed entries those that are sent. -> how many */
static int chosen(const Encode *c, int64_t first, int count, float *values, uint8_t *offsets) {
    if (c->margin == 0.0f && c->fraction == 0.0f) return count;
    return economise(c->anchor + first, c->margin, c->fraction, count, values, offsets);
}

/* ---- a block of a boundary ---- */

static int is_finite(float x) { return (bits(x) & 0x7FFFFFFF) < 0x7F800000; }

/* Where s is infinite or NaN it is 0 + e. -> the first such place, or −1 */
static int drop_bad(float *s, const float *e, int n) {
    int bad = first_bad(s, n);
    for (int i = bad; i >= 0 && i < n; i++)
        if (!is_finite(s[i])) s[i] = 0.0f + e[i];
    return bad;
}

/* As visible_of_block, where s is known. */
static int visible_of(Share *share, const float *theta, const float *s, int64_t first, int n, float *values,
                      uint8_t *offsets) {
    const Encode *c = share->call;
#if defined(__AVX2__)
    if (c->gate != OPEN && n == BLOCK) {  /* (θ − θ) + s */
        Pack *pack_it = usual[FLOAT32][c->gate];
        int count =
            pack_it(theta, (const char *)theta, s, 1.0f, c->gain, (uint32_t)first, values, offsets, &share->digest);
        if (count >= 0) return count;
    }
#endif
    share->digest += digest_words(theta, n, (uint32_t)first);
    if (c->gate != OPEN) return pack(theta, s, n, c->gain, c->gate, values, offsets);
    for (int i = 0; i < n; i++) c->values[first + i] = 0.0f + s[i];
    return 0;
}

/* All steps; memory is read once, in order. -> how many entries are sent, with a gate */
static int cross_block(Share *share, int64_t b, int64_t *reading, int64_t *writing, float *values, uint8_t *offsets) {
    const Encode *c = share->call;
    const Boundary *boundary = c->boundary;
    const Apply *apply = &boundary->apply;
    int64_t first = b * BLOCK, last = smaller(first + BLOCK, c->n);
    int n = (int)(last - first), count = 0;
    float *theta = apply->anchor + first, *e = apply->residual + first, s[BLOCK], ahead[BLOCK];

    for (int64_t r = 0; r < boundary->returns; r++) add(e, &boundary->returned[r], b, n);
    run_ahead_of(ahead, theta, n, boundary->sent, b, boundary->beta_before);
    update_block(s, ahead, apply->residual, apply->factor, &apply->pieces, reading, first, last);
    int bad = drop_bad(s, e, n);
    if (bad >= 0 && share->bad < 0) share->bad = first + bad;
    take_outer_step(apply, b, first, last);

    const float *weights = theta;
    if (boundary->sends) {
        count = chosen(c, first, visible_of(share, theta, s, first, n, values, offsets), values, offsets);
        const float *sent = c->gate == OPEN ? c->values + first : values;
        const uint8_t *where = c->gate == OPEN ? NULL : offsets;
        run_ahead(ahead, theta, n, where ? count : n, where, sent, boundary->beta);
        weights = ahead;
        if (!where) for (int i = 0; i < n; i++) s[i] -= sent[i];
        for (int k = 0; k < count; k++) s[offsets[k]] -= sent[k];
    }
    memcpy(e, s, 4 * (size_t)n);
    share->squares += sum_of_squares(s, n);
    write_block(weights, &apply->pieces, writing, first, last, 0);
    return count;
}

/* ---- a thread ---- */

static int64_t take_chunk(const Encode *c) {
    pthread_mutex_lock(c->lock);
    int64_t block = *c->taken;
    *c->taken += c->chunk;
    pthread_mutex_unlock(c->lock);
    return block;
}

/* Where the `count` entries of the chunk that ends at `stop` belong: behind those of all chunks before it. */
static int64_t place_for(const Encode *c, int64_t block, int64_t stop, int64_t count) {
    pthread_mutex_lock(c->lock);
    while (*c->put_down != block) pthread_cond_wait(c->moved_on, c->lock);
    int64_t position = *c->entries;
    *c->entries += count;
    *c->put_down = stop;
    pthread_cond_broadcast(c->moved_on);
    pthread_mutex_unlock(c->lock);
    return position;
}

static void *encode_share(void *argument) {
    Share *share = argument;
    const Encode *c = share->call;
    size_t room = (size_t)c->chunk * BLOCK + PACK_ROOM;
    float *values = malloc(c->starts ? 5 * room : 1);  /* touched as far as there are entries */
    uint8_t *offsets = (uint8_t *)(values + room);
    int64_t blocks = blocks_of(c->n);
    if (!values) return NULL;  /* the caller sees that chunks are missing */
    for (int64_t block; (block = take_chunk(c)) < blocks;) {
        int64_t stop = smaller(block + c->chunk, blocks), piece = piece_at(&c->pieces, block * BLOCK), k = 0;
        int64_t writing = piece;
        for (int64_t b = block; b < stop; b++) {
            if (c->boundary) k += cross_block(share, b, &piece, &writing, values + k, offsets + k);
            else {
                int count = visible_of_block(share, b * BLOCK, &piece, values + k, offsets + k);
                k += chosen(c, b * BLOCK, count, values + k, offsets + k);
            }
            if (c->starts) c->starts[b + 1] = k;
        }
        int64_t position = place_for(c, block, stop, k);
        if (!c->starts) continue;
        memcpy(c->values + position, values, 4 * (size_t)k);
        memcpy(c->offsets + position, offsets, (size_t)k);
        for (int64_t b = block; b < stop; b++) c->starts[b + 1] += position;
    }
    free(values);
    finish_stores();
    return NULL;
}

/* ---- the call ---- */

/* Fresh memory costs a page fault for every 4 KiB, together as long as the pass itself. Large pages make them rare. */
static void prefer_large_pages(void *memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    enum { PAGE = 4096 };
    uintptr_t first = ((uintptr_t)memory + PAGE - 1) / PAGE * PAGE;
    uintptr_t last = ((uintptr_t)memory + (uintptr_t)bytes) / PAGE * PAGE;
    if (bytes >= 1 << 26) madvise((void *)first, last - first, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

/* -> how many entries there are, or −1 for want of memory */
static int64_t run(Encode call, int threads, uint64_t *digest, int64_t *first_nonfinite, double *squares) {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t moved_on = PTHREAD_COND_INITIALIZER;
    int64_t taken = 0, put_down = 0, entries = 0, blocks = blocks_of(call.n);
    /* Large enough that threads rarely wait for each other, small enough that all have work to the end. */
    int64_t chunk = smaller(blocks / (16 * (threads < 1 ? 1 : threads)), 1024);
    call.chunk = chunk < 16 ? 16 : chunk;
    call.lock = &lock, call.moved_on = &moved_on, call.taken = &taken, call.put_down = &put_down;
    call.entries = &entries;
    Share shares[MAX_THREADS];
    *digest = 0;
    *first_nonfinite = -1;
    *squares = 0;
    if (call.values) prefer_large_pages(call.values, 4 * call.n);
    if (call.starts) {
        prefer_large_pages(call.offsets, call.n);
        call.starts[0] = 0;
    }
    int count = share_out(encode_share, &call, blocks, threads, shares);
    for (int k = 0; k < count; k++) {
        int64_t bad = shares[k].bad;
        *digest += shares[k].digest;
        *squares += shares[k].squares;
        if (bad >= 0 && (*first_nonfinite < 0 || bad < *first_nonfinite)) *first_nonfinite = bad;
    }
    if (put_down < blocks) return -1;
    return call.gate == OPEN ? call.n : entries;
}

/* Into how many steps a BF16 ulp is cut, 0 for exact values -> as economies.h takes it */
static float fraction_of(int value_steps) { return value_steps ? 0x1p-7f / (float)value_steps : 0.0f; }

/* `values` and `offsets` have room for n entries, `starts` for one more than there are blocks. Without a gate only
 * `values` is written. */
int64_t loco_encode(int64_t n, const float *anchor, const float *residual, int64_t pieces, const int64_t *address,
                    const int64_t *start, const int32_t *dtype, float factor, int gate, float gain, float margin,
                    int value_steps, int threads, int64_t *starts, uint8_t *offsets, float *values, uint64_t *digest,
                    int64_t *first_nonfinite) {
    double squares;
    Encode call = {.n = n, .anchor = anchor, .residual = residual, .pieces = {pieces, address, start, dtype},
                   .gate = gate, .factor = factor, .gain = gain, .margin = margin, .fraction = fraction_of(value_steps),
                   .starts = starts, .offsets = offsets, .values = values};
    return run(call, threads, digest, first_nonfinite, &squares);
}

/* `entries`: what was sent at the boundary before, each contribution to the round that has come, and what e is given
 * first. `sent`, `sends`: whether there is any such, and whether what to send is found. `squares`: of the new
 * residual. */
int64_t loco_cross(int64_t n, float *anchor, float *momentum, float *residual, int64_t pieces, const int64_t *address,
                   const int64_t *start, const int32_t *dtype, int sent, int64_t contributions, int64_t returns,
                   const Entries *entries, float factor, float divisor, float lr, float mu, int nesterov,
                   float beta_before, float beta, int sends, int gate, float gain, float margin, int value_steps, int threads, int64_t *starts,
                   uint8_t *offsets, float *values, uint64_t *digest, int64_t *first_nonfinite, double *squares) {
    Pieces all = {pieces, address, start, dtype};
    Apply apply = {n, anchor, momentum, residual, all, NULL, NULL, contributions, entries + 1, factor, divisor, lr,
                   mu, nesterov};
    Boundary boundary = {apply, sent ? entries : NULL, returns, entries + 1 + contributions, beta_before, beta, sends};
    Encode call = {.n = n, .anchor = anchor, .residual = residual, .pieces = all, .gate = gate, .gain = gain,
                   .margin = margin, .fraction = fraction_of(value_steps), .starts = starts, .offsets = offsets,
                   .values = values, .boundary = &boundary};  /* `apply` has the factor */
    return run(call, threads, digest, first_nonfinite, squares);
}
