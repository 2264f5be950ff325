/* timer ROUNDS EVERY CMD [ARG]… [:: EVERY CMD [ARG]…]…
 *
 * Runs the commands in turns, so that all of them meet the same load, each with posix_spawn and from start to
 * exit. The order changes from round to round: whoever comes after a run of the same program finds warm caches.
 * A command takes part in every EVERY-th round. Prints the times in nanoseconds as one JSON array of
 * arrays, in the order of the commands. A command that fails ends the measurement: its time would mean nothing.
 *
 * Standard output of the commands goes to /dev/null, standard error is ours. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

extern char **environ;

struct contestant {
    long every;
    char **argv;
    long long *took;
    long runs;
};

static void die(const char *what, const char *detail)
{
    fprintf(stderr, "timer: %s: %s\n", what, detail);
    exit(1);
}

static long number(const char *text)
{
    char *end;
    long value = strtol(text, &end, 10);
    if (*end || value < 1)
        die("not a positive number", text);
    return value;
}

static long long now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* Splits the words at "::"; returns how many commands there are. */
static int read_contestants(char **words, long rounds, struct contestant *all, int room)
{
    int count = 0;
    while (*words) {
        if (count == room || !words[1])
            die("too many commands, or one that is empty", *words);
        struct contestant *one = &all[count++];
        one->every = number(*words);
        one->argv = ++words;
        one->took = calloc(rounds, sizeof *one->took);
        one->runs = 0;
        if (!one->took)
            die("calloc", strerror(errno));
        while (*words && strcmp(*words, "::"))
            words++;
        if (*words)
            *words++ = NULL;
    }
    return count;
}

static long long time_of_one_run(char **argv, posix_spawn_file_actions_t *actions)
{
    pid_t pid;
    int status;
    long long began = now();
    int error = posix_spawnp(&pid, argv[0], actions, NULL, argv, environ);
    if (error)
        die(argv[0], strerror(error));
    if (waitpid(pid, &status, 0) != pid)
        die("waitpid", strerror(errno));
    long long took = now() - began;
    if (!WIFEXITED(status) || WEXITSTATUS(status))
        die("failed", argv[0]);
    return took;
}

static void shuffle(struct contestant **order, int count)
{
    for (int i = count - 1; i > 0; i--) {
        int other = random() % (i + 1);
        struct contestant *one = order[i];
        order[i] = order[other];
        order[other] = one;
    }
}

static void print(const struct contestant *all, int count)
{
    for (int i = 0; i < count; i++)
        for (long run = 0; run < all[i].runs; run++)
            printf("%s%lld", run ? "," : i ? "],[" : "[[", all[i].took[run]);
    puts("]]");
}

int main(int argc, char **argv)
{
    struct contestant all[32], *order[32];
    posix_spawn_file_actions_t actions;

    if (argc < 4)
        die("usage", "timer ROUNDS EVERY CMD [ARG]... [:: EVERY CMD [ARG]...]...");
    long rounds = number(argv[1]);
    int count = read_contestants(argv + 2, rounds, all, sizeof all / sizeof *all);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    for (int i = 0; i < count; i++)
        order[i] = &all[i];
    for (long round = 0; round < rounds; round++) {
        shuffle(order, count);
        for (int i = 0; i < count; i++)
            if (round % order[i]->every == 0)
                order[i]->took[order[i]->runs++] = time_of_one_run(order[i]->argv, &actions);
    }
    print(all, count);
    return 0;
}
