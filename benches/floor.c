/* The least that a program can do to run a command, alone or under a lock; what is above it is a tool's own.
 *
 *   floor spawn CMD…             start it, wait for it
 *   floor flock FILE CMD…        the same under flock(2)
 *   floor redis PORT KEY CMD…    the same under SET KEY owner NX PX 30000, deleted by a script if still ours
 *   floor guarded …              any of these with a second process, which outlives this one and owns the command:
 *                                without one, a lock whose taker is killed is free while its command runs
 *
 * No promise is kept here: nothing is renewed, nobody waits, no process is ended. Linked statically. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <netinet/tcp.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static void die(const char *what)
{
    fprintf(stderr, "floor: %s: %s\n", what, errno ? strerror(errno) : "no");
    exit(1);
}

static int guarded, link_to_guardian[2];
static pid_t guardian;

static int spawn(char **argv)
{
    pid_t pid;
    int status;
    errno = posix_spawnp(&pid, argv[0], NULL, NULL, argv, environ);
    if (errno)
        die(argv[0]);
    if (waitpid(pid, &status, 0) != pid)
        die("waitpid");
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* The second process: told to start the command, it says how that ended. */
static void fork_guardian(char **argv)
{
    int code;
    char word;
    if (!guarded)
        return;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, link_to_guardian))
        die("socketpair");
    guardian = fork();
    if (guardian < 0)
        die("fork");
    if (guardian)
        return;
    if (read(link_to_guardian[1], &word, 1) == 1) {
        code = spawn(argv);
        if (write(link_to_guardian[1], &code, sizeof code) == sizeof code)
            pause();
    }
    _exit(0);
}

static int run(char **argv)
{
    int code;
    if (!guarded)
        return spawn(argv);
    if (write(link_to_guardian[0], "", 1) != 1 || read(link_to_guardian[0], &code, sizeof code) != sizeof code)
        die("guardian");
    kill(guardian, SIGKILL);
    return code;
}

static int end(int code)
{
    if (guarded && waitpid(guardian, NULL, 0) != guardian)
        die("waitpid");
    return code;
}

static void lock_file(const char *path)
{
    int file = open(path, O_RDONLY | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || flock(file, LOCK_EX))
        die(path);
}

static int connect_to(int port)
{
    int one = 1;
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (server < 0 || connect(server, (struct sockaddr *)&to, sizeof to))
        die("connect");
    setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return server;
}

/* Sends one command, and takes the reply, which has to be this one. */
static void ask(int server, const char **words, const char *expected)
{
    char text[1024], reply[256];
    int count = 0, length, got = 0;
    while (words[count])
        count++;
    length = snprintf(text, sizeof text, "*%d\r\n", count);
    for (int i = 0; i < count; i++)
        length += snprintf(text + length, sizeof text - length, "$%zu\r\n%s\r\n", strlen(words[i]), words[i]);
    if (write(server, text, length) != length)
        die("write");
    do {
        int more = read(server, reply + got, sizeof reply - 1 - got);
        if (more <= 0)
            die("read");
        got += more;
    } while (reply[got - 1] != '\n');
    reply[got] = 0;
    errno = 0;
    if (strcmp(reply, expected))
        die(reply);
}

static int run_under_redis(int port, const char *key, char **argv)
{
    char owner[32];
    snprintf(owner, sizeof owner, "%d", getpid());
    fork_guardian(argv);
    int server = connect_to(port);
    const char *set[] = {"SET", key, owner, "NX", "PX", "30000", NULL};
    const char *script = "if redis.call('GET',KEYS[1])==ARGV[1] then return redis.call('DEL',KEYS[1]) end";
    const char *delete[] = {"EVAL", script, "1", key, owner, NULL};
    ask(server, set, "+OK\r\n");
    int code = run(argv);
    ask(server, delete, ":1\r\n");
    return code;
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "guarded")) {
        guarded = 1;
        argc--, argv++;
    }
    if (argc > 2 && !strcmp(argv[1], "spawn")) {
        fork_guardian(argv + 2);
        return end(run(argv + 2));
    }
    if (argc > 3 && !strcmp(argv[1], "flock")) {
        fork_guardian(argv + 3);
        lock_file(argv[2]);
        return end(run(argv + 3));
    }
    if (argc > 4 && !strcmp(argv[1], "redis"))
        return end(run_under_redis(atoi(argv[2]), argv[3], argv + 4));
    errno = EINVAL;
    die("usage: floor [guarded] spawn|flock FILE|redis PORT KEY, then CMD");
}
