/* The wall clock of every process that this is loaded into (LD_PRELOAD), moved by as many nanoseconds as a file says.

   EVERROLL_CHAOS_CLOCK names the file: one int64, mapped, so that a change counts at once everywhere. Monotonic clocks
   are left alone, as by an administrator who sets the time. Programs that do not call libc (Temporal's server, which is
   static Go) keep the true time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static const volatile int64_t *moved;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("EVERROLL_CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) moved = mapped;
        close(file);
    }
}

int clock_gettime(clockid_t clock, struct timespec *result) {
    if (!real_clock_gettime) real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real_clock_gettime(clock, result);
    if (code == 0 && moved && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t now = result->tv_sec * SECOND + result->tv_nsec + *moved;
        result->tv_sec = now / SECOND;
        result->tv_nsec = now % SECOND;
    }
    return code;
}

int gettimeofday(struct timeval *restrict result, void *restrict zone) {
    struct timespec now;
    (void)zone;
    int code = clock_gettime(CLOCK_REALTIME, &now);
    if (code == 0 && result) {
        result->tv_sec = now.tv_sec;
        result->tv_usec = now.tv_nsec / 1000;
    }
    return code;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
