/* Counts the calls that change files below one folder; kills the process before the n-th, lets it fail, or writes all
 * of them down. Preloaded into a process that arms it (`arm`) and says in between what it has acknowledged (`note`).
 *
 * A record of the trace: kind (1 byte), lengths of two names (2 x 4), offset (8), length of the data (8), then these. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { COUNT, KILL, FAIL, STICK };
static char root[PATH_MAX];
static int mode, error_number, trace = -1, armed;
static long turn, calls;

void arm(const char *folder, int how, long n, int error, int trace_handle) {
    snprintf(root, sizeof root, "%s", folder);
    mode = how, turn = n, error_number = error, trace = trace_handle, calls = 0, armed = 1;
}
long disarm(void) { armed = 0; return calls; }

static void put(const void *data, size_t length) {
    while (length) {
        long done = syscall(SYS_write, trace, data, length);
        if (done <= 0) abort();
        data = (const char *)data + done, length -= done;
    }
}
static void record(char kind, const char *name, const char *other, int64_t offset, const void *data, int64_t length) {
    if (trace < 0) return;
    int32_t names[2] = {(int32_t)strlen(name), (int32_t)strlen(other)};
    put(&kind, 1), put(names, 8), put(&offset, 8), put(&length, 8);
    put(name, names[0]), put(other, names[1]);
    if (length && data) put(data, length);
}
void note(const char *text) { record('N', text, "", 0, NULL, 0); }

static int inside(const char *path) { return armed && strncmp(path, root, strlen(root)) == 0; }
static int named(int handle, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    long length = armed ? readlink(link, path, PATH_MAX - 1) : -1;
    if (length < 0) return 0;
    path[length] = 0;
    return inside(path);
}
static void absolute(int folder, const char *name, char *path) {
    char base[PATH_MAX];
    if (name[0] == '/') { snprintf(path, PATH_MAX, "%s", name); return; }
    if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) base[0] = 0; }
    else if (!named(folder, base)) base[0] = 0;
    snprintf(path, 2 * PATH_MAX, "%s/%s", base, name);
}
/* Whether this call is to fail; does not return where it is the one to die before. */
static int fails(void) {
    calls++;
    if (mode == KILL && calls == turn) raise(SIGKILL);
    if ((mode == FAIL && calls == turn) || (mode == STICK && calls >= turn)) { errno = error_number; return 1; }
    return 0;
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static long written(int handle, const void *data, size_t length, int64_t offset, long (*make)(int, const void *, size_t, int64_t)) {
    char path[PATH_MAX];
    if (!named(handle, path) || strstr(path, "-shm")) return make(handle, data, length, offset);
    if (fails()) return -1;
    if (offset < 0 && (fcntl(handle, F_GETFL) & O_APPEND)) lseek(handle, 0, SEEK_END);
    int64_t at = offset < 0 ? lseek(handle, 0, SEEK_CUR) : offset;
    long done = make(handle, data, length, offset);
    if (done > 0) record('W', path, "", at, data, done);
    return done;
}
static long plain(int handle, const void *data, size_t length, int64_t at) { (void)at; return syscall(SYS_write, handle, data, length); }
static long placed(int handle, const void *data, size_t length, int64_t at) { return syscall(SYS_pwrite64, handle, data, length, at); }
ssize_t write(int handle, const void *data, size_t length) { return written(handle, data, length, -1, plain); }
ssize_t pwrite(int handle, const void *data, size_t length, off_t at) { return written(handle, data, length, at, placed); }
ssize_t pwrite64(int handle, const void *data, size_t length, off64_t at) { return written(handle, data, length, at, placed); }

static int shortened(int handle, int64_t length) {
    char path[PATH_MAX];
    if (!named(handle, path) || strstr(path, "-shm")) return syscall(SYS_ftruncate, handle, length);
    if (fails()) return -1;
    int done = syscall(SYS_ftruncate, handle, length);
    if (!done) record('T', path, "", length, NULL, 0);
    return done;
}
int ftruncate(int handle, off_t length) { return shortened(handle, length); }
int ftruncate64(int handle, off64_t length) { return shortened(handle, length); }

static int synchronized(int handle, long call) {
    char path[PATH_MAX];
    if (!named(handle, path)) return syscall(call, handle);
    if (fails()) return -1;
    int done = syscall(call, handle);
    if (!done) record('S', path, "", 0, NULL, 0);
    return done;
}
int fsync(int handle) { return synchronized(handle, SYS_fsync); }
int fdatasync(int handle) { return synchronized(handle, SYS_fdatasync); }

static int opened(int folder, const char *name, int flags, int rights) {
    char path[2 * PATH_MAX];
    absolute(folder, name, path);
    int changes = inside(path) && !strstr(path, "-shm") && (flags & (O_CREAT | O_TRUNC));
    struct stat found;
    int there = changes && !lstat(path, &found);
    changes = changes && (!there || (flags & O_TRUNC));
    if (changes && fails()) return -1;
    int handle = syscall(SYS_openat, folder, name, flags, rights);
    if (handle >= 0 && changes) record(there ? 'T' : 'C', path, "", 0, NULL, 0);
    return handle;
}
#define RIGHTS va_list more; va_start(more, flags); int rights = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0; va_end(more)
int open(const char *name, int flags, ...) { RIGHTS; return opened(AT_FDCWD, name, flags, rights); }
int open64(const char *name, int flags, ...) { RIGHTS; return opened(AT_FDCWD, name, flags, rights); }
int openat(int folder, const char *name, int flags, ...) { RIGHTS; return opened(folder, name, flags, rights); }
int openat64(int folder, const char *name, int flags, ...) { RIGHTS; return opened(folder, name, flags, rights); }

int rename(const char *from, const char *to) {
    char old[2 * PATH_MAX], new[2 * PATH_MAX];
    absolute(AT_FDCWD, from, old), absolute(AT_FDCWD, to, new);
    if (inside(old) && fails()) return -1;
    int done = REAL(rename)(from, to);
    if (!done && inside(old)) record('R', old, new, 0, NULL, 0);
    return done;
}
static int removed(int folder, const char *name, int flags) {
    char path[2 * PATH_MAX];
    absolute(folder, name, path);
    int counts = inside(path) && !strstr(path, "-shm");
    if (counts && fails()) return -1;
    int done = syscall(SYS_unlinkat, folder, name, flags);
    if (!done && counts) record('U', path, "", 0, NULL, 0);
    return done;
}
int unlink(const char *name) { return removed(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return removed(AT_FDCWD, name, AT_REMOVEDIR); }
int unlinkat(int folder, const char *name, int flags) { return removed(folder, name, flags); }

int mkdir(const char *name, mode_t rights) {
    char path[2 * PATH_MAX];
    absolute(AT_FDCWD, name, path);
    if (inside(path) && fails()) return -1;
    int done = REAL(mkdir)(name, rights);
    if (!done && inside(path)) record('M', path, "", 0, NULL, 0);
    return done;
}
