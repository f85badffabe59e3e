/* Calls every op of kernels/cpu at sizes around the edges, with memory of exactly the size promised, for the
 * sanitizers to watch. Built and run by test_cpu_sanitized.py. Prints a digest of all results. */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int64_t loco_encode(int64_t, const float *, const float *, int64_t, const int64_t *, const int64_t *, const int32_t *,
                    float, int, float, float, int, int, int64_t *, uint8_t *, float *, uint64_t *, int64_t *);
double loco_apply(int64_t, float *, float *, float *, int64_t, const int64_t *, const int64_t *, const int32_t *,
                  int64_t, const void *, float, float, float, float, int, int);
int64_t loco_cross(int64_t, float *, float *, float *, int64_t, const int64_t *, const int64_t *, const int32_t *, int,
                   int64_t, int64_t, const void *, float, float, float, float, int, float, float, int, int, float, float,
                   int, int, int64_t *, uint8_t *, float *, uint64_t *, int64_t *, double *);
int64_t loco_first_changed(int64_t, const float *, int64_t, const int64_t *, const int64_t *, const int32_t *, int,
                           const void *, float, int);
void loco_write_weights(int64_t, float *, int64_t, const int64_t *, const int64_t *, const int32_t *, int);
uint64_t loco_digest(const char *, int64_t, int);
void loco_add_up(int64_t, int64_t, const void *, int, const float *, float, const void *, const void *);
void loco_add_whole(int64_t, int64_t, const void *, int, float *);
int64_t loco_write_blocks(int64_t, const int64_t *, const uint8_t *, const float *, int, char *);
int loco_check_blocks(int64_t, const char *, int, int64_t, const uint8_t *, const char *, int64_t, int, int64_t *);
int64_t loco_pack_room(int64_t, int64_t);
int64_t loco_pack(int64_t, const float *, const float *, const int64_t *, const uint8_t *, const float *, int, int, uint32_t,
                  uint32_t, int, uint8_t *);
int loco_unpack(const uint8_t *, int64_t, int64_t, int64_t, const float *, const float *, int, int64_t *, uint8_t *, float *);

static uint64_t seed = 1, result;

static uint32_t draw(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}

/* Any bits at all if `wild`, else numbers near those of a model. */
static float number(float scale, int wild) {
    uint32_t u = draw();
    float x = scale * ((float)(u >> 8) / (1 << 23) - 1.0f);
    if (wild) memcpy(&x, &u, 4);
    return x;
}

/* Which NaN arithmetic makes is not specified: all count as one. */
static void make_nans_equal(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (x[i] != x[i]) memcpy(&x[i], "\0\0\xc0\x7f", 4);
}

static void note(const void *data, size_t bytes) {
    result = result * 31 + loco_digest(data, (int64_t)bytes, 1);
}

/* What a frame is made of: a part of all entries, from the block `from` on, whose starts do not begin at 0. */
static void frame_of(int64_t n, int64_t from, int gate, const float *anchor, const float *momentum, const int64_t *starts,
                     const uint8_t *offsets, const float *values, int wild, int threads) {
    static const int formats[5][2] = {{0, 0}, {7, -126}, {10, -14}, {3, -6}, {2, -14}};
    int64_t blocks = (n + 255) / 256 - from, k = starts[from + blocks] - starts[from], rest = n - 256 * from;
    char *body = malloc((size_t)(5 * k + 2 * blocks));
    int64_t size = loco_write_blocks(blocks, starts + from, offsets, values, threads, body);
    if (size < 5 * k + blocks || memcmp(body, values + starts[from], 4 * (size_t)k)) abort();
    if (memcmp(body + 4 * k, offsets + starts[from], (size_t)k)) abort();
    note(body, (size_t)size);
    free(body);
    if (!k) return;
    uint8_t *room = malloc((size_t)loco_pack_room(rest, k));
    size = loco_pack(rest, anchor + 256 * from, momentum ? momentum + 256 * from : NULL, starts + from, offsets, values,
                     formats[gate][0], formats[gate][1], 256, 1 << 14, threads, room);
    if (size < 0) abort();
    if (!wild) note(room, (size_t)size);
    free(room);
}

/* What an exchange does with the k entries of a round: packs and unpacks them, adds them up, checks them. */
static void exchange_of(int64_t n, int64_t k, int gate, const float *anchor, const float *momentum, const int64_t *starts,
                        const uint8_t *offsets, const float *values, int gathers, int wild, int threads) {
    static const int formats[5][2] = {{0, 0}, {7, -126}, {10, -14}, {3, -6}, {2, -14}};
    int64_t blocks = (n + 255) / 256, *found = malloc(8 * (size_t)(blocks + 1));
    uint8_t *where = malloc((size_t)k);
    float *what = malloc(4 * (size_t)k);
    if (k) {
        uint8_t *room = malloc((size_t)loco_pack_room(n, k));
        int64_t size = loco_pack(n, anchor, momentum, starts, offsets, values, formats[gate][0], formats[gate][1], 256,
                                 (uint32_t)gathers << 14, threads, room);
        if (size <= 0) abort();
        uint8_t *frame = malloc((size_t)size);
        memcpy(frame, room, (size_t)size);
        free(room);
        if (!wild) note(frame, (size_t)size);
        int wrong = loco_unpack(frame, size, k, n, anchor, momentum, threads, found, where, what);
        if (wrong && !wild) abort();
        if (!wrong && (memcmp(found, starts, 8 * (size_t)(blocks + 1)) || memcmp(where, offsets, (size_t)k) ||
                       memcmp(what, values, 4 * (size_t)k)))
            abort();
        free(frame);
    }
    char *body = malloc((size_t)(5 * k + 2 * blocks));
    int64_t size = loco_write_blocks(blocks, starts, offsets, values, threads, body);
    note(body, (size_t)size);
    int wide = size == 5 * k + 2 * blocks;
    int fine = loco_check_blocks(blocks, body + 5 * k, wide, k, (uint8_t *)body + 4 * k, body, n, threads, found);
    if ((!fine && !wild) || (fine && memcmp(found, starts, 8 * (size_t)(blocks + 1)))) abort();
    free(body), free(where), free(what);
    if (blocks) frame_of(n, blocks / 3, gate, anchor, momentum, starts, offsets, values, wild, threads);

    const void *entries[3][3];
    for (int r = 0; r < gathers; r++) entries[r][0] = starts, entries[r][1] = offsets, entries[r][2] = values;
    free(found);
    for (int splits = 0; splits < 2; splits++) {
        size_t most = (size_t)(gathers * k), all = 0;
        void *rooms[2][3];
        for (int p = 0; p <= splits; p++)
            rooms[p][0] = malloc(8 * (size_t)(blocks + 1)), rooms[p][1] = malloc(most), rooms[p][2] = malloc(4 * most);
        loco_add_up(n, gathers, entries, threads, anchor, 0.5f, rooms[0], splits ? rooms[1] : NULL);
        for (int p = 0; p <= splits; p++) {
            size_t count = (size_t)((int64_t *)rooms[p][0])[blocks];
            make_nans_equal(rooms[p][2], (int64_t)count);
            note(rooms[p][0], 8 * (size_t)(blocks + 1)), note(rooms[p][1], count), note(rooms[p][2], 4 * count);
            for (int i = 0; i < 3; i++) free(rooms[p][i]);
            all += count;
        }
        if (all != (size_t)k) abort();
    }

    for (int r = 0; r < gathers; r++) entries[r][0] = entries[r][1] = NULL, entries[r][2] = anchor;
    what = malloc(4 * (size_t)n);
    loco_add_whole(n, gathers, entries, threads, what);
    make_nans_equal(what, n);
    note(what, 4 * (size_t)n);
    free(what);
}

static void round_of(int64_t n, int gate, int thrifty, int gathers, int has_residual, int mu, int wild, int threads) {
    /* Three pieces of different dtypes, at addresses that are only as aligned as they must be. */
    int64_t ends[3] = {n / 3, n / 3 + n / 2, n}, start[4] = {0}, address[3], count = 0;
    int32_t dtype[3];
    void *memory[3];
    for (int p = 0; p < 3; p++) {
        int64_t length = ends[p] - start[count];
        if (length <= 0) continue;
        int size = p == 0 ? 4 : 2;
        memory[count] = malloc((size_t)(length * size + size));
        char *w = (char *)memory[count] + size;
        for (int64_t i = 0; i < length * size / 2; i++) ((uint16_t *)w)[i] = (uint16_t)(wild ? draw() : draw() & 0x3FFF);
        address[count] = (int64_t)(intptr_t)w;
        dtype[count] = p;
        start[++count] = ends[p];
    }
    size_t bytes = (size_t)n * 4;
    float *anchor = malloc(bytes), *residual = malloc(bytes), *momentum = malloc(bytes), *values = malloc(bytes);
    int64_t blocks = (n + 255) / 256, first_bad;
    int64_t *starts = malloc(8 * (size_t)(blocks + 1));
    uint8_t *offsets = malloc((size_t)n);
    uint64_t digest;
    for (int64_t i = 0; i < n; i++) {
        anchor[i] = number(0.02f, wild);
        residual[i] = number(1e-4f, wild);
        momentum[i] = number(1e-4f, wild);
    }
    int64_t k = loco_encode(n, anchor, has_residual ? residual : NULL, count, address, start, dtype, 1.5f, gate, 1.0f,
                            thrifty ? 0.25f : 0.0f, thrifty ? 16 : 0, threads, starts, offsets, values, &digest,
                            &first_bad);
    if (k < 0 || k > n) abort();
    note(&digest, 8);
    note(&first_bad, 8);
    make_nans_equal(values, k);  /* frames hold their bits, which are the compiler's choice */
    note(values, 4 * (size_t)k);
    if (gate) {
        note(starts, 8 * (size_t)(blocks + 1)), note(offsets, (size_t)k);
        exchange_of(n, k, gate, anchor, mu ? momentum : NULL, starts, offsets, values, gathers, wild, threads);
    }
    int64_t own[3] = {gate ? (int64_t)(intptr_t)starts : 0, gate ? (int64_t)(intptr_t)offsets : 0, (int64_t)(intptr_t)values};
    int64_t *entries = malloc(24 * (size_t)(gathers + 2));
    for (int r = 0; r <= gathers + 1; r++) memcpy(entries + 3 * r, own, 24);
    if (mu) memset(entries + 3, 0, 24);  /* nothing is returned */
    loco_apply(n, anchor, mu ? momentum : NULL, has_residual ? residual : NULL, count, address, start, dtype, gathers,
               entries, 1.5f, (float)gathers, 0.7f, 0.9f, mu == 2, threads);
    if (!wild) note(anchor, bytes), note(residual, bytes), note(momentum, bytes);
    loco_write_weights(n, anchor, count, address, start, dtype, threads);
    if (has_residual && gate) {  /* a boundary of overlapped rounds: v was sent, rounds have come, more is sent */
        for (int r = 0; r <= gathers; r++) memcpy(entries + 3 * r, own, 24);
        int64_t *next_starts = malloc(8 * (size_t)(blocks + 1));
        uint8_t *next_offsets = malloc((size_t)n);
        float *next = malloc(bytes);
        double squares;
        k = loco_cross(n, anchor, mu ? momentum : NULL, residual, count, address, start, dtype, 1, gathers, 1, entries,
                       1.5f, (float)gathers, 0.7f, 0.9f, mu == 2, 1.0f, 1.0f, 1, gate, 1.0f, thrifty ? 0.25f : 0.0f,
                       thrifty ? 16 : 0, threads, next_starts, next_offsets, next, &digest, &first_bad, &squares);
        if (k < 0 || k > n) abort();
        if (!wild) note(&digest, 8), note(next, 4 * (size_t)k), note(anchor, bytes), note(residual, bytes);
        int64_t sent[3] = {(int64_t)(intptr_t)next_starts, (int64_t)(intptr_t)next_offsets, (int64_t)(intptr_t)next};
        if (!wild && loco_first_changed(n, anchor, count, address, start, dtype, 1, sent, 1.0f, threads) >= 0) abort();
        free(next_starts), free(next_offsets), free(next);
    }
    for (int64_t p = 0; p < count; p++) {
        if (!wild) note((char *)(intptr_t)address[p], (size_t)(start[p + 1] - start[p]) * (dtype[p] ? 2 : 4));
        free(memory[p]);
    }
    free(anchor), free(residual), free(momentum), free(values), free(starts), free(offsets), free(entries);
}

int main(void) {
    const int64_t sizes[] = {0, 1, 2, 63, 255, 256, 257, 1003, 4096, 70001};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int gate = 0; gate < 5; gate++)
            for (int threads = 1; threads <= 4; threads += 3)
                for (int wild = 0; wild < 2; wild++)
                    for (int thrifty = 0; thrifty < (gate ? 2 : 1); thrifty++)
                        round_of(sizes[s], gate, thrifty, 1 + gate % 3, gate != 0, gate % 3, wild, threads);
    for (int threads = 1; threads <= 4; threads += 3) round_of((1 << 18) + 1003, 1, 0, 2, 1, 2, 0, threads);  /* two parts */
    for (int64_t bytes = 0; bytes < 40; bytes++) {
        char *data = malloc((size_t)bytes + 1);  /* and an odd address */
        memset(data, 7, (size_t)bytes + 1);
        note(data + 1, (size_t)bytes);
        free(data);
    }
    printf("%016" PRIx64 "\n", result);
    return 0;
}
