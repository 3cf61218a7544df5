/* Preloaded into every process of a run. In the processes of one role, the n-th of some calls on files below DRILL_ROOT
 * fails, or writes half; or the wall clock jumps. DRILL_MARK is made when that happens, so that it happens once.
 *
 * Roles: the first program that is started is the orchestrator; a process that has called setsid is a worker, as is
 * what it forks; all else (the fork server, git) is left alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { OTHER, ORCHESTRATOR, WORKER };

static int role = OTHER, wanted_role = -1, error_number, sticky;
static long nth, seen, clock_by;
static double clock_after, began;
static const char *calls = "", *root, *only = "", *mark;

#define REAL(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))

static double monotonic(void) {
    struct timespec t;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static const char *given(const char *name) {
    const char *value = getenv(name);
    return value ? strdup(value) : NULL;
}

__attribute__((constructor)) static void start(void) {
    const char *text = getenv("DRILL_ROLE");
    if (!text) return;
    wanted_role = !strcmp(text, "worker") ? WORKER : !strcmp(text, "orchestrator") ? ORCHESTRATOR : OTHER;
    root = given("DRILL_ROOT"), mark = given("DRILL_MARK");
    if ((text = given("DRILL_CALLS"))) calls = text;
    if ((text = given("DRILL_ONLY"))) only = text;
    if ((text = getenv("DRILL_NTH"))) nth = atol(text);
    if ((text = getenv("DRILL_ERRNO"))) error_number = atoi(text);
    if ((text = getenv("DRILL_STICKY"))) sticky = atoi(text);
    if ((text = getenv("DRILL_CLOCK_BY"))) clock_by = atol(text);
    if ((text = getenv("DRILL_CLOCK_AFTER"))) clock_after = atof(text);
    began = monotonic();
    if (!getenv("DRILL_FIRST")) {
        role = ORCHESTRATOR;
        setenv("DRILL_FIRST", "1", 1); /* not in the programs that it starts */
    }
}

static int marked(void) { return syscall(SYS_faccessat, AT_FDCWD, mark, F_OK) == 0; }

static void leave_mark(const char *what, const char *path) {
    char line[4400];
    int length = snprintf(line, sizeof line, "%s %.4096s\n", what, path);
    int fd = syscall(SYS_openat, AT_FDCWD, mark, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (fd < 0) return;
    syscall(SYS_write, fd, line, length);
    syscall(SYS_close, fd);
}

/* 0, or what the call is to do instead: fail with this errno; -1: write half. */
static int fault(const char *call, const char *path) {
    char absolute[4096];
    if (nth == 0 || role != wanted_role || !strstr(calls, call)) return 0;
    if (path[0] != '/') {
        char folder[2048];
        if (!syscall(SYS_getcwd, folder, sizeof folder)) return 0;
        snprintf(absolute, sizeof absolute, "%s/%s", folder, path);
        path = absolute;
    }
    if (strncmp(path, root, strlen(root)) || !strstr(path, only)) return 0;
    if (marked()) return sticky ? error_number : 0;
    if (++seen != nth) return 0;
    leave_mark(call, path);
    return error_number;
}

static int fault_of(const char *call, int fd) {
    char name[64], path[4096];
    if (nth == 0 || role != wanted_role) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, name, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return fault(call, path);
}

#define FAIL(found) do { int number = (found); if (number > 0) { errno = number; return -1; } } while (0)

pid_t setsid(void) {
    pid_t made = REAL(setsid)();
    if (made >= 0 && getenv("DRILL_ROLE")) role = WORKER, seen = 0, began = monotonic();
    return made;
}

ssize_t write(int fd, const void *data, size_t size) {
    int found = fault_of("write", fd);
    FAIL(found);
    return syscall(SYS_write, fd, data, found < 0 && size > 1 ? size / 2 : size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    int found = fault_of("write", fd);
    FAIL(found);
    return syscall(SYS_pwrite64, fd, data, found < 0 && size > 1 ? size / 2 : size, at);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite64(fd, data, size, at); }

int fsync(int fd) {
    FAIL(fault_of("fsync", fd));
    return syscall(SYS_fsync, fd);
}

int fdatasync(int fd) {
    FAIL(fault_of("fsync", fd));
    return syscall(SYS_fdatasync, fd);
}

int rename(const char *from, const char *to) {
    FAIL(fault("rename", to));
    return syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to);
}

int mkdir(const char *path, mode_t mode) {
    FAIL(fault("mkdir", path));
    return syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

int unlink(const char *path) {
    FAIL(fault("unlink", path));
    return syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

int symlink(const char *target, const char *path) {
    FAIL(fault("symlink", path));
    return syscall(SYS_symlinkat, target, AT_FDCWD, path);
}

static int open_any(int folder, const char *path, int flags, va_list more) {
    int creates = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE;
    mode_t mode = creates ? va_arg(more, mode_t) : 0;
    if ((flags & O_ACCMODE) != O_RDONLY) FAIL(fault("open", path));
    return syscall(SYS_openat, folder, path, flags, mode);
}

#define OPEN(name, parameters, folder) \
    int name parameters { va_list more; va_start(more, flags); int fd = open_any(folder, path, flags, more); \
                          va_end(more); return fd; }

OPEN(open, (const char *path, int flags, ...), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD)
OPEN(openat, (int folder, const char *path, int flags, ...), folder)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder)

static long jump(void) {
    static int told;
    if (clock_by == 0 || (wanted_role != OTHER && role != wanted_role) || monotonic() - began < clock_after) return 0;
    if (!told) told = 1, leave_mark("clock", role == WORKER ? "worker" : "orchestrator");
    return clock_by;
}

int clock_gettime(clockid_t id, struct timespec *t) {
    int failed = syscall(SYS_clock_gettime, id, t);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += jump();
    return failed;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    int failed = syscall(SYS_gettimeofday, t, zone);
    if (!failed) t->tv_sec += jump();
    return failed;
}

time_t time(time_t *to) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (to) *to = t.tv_sec;
    return t.tv_sec;
}
