/* A thread that sends prepared messages on a socket, one every so often, while the program's own threads may be
   kept from it: it needs no interpreter lock. Whoever prepares the messages pushes the first one further away
   each time, so that none is sent as long as the program gets round to it.

   A send never blocks: what the system does not take is not sent, and the next message takes its turn. */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

struct loco_sends {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    int is_over, socket; /* -1: none, or it is of no use any more */
    char *bytes;         /* the messages, one behind the other */
    int64_t *ends;       /* of each */
    int64_t count, tried;
    int64_t due, every; /* ns */
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void send_next(struct loco_sends *all) {
    int64_t start = all->tried ? all->ends[all->tried - 1] : 0, length = all->ends[all->tried] - start;
    ssize_t sent = send(all->socket, all->bytes + start, (size_t)length, MSG_DONTWAIT | MSG_NOSIGNAL);
    all->tried++;
    int is_busy = sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    if (sent != length && !is_busy) all->socket = -1; /* broken, or the rest would be taken for a new message */
}

static void *run(void *argument) {
    struct loco_sends *all = argument;
    pthread_mutex_lock(&all->lock);
    while (!all->is_over) {
        if (all->socket < 0 || all->tried == all->count) {
            pthread_cond_wait(&all->changed, &all->lock);
        } else if (now_ns() < all->due) {
            struct timespec until = {all->due / 1000000000, all->due % 1000000000};
            pthread_cond_timedwait(&all->changed, &all->lock, &until);
        } else {
            send_next(all);
            all->due = now_ns() + all->every;
        }
    }
    pthread_mutex_unlock(&all->lock);
    return NULL;
}

/* -> NULL if the system has no thread to give. */
void *loco_sends_start(void) {
    struct loco_sends *all = calloc(1, sizeof *all);
    if (!all) return NULL;
    all->socket = -1;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&all->lock, NULL);
    pthread_cond_init(&all->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    sigset_t every_signal, before; /* signals are for the program's own threads */
    sigfillset(&every_signal);
    pthread_sigmask(SIG_SETMASK, &every_signal, &before);
    int failed = pthread_create(&all->thread, NULL, run, all);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed) return all;
    free(all);
    return NULL;
}

static void replace(struct loco_sends *all, int socket, int64_t count, char *bytes, int64_t *ends) {
    free(all->bytes), free(all->ends);
    all->bytes = bytes, all->ends = ends, all->socket = socket, all->count = count, all->tried = 0;
    pthread_cond_signal(&all->changed);
}

/* Take these messages in the place of the earlier ones, the first to be sent in `first` ns, the others `every` ns
   later each; but only if as many of the earlier ones were tried as the caller expects. -> how many were. */
int64_t loco_sends_prepare(
    void *sends, int socket, int64_t count, const char *bytes, const int64_t *ends, int64_t first, int64_t every,
    int64_t expected
) {
    struct loco_sends *all = sends;
    char *new_bytes = malloc((size_t)ends[count - 1]);
    int64_t *new_ends = malloc((size_t)count * sizeof *new_ends);
    if (!new_bytes || !new_ends) {
        free(new_bytes), free(new_ends);
        return expected; /* the earlier ones will do */
    }
    memcpy(new_bytes, bytes, (size_t)ends[count - 1]);
    memcpy(new_ends, ends, (size_t)count * sizeof *new_ends);
    pthread_mutex_lock(&all->lock);
    int64_t tried = all->tried;
    if (tried == expected) {
        all->due = now_ns() + first, all->every = every;
        replace(all, socket, count, new_bytes, new_ends);
    } else {
        free(new_bytes), free(new_ends);
    }
    pthread_mutex_unlock(&all->lock);
    return tried;
}

/* Send nothing more. -> how many messages were tried. */
int64_t loco_sends_clear(void *sends) {
    struct loco_sends *all = sends;
    pthread_mutex_lock(&all->lock);
    int64_t tried = all->tried;
    replace(all, -1, 0, NULL, NULL);
    pthread_mutex_unlock(&all->lock);
    return tried;
}

/* End the thread. Not in a child of a fork, which has none. */
void loco_sends_stop(void *sends) {
    struct loco_sends *all = sends;
    pthread_mutex_lock(&all->lock);
    all->is_over = 1;
    pthread_cond_signal(&all->changed);
    pthread_mutex_unlock(&all->lock);
    pthread_join(all->thread, NULL);
    pthread_cond_destroy(&all->changed);
    pthread_mutex_destroy(&all->lock);
    free(all->bytes), free(all->ends), free(all);
}
