/* The coder and the model of patches, as ../reference_ranked.py specifies them. The same functions encode and decode:
 * `decode` is a constant where they are called, and half of each goes away.
 */

#ifndef LOCO_PATCH_CODER_H
#define LOCO_PATCH_CODER_H

#include <stddef.h>

#include "patch.h"

enum { LIMIT = 254, MEMORY = 6, SHAPES = 18, LENGTHS = 33 };

/* ---- the coder ---- */

/* A probability that learns: of a 1, in 1/65536, and how often it was used, at most LIMIT times. */
typedef struct {
    uint16_t one, used;
} Chance;

/* A number is narrowed down, decision by decision: to a range that begins at `low`. */
typedef struct {
    uint64_t range;
    uint64_t low;    /* encoder: its last 64 bits, of which the upper ones are written as 32-bit words, big end first */
    uint64_t value;  /* decoder: how far the number is above `low` */
    uint8_t *bytes;
    int64_t at, size;  /* a decoder reads zeros past the last byte */
    int failed;        /* encoder: there is no room. Decoder: no encoder wrote this. */
} Coder;

static inline void add_to_low(Coder *c, uint64_t x) {
    uint64_t low = c->low + x;
    if (low < c->low)
        for (int64_t i = c->at; i > 0 && ++c->bytes[--i] == 0;) {}
    c->low = low;
}

static inline void shift_word(Coder *c, int decode) {
    if (decode) {
        uint32_t word = 0;
        for (int i = 0; i < 4; i++) word = word << 8 | (c->at + i < c->size ? c->bytes[c->at + i] : 0);
        c->value = c->value << 32 | word;
    } else if (c->size - c->at >= 4)
        for (int i = 0; i < 4; i++) c->bytes[c->at + i] = (uint8_t)(c->low >> (56 - 8 * i));
    else c->failed = 1, c->at -= 4;
    c->at += 4;
    c->low <<= 32;
    c->range <<= 32;
}

static const uint16_t rates[LIMIT + 1] = {  /* 65536 / (used + 2) */
#define RATE(n) (uint16_t)(65536 / ((n) + 2))
#define RATES5(n) RATE(n), RATE(n + 1), RATE(n + 2), RATE(n + 3), RATE(n + 4)
#define RATES50(n) RATES5(n), RATES5(n + 5), RATES5(n + 10), RATES5(n + 15), RATES5(n + 20), RATES5(n + 25), \
    RATES5(n + 30), RATES5(n + 35), RATES5(n + 40), RATES5(n + 45)
    RATES50(0), RATES50(50), RATES50(100), RATES50(150), RATES50(200), RATES5(250)};

static inline __attribute__((always_inline)) int code_bit(Coder *c, Chance *chance, int bit, int decode) {
    uint32_t one = chance->one, rate = rates[chance->used];
    uint64_t bound = (c->range >> 16) * one;
    if (decode) bit = c->value < bound;
    if (bit) {
        c->range = bound;
        chance->one = (uint16_t)(one + ((65536 - one) * rate >> 16));
    } else {
        if (decode) c->value -= bound;
        else add_to_low(c, bound);
        c->range -= bound;
        chance->one = (uint16_t)(one - (one * rate >> 16));
    }
    chance->used = (uint16_t)(chance->used + (chance->used < LIMIT));
    if (c->range >> 32 == 0) shift_word(c, decode);
    return bit;
}

/* Bits of which each is as likely 0 as 1, at most 16 at a time, the upper ones first. */
static inline __attribute__((always_inline)) uint64_t code_plain(Coder *c, uint64_t x, int size, int decode) {
    uint64_t all = 0;
    while (size > 0) {
        int some = size > 16 ? 16 : size;
        size -= some;
        c->range >>= some;
        uint64_t now = x >> size & ((1u << some) - 1);
        if (decode) {
            now = c->value / c->range;
            if (now >> some) c->failed = 1, now = 0;
            c->value -= now * c->range;
        } else add_to_low(c, now * c->range);
        all = all << some | now;
        if (c->range >> 32 == 0) shift_word(c, decode);
    }
    return all;
}

static inline Coder start_coder(uint8_t *bytes, int64_t size, int decode) {
    Coder c = {.range = UINT64_MAX, .bytes = bytes, .size = size};
    if (decode) {
        shift_word(&c, 1), shift_word(&c, 1), c.range = UINT64_MAX;
        c.failed = c.value == c.range;  /* every number of a range is below its end */
    }
    return c;
}

/* Writes the number of the range that takes the fewest bytes: zeros at the end are left out. -> the bytes */
static inline int64_t finish_encoder(Coder *c) {
    for (int zeros = 56; zeros >= 32; zeros -= 8) {
        uint64_t more = -c->low & (((uint64_t)1 << zeros) - 1);
        if (more < c->range) {
            add_to_low(c, more);
            break;
        }
    }
    shift_word(c, 0);
    while (c->at > 0 && c->bytes[c->at - 1] == 0) c->at--;
    return c->at;
}

/* Whether all bytes were read, and none of them need not be there. */
static inline int is_finished(const Coder *c) {
    return !c->failed && c->size <= c->at - 4 && (c->size == 0 || c->bytes[c->size - 1] != 0);
}

/* ---- the model ---- */

typedef struct {
    Chance length[LENGTHS], bit[LENGTHS][4];
} Numbers;

typedef struct {
    Numbers gaps[SHAPES], sizes[CLASSES];
    Chance down[CLASSES];
    uint32_t mean;  /* of the gaps, in 1/256, of the last 64 or so */
} Model;

static inline void start_model(Model *m) {
    Chance *all = (Chance *)(void *)m;
    for (size_t i = 0; i < offsetof(Model, mean) / sizeof(Chance); i++) all[i] = (Chance){32768, 0};
    m->mean = 0;
}

/* An octave up half as many weights change, so gaps are twice as long; none is longer than a part. */
static inline void begin_class(Model *m) {
    uint32_t longest = (uint32_t)PATCH_PART << 8;
    m->mean = m->mean > longest / 2 ? longest : 2 * m->mean;
}

/* x, from 1 to 2^longest − 1: its length, then the two bits below its uppermost, which are learned, and the rest.
 * -> x, or 0: no encoder wrote this */
static inline __attribute__((always_inline)) uint64_t code_number(Coder *c, Numbers *numbers, uint64_t x, int longest,
                                                                 int decode) {
    int below = decode ? 0 : 63 - __builtin_clzll(x), left = 0;
    while (code_bit(c, &numbers->length[left], left < below, decode))
        if (++left == longest) return 0;
    Chance *bit = numbers->bit[left];
    uint64_t made = 1;
    for (int learned = 0; learned < 2 && left > 0; learned++) {
        left--;
        made = made << 1 | (uint64_t)code_bit(c, &bit[made], x >> left & 1, decode);
    }
    return made << left | code_plain(c, x & (((uint64_t)1 << left) - 1), left, decode);
}

/* How many elements of the class, that did not change, come before the next that did. -> the same, or −1 */
static inline __attribute__((always_inline)) int64_t code_gap(Coder *c, Model *m, uint32_t gap, int decode) {
    int length = m->mean ? 32 - __builtin_clz(m->mean) : 0, plain = length > 11 ? length - 11 : 0;
    int halves = length > 1 ? 2 * length + (int)(m->mean >> (length - 2) & 1) : 0;
    int shape = plain ? halves & 1 : halves > 8 ? halves - 6 : 2;
    uint64_t upper = code_number(c, &m->gaps[shape], (gap >> plain) + 1, 21, decode);
    if (!upper) return -1;
    uint64_t made = upper - 1;
    if (plain) made = made << plain | code_plain(c, gap & ((1u << plain) - 1), plain, decode);
    if (made >= PATCH_PART) return -1;
    m->mean = m->mean - (m->mean >> MEMORY) + ((uint32_t)made << (8 - MEMORY));
    return (int64_t)made;
}

/* -> the step, not 0; or 0 if there is none such */
static inline __attribute__((always_inline)) int64_t code_step(Coder *c, Model *m, int class, int64_t step,
                                                               int decode) {
    int down = code_bit(c, &m->down[class], step < 0, decode);
    int64_t size = (int64_t)code_number(c, &m->sizes[class], (uint64_t)(step < 0 ? -step : step), 32, decode);
    return down ? -size : size;
}

#endif
