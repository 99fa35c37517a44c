/* Calls that fail as a disk or a network file system makes them fail: for LD_PRELOAD.

   FAULTS="CALL|PART OF A PATH|FIRST|COUNT|WHAT;..."    e.g. pwrite|/out/|3|1|errno=28
   The FIRST-th (from 1) call of that name on such a path and the COUNT - 1 after it (0: all) do WHAT:
   errno=N fails with it, short=N moves N bytes at most, free=N (statvfs) says that so many bytes are free.
   What nothing is said of is done as ever. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST 16
static long seen[MOST];

/* The value of WHAT for this call, if a fault of this kind is to happen now; else -1. */
static long fault(const char *call, const char *kind, const char *path, const char *other) {
    char text[4096], *rest = text, *one;
    const char *all = getenv("FAULTS");
    long found = -1;
    if (all == NULL || strlen(all) >= sizeof text) return -1;
    strcpy(text, all);
    for (int number = 0; number < MOST && (one = strsep(&rest, ";")) != NULL; number++) {
        char *name = strsep(&one, "|"), *part = strsep(&one, "|"), *first = strsep(&one, "|");
        char *count = strsep(&one, "|"), *what = strsep(&one, "|"), *value;
        if (what == NULL || strcmp(name, call) != 0) continue;
        if (strstr(path, part) == NULL && (other == NULL || strstr(other, part) == NULL)) continue;
        value = strchr(what, '=');
        if (value == NULL || strncmp(what, kind, value - what) != 0 || strlen(kind) != (size_t)(value - what)) continue;
        long now = ++seen[number];
        if (now >= atol(first) && (atol(count) == 0 || now < atol(first) + atol(count))) found = atol(value + 1);
    }
    return found;
}

static const char *path_of(int fd, char *into) {
    char link[64];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, into, 4095);
    into[size < 0 ? 0 : size] = 0;
    errno = before;
    return into;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(call, path, other) \
    do { long code = fault(call, "errno", path, other); if (code >= 0) { errno = code; return -1; } } while (0)
#define SHORTEN(call, path, other, size) \
    do { long most = fault(call, "short", path, other); if (most >= 0 && (size) > (size_t)most) size = most; } while (0)

ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    char path[4096];
    path_of(fd, path);
    FAIL("pread", path, NULL);
    SHORTEN("pread", path, NULL, size);
    return REAL(pread64)(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    char path[4096];
    path_of(fd, path);
    FAIL("pwrite", path, NULL);
    SHORTEN("pwrite", path, NULL, size);
    return REAL(pwrite64)(fd, data, size, at);
}

ssize_t write(int fd, const void *data, size_t size) {
    char path[4096];
    path_of(fd, path);
    FAIL("write", path, NULL);
    SHORTEN("write", path, NULL, size);
    return REAL(write)(fd, data, size);
}

ssize_t preadv64v2(int fd, const struct iovec *buffers, int count, off64_t at, int flags) {
    char path[4096];
    struct iovec one = buffers[0];
    path_of(fd, path);
    FAIL("preadv", path, NULL);
    SHORTEN("preadv", path, NULL, one.iov_len);
    return REAL(preadv64v2)(fd, one.iov_len == buffers[0].iov_len ? buffers : &one,
                            one.iov_len == buffers[0].iov_len ? count : 1, at, flags);
}

ssize_t copy_file_range(int source, off64_t *from, int target, off64_t *to, size_t size, unsigned int flags) {
    char path[4096], other[4096];
    path_of(target, path);
    path_of(source, other);
    FAIL("copy_file_range", path, other);
    SHORTEN("copy_file_range", path, other, size);
    return size == 0 ? 0 : REAL(copy_file_range)(source, from, target, to, size, flags);
}

ssize_t sendfile64(int target, int source, off64_t *from, size_t size) {
    char path[4096], other[4096];
    path_of(target, path);
    path_of(source, other);
    FAIL("sendfile", path, other);
    SHORTEN("sendfile", path, other, size);
    return size == 0 ? 0 : REAL(sendfile64)(target, source, from, size);
}

int fsync(int fd) {
    char path[4096];
    path_of(fd, path);
    FAIL("fsync", path, NULL);
    return REAL(fsync)(fd);
}

int ftruncate64(int fd, off64_t size) {
    char path[4096];
    path_of(fd, path);
    FAIL("ftruncate", path, NULL);
    return REAL(ftruncate64)(fd, size);
}

int posix_fallocate64(int fd, off64_t at, off64_t size) {
    char path[4096];
    path_of(fd, path);
    long code = fault("posix_fallocate", "errno", path, NULL);
    return code >= 0 ? (int)code : REAL(posix_fallocate64)(fd, at, size);
}

int posix_fadvise64(int fd, off64_t at, off64_t size, int advice) {
    char path[4096];
    path_of(fd, path);
    long code = fault("posix_fadvise", "errno", path, NULL);
    return code >= 0 ? (int)code : REAL(posix_fadvise64)(fd, at, size, advice);
}

int flock(int fd, int operation) {
    char path[4096];
    path_of(fd, path);
    FAIL("flock", path, NULL);
    return REAL(flock)(fd, operation);
}

int close(int fd) {
    char path[4096];
    path_of(fd, path);
    long code = fault("close", "errno", path, NULL);
    int done = REAL(close)(fd);
    if (code >= 0) { errno = code; return -1; }
    return done;
}

int statvfs64(const char *path, struct statvfs64 *into) {
    int done = REAL(statvfs64)(path, into);
    FAIL("statvfs", path, NULL);
    long free = fault("statvfs", "free", path, NULL);
    if (free >= 0) into->f_bavail = free / into->f_frsize;
    return done;
}

int rename(const char *from, const char *to) {
    FAIL("rename", from, to);
    return REAL(rename)(from, to);
}

int link(const char *from, const char *to) {
    FAIL("link", from, to);
    return REAL(link)(from, to);
}

int unlink(const char *path) {
    FAIL("unlink", path, NULL);
    return REAL(unlink)(path);
}

int mkdir(const char *path, mode_t mode) {
    FAIL("mkdir", path, NULL);
    return REAL(mkdir)(path, mode);
}

int rmdir(const char *path) {
    FAIL("rmdir", path, NULL);
    return REAL(rmdir)(path);
}

int open64(const char *path, int flags, ...) {
    mode_t mode = 0;
    __builtin_va_list arguments;
    __builtin_va_start(arguments, flags);
    mode = __builtin_va_arg(arguments, int);
    __builtin_va_end(arguments);
    FAIL("open", path, NULL);
    return ((int (*)(const char *, int, mode_t))dlsym(RTLD_NEXT, "open64"))(path, flags, mode);
}
