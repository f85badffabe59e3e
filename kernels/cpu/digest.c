/* The digest of any bytes. */

#include "flat.h"

typedef struct {
    const char *data;
    int64_t words;
} Digest;

static void *digest_share(void *argument) {
    Share *share = argument;
    const Digest *c = share->call;
    for (int64_t b = share->first; b < share->last; b++) {
        int64_t first = b * BLOCK, last = smaller(first + BLOCK, c->words);
        share->digest += digest_words(c->data + 4 * first, (int)(last - first), (uint32_t)first);
    }
    return NULL;
}

uint64_t loco_digest(const char *data, int64_t bytes, int threads) {
    Digest call = {data, bytes / 4};
    Share shares[MAX_THREADS];
    int count = share_out(digest_share, &call, blocks_of(call.words), threads, shares);
    uint64_t sum = 0;
    for (int k = 0; k < count; k++) sum += shares[k].digest;
    if (bytes % 4) {
        uint32_t word = 0;  /* the last word, padded with zeros */
        memcpy(&word, data + 4 * call.words, (size_t)(bytes % 4));
        sum += digest_words(&word, 1, (uint32_t)call.words);
    }
    return sum;
}
