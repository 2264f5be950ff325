/* stamp LOG [GATE]
 *
 * The command of the hand-overs: appends when it began and when it ended, in nanoseconds of CLOCK_MONOTONIC, to LOG
 * as one line, in one write. With GATE it ends when that file appears. Linked statically, so that little lies
 * between being started and beginning. */
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

static long long now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void die(const char *what)
{
    fprintf(stderr, "stamp: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* The watch comes first, so that a file made before or after it is seen. */
static void wait_for(const char *gate)
{
    char events[4096];
    char *copy = strdup(gate);
    int watch = inotify_init1(IN_CLOEXEC);
    if (!copy || watch < 0 || inotify_add_watch(watch, dirname(copy), IN_CREATE | IN_MOVED_TO) < 0)
        die("inotify");
    while (access(gate, F_OK))
        if (read(watch, events, sizeof events) < 0 && errno != EINTR)
            die("inotify");
    /* Takes the kernel some 10 ms, which are not the tool's: before the end is written down, not after. */
    close(watch);
    free(copy);
}

int main(int argc, char **argv)
{
    long long began = now();
    char line[64];

    if (argc < 2 || argc > 3) {
        errno = EINVAL;
        die("usage: stamp LOG [GATE]");
    }
    int log = open(argv[1], O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log < 0)
        die(argv[1]);
    if (argc == 3)
        wait_for(argv[2]);
    int length = snprintf(line, sizeof line, "%lld %lld\n", began, now());
    if (write(log, line, length) != length)
        die(argv[1]);
    return 0;
}
