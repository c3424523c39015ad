/* Loaded into a process: adds the seconds that a shared file holds to what the process is told of the time of day. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t right = 0;
static volatile int64_t *wrong_by = NULL;

/* Allocates nothing: allocators ask for the time while they start. */
static int64_t offset(void) {
    if (wrong_by == NULL) {
        const char *path = getenv("FAULT_CLOCK_FILE");
        int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
        void *shared = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        wrong_by = shared == MAP_FAILED ? &right : shared;
    }
    return *wrong_by;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += offset();
    return failed;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told != NULL) *told = now.tv_sec;
    return now.tv_sec;
}
