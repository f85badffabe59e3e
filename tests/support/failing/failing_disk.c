/* Preloaded into a process: of the calls that touch files under a folder, one fails, or all do from one on. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long at, calls;
static int lasting;

/* at: the number of the call, from 1; 0 ends it. Returns how many calls there have been since the last time. */
long fail_at(const char *under, long number, int from_then_on) {
    long before = __atomic_exchange_n(&calls, 0, __ATOMIC_SEQ_CST);
    snprintf(folder, sizeof folder, "%s/", under);
    lasting = from_then_on;
    __atomic_store_n(&at, number, __ATOMIC_SEQ_CST);
    return before;
}

static int fails(int descriptor, const char *path) {
    char whole[PATH_MAX + 1] = "", link[64];
    if (!__atomic_load_n(&at, __ATOMIC_SEQ_CST))
        return 0;
    if (path == NULL || path[0] != '/') {
        snprintf(link, sizeof link, descriptor == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", descriptor);
        ssize_t size = readlink(link, whole, PATH_MAX);
        whole[size < 0 ? 0 : size] = 0;
    }
    if (path != NULL) {
        size_t size = strlen(whole);
        snprintf(whole + size, sizeof whole - size, size ? "/%s" : "%s", path);
    }
    strncat(whole, "/", sizeof whole - strlen(whole) - 1);
    if (strncmp(whole, folder, strlen(folder)))
        return 0;
    long number = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (lasting ? number < at : number != at)
        return 0;
    errno = EIO;
    return 1;
}

#define CALL(type, failed, name, parameters, arguments, descriptor, path)   \
    type name parameters {                                                  \
        static type (*next) parameters;                                     \
        if (!next)                                                          \
            next = (type (*) parameters)dlsym(RTLD_NEXT, #name);            \
        return fails(descriptor, path) ? failed : next arguments;           \
    }

#define OPEN(name, parameters, arguments, descriptor)                       \
    int name parameters {                                                   \
        static int (*next) parameters;                                      \
        if (!next)                                                          \
            next = (int (*) parameters)dlsym(RTLD_NEXT, #name);             \
        va_list rest;                                                       \
        va_start(rest, flags);                                              \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                       \
        return fails(descriptor, path) ? -1 : next arguments;               \
    }

OPEN(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)
CALL(FILE *, NULL, fopen, (const char *path, const char *how), (path, how), AT_FDCWD, path)
CALL(FILE *, NULL, fopen64, (const char *path, const char *how), (path, how), AT_FDCWD, path)
CALL(ssize_t, -1, read, (int file, void *to, size_t size), (file, to, size), file, NULL)
CALL(ssize_t, -1, write, (int file, const void *from, size_t size), (file, from, size), file, NULL)
CALL(ssize_t, -1, pread64, (int file, void *to, size_t size, off64_t from), (file, to, size, from), file, NULL)
CALL(int, -1, fsync, (int file), (file), file, NULL)
CALL(int, -1, ftruncate64, (int file, off64_t size), (file, size), file, NULL)
CALL(int, -1, rename, (const char *path, const char *to), (path, to), AT_FDCWD, path)
CALL(int, -1, mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path)
CALL(int, -1, rmdir, (const char *path), (path), AT_FDCWD, path)
CALL(int, -1, unlink, (const char *path), (path), AT_FDCWD, path)
CALL(int, -1, unlinkat, (int at, const char *path, int flags), (at, path, flags), at, path)
CALL(DIR *, NULL, opendir, (const char *path), (path), AT_FDCWD, path)
CALL(DIR *, NULL, fdopendir, (int file), (file), file, NULL)
CALL(int, -1, stat64, (const char *path, struct stat64 *to), (path, to), AT_FDCWD, path)
CALL(int, -1, lstat64, (const char *path, struct stat64 *to), (path, to), AT_FDCWD, path)
CALL(int, -1, fstat64, (int file, struct stat64 *to), (file, to), file, NULL)
