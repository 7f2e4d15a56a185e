/* Stand-in for /dev/watchdog at the boundary of libc (LD_PRELOAD): the device is the node $WATCHDOG_DEVICE. It knows the
 * calls of linux/watchdog.h that gpuward makes and refuses all others. Each call is a line in the file $WATCHDOG_LOG:
 * "<CLOCK_BOOTTIME ns> open | timeout N | pet | magic | close". $WATCHDOG_OPTIONS: the options it says it has.
 * $WATCHDOG_SYSFS: the path in sysfs that tells of nowayout; $WATCHDOG_NOWAYOUT: the file that is read in its place. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/watchdog.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

static int device = -1, journal = -1, timeout = 60;

static void tell(const char *what, int number) {
    struct timespec now;
    char line[80];
    static ssize_t (*write_)(int, const void *, size_t);
    if (!write_) write_ = dlsym(RTLD_NEXT, "write");
    clock_gettime(CLOCK_BOOTTIME, &now);
    int size = snprintf(line, sizeof line, "%lld%09ld %s", (long long)now.tv_sec, now.tv_nsec, what);
    size += number < 0 ? snprintf(line + size, 2, "\n") : snprintf(line + size, 16, " %d\n", number);
    write_(journal, line, size);
}

static int opened(const char *path, int fd) {
    const char *ours = getenv("WATCHDOG_DEVICE");
    if (fd < 0 || !ours || strcmp(path, ours)) return fd;
    if (flock(fd, LOCK_EX | LOCK_NB)) {
        int (*close_)(int) = dlsym(RTLD_NEXT, "close");
        close_(fd);
        errno = EBUSY;
        return -1;
    }
    int (*open_)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    if (journal < 0) journal = open_(getenv("WATCHDOG_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    device = fd;
    tell("open", -1);
    return fd;
}

#define OPEN(name)                                                              \
    int name(const char *path, int flags, ...) {                                \
        va_list rest;                                                           \
        va_start(rest, flags);                                                  \
        int mode = flags & O_CREAT ? va_arg(rest, int) : 0;                     \
        va_end(rest);                                                           \
        int (*open_)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);         \
        const char *sysfs = getenv("WATCHDOG_SYSFS");                           \
        if (sysfs && !strcmp(path, sysfs)) path = getenv("WATCHDOG_NOWAYOUT");  \
        return opened(path, open_(path, flags, mode));                          \
    }
OPEN(open)
OPEN(open64)

int ioctl(int fd, unsigned long request, ...) {
    va_list rest;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (fd != device) {
        int (*ioctl_)(int, unsigned long, ...) = dlsym(RTLD_NEXT, "ioctl");
        return ioctl_(fd, request, argument);
    }
    if (request == WDIOC_GETSUPPORT) {
        struct watchdog_info info = {strtoul(getenv("WATCHDOG_OPTIONS"), NULL, 0), 1, "stand-in"};
        memcpy(argument, &info, sizeof info);
    } else if (request == WDIOC_SETTIMEOUT) {
        timeout = *(int *)argument > 60 ? 60 : *(int *)argument;
        tell("timeout", timeout);
    } else if (request == WDIOC_GETTIMEOUT) {
        *(int *)argument = timeout;
    } else {
        tell("wrong-ioctl", 0);
        errno = ENOTTY;
        return -1;
    }
    return 0;
}

ssize_t write(int fd, const void *data, size_t size) {
    if (fd == device && fd >= 0) {
        if (size != 1) abort();
        tell(*(const char *)data == 'V' ? "magic" : "pet", -1);
        return 1;
    }
    ssize_t (*write_)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    return write_(fd, data, size);
}

int close(int fd) {
    if (fd == device && fd >= 0) {
        tell("close", -1);
        device = -1;
    }
    int (*close_)(int) = dlsym(RTLD_NEXT, "close");
    return close_(fd);
}
