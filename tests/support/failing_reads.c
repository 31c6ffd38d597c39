// Preloaded: the n-th read of a file whose path ends with a suffix fails with EIO, once or from then on.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static char suffix[256] = "";
static long countdown = 0;
static int lasts = 0;

void fail_reads(const char *of, long number, int from_then_on) {
    snprintf(suffix, sizeof suffix, "%s", of);
    countdown = number;
    lasts = from_then_on;
}

static int fails(int descriptor) {
    char link[64], path[4096];
    if (countdown <= 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    size_t num = strlen(suffix);
    if (length < (ssize_t)num || memcmp(path + length - num, suffix, num) != 0) return 0;
    if (countdown > 1) {
        countdown--;
        return 0;
    }
    if (!lasts) countdown = 0;
    errno = EIO;
    return 1;
}

ssize_t read(int descriptor, void *buffer, size_t count) {
    static ssize_t (*real)(int, void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "read");
    return fails(descriptor) ? -1 : real(descriptor, buffer, count);
}

ssize_t pread(int descriptor, void *buffer, size_t count, off_t offset) {
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pread");
    return fails(descriptor) ? -1 : real(descriptor, buffer, count, offset);
}

ssize_t pread64(int descriptor, void *buffer, size_t count, off64_t offset) {
    static ssize_t (*real)(int, void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pread64");
    return fails(descriptor) ? -1 : real(descriptor, buffer, count, offset);
}
