/* File operations. Each runs in its own child as the asking user; records go to descriptor 1, the result is an errno. */
#define _GNU_SOURCE
#include "agent.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static int put_all(int fd, const void *data, size_t length) {
  for (const char *p = data; length;) {
    ssize_t n = write(fd, p, length);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    p += n, length -= n;
  }
  return 0;
}

static char kind_of(mode_t mode) { return S_ISDIR(mode) ? 'd' : S_ISREG(mode) ? 'f' : S_ISLNK(mode) ? 'l' : 'o'; }

/* {u32 length, u8 kind, u8 kind of the target, u32 mode, u64 size, i64 mtime in ns} then owner, group, path, target */
static int put_entry(const char *path) {
  struct stat st, to;
  char text[PATH_MAX * 2 + 256], owner[64], group[64], target[PATH_MAX] = "";
  if (lstat(path, &st)) return errno;
  char kind = kind_of(st.st_mode), final = kind;
  if (kind == 'l') {
    ssize_t n = readlink(path, target, sizeof target - 1);
    target[n < 0 ? 0 : n] = 0;
    final = stat(path, &to) ? '?' : kind_of(to.st_mode);
    if (final != '?') { char whole[PATH_MAX]; if (realpath(path, whole)) strcpy(target, whole); }
  }
  user_name(st.st_uid, owner, sizeof owner), group_name(st.st_gid, group, sizeof group);
  uint32_t mode = st.st_mode;
  uint64_t size = st.st_size;
  int64_t when = st.st_mtim.tv_sec * 1000000000ll + st.st_mtim.tv_nsec;
  text[4] = kind, text[5] = final;
  memcpy(text + 6, &mode, 4), memcpy(text + 10, &size, 8), memcpy(text + 18, &when, 8);
  uint32_t length = 26 + snprintf(text + 26, sizeof text - 26, "%s%c%s%c%s%c%s", owner, 0, group, 0, path, 0, target) + 1;
  memcpy(text, &length, 4);
  return put_all(1, text, length);
}

static int list(const char *path, uint32_t depth) {
  DIR *dir = opendir(path);
  if (!dir) return errno;
  for (struct dirent *e; (e = readdir(dir));) {
    char child[PATH_MAX];
    if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
    snprintf(child, sizeof child, "%s/%s", strcmp(path, "/") ? path : "", e->d_name);
    put_entry(child); /* it may be gone by now: then it is not listed */
    struct stat st;
    if (depth > 1 && !lstat(child, &st) && S_ISDIR(st.st_mode)) list(child, depth - 1);
  }
  closedir(dir);
  return 0;
}

static int make_dirs(const char *path) {
  char part[PATH_MAX];
  struct stat st;
  if (!stat(path, &st)) return S_ISDIR(st.st_mode) ? EEXIST : ENOTDIR;
  if (snprintf(part, sizeof part, "%s", path) >= (int)sizeof part) return ENAMETOOLONG;
  for (char *p = part + 1; (p = strchr(p, '/')); *p++ = '/') {
    *p = 0;
    if (mkdir(part, 0755) && errno != EEXIST) return errno;
  }
  return mkdir(path, 0755) && errno != EEXIST ? errno : 0;
}

static int make_parents(const char *path) {
  char parent[PATH_MAX];
  snprintf(parent, sizeof parent, "%s", path);
  char *slash = strrchr(parent, '/');
  if (!slash || slash == parent) return 0;
  *slash = 0;
  int code = make_dirs(parent);
  return code == EEXIST ? 0 : code;
}

static int remove_at(int at, const char *name) {
  if (!unlinkat(at, name, 0)) return 0;
  if (errno != EISDIR && errno != EPERM) return errno;
  int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), code = 0;
  if (fd < 0) return errno;
  DIR *dir = fdopendir(fd);
  for (struct dirent *e; (e = readdir(dir));) {
    if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
    if ((code = remove_at(fd, e->d_name))) break;
  }
  closedir(dir);
  return code ? code : unlinkat(at, name, AT_REMOVEDIR) ? errno : 0;
}

static int copy(int from, int to) {
  static char data[64 << 10];
  for (ssize_t n; (n = read(from, data, sizeof data));) {
    if (n < 0) return errno;
    int code = put_all(to, data, n);
    if (code) return code;
  }
  return 0;
}

static int read_file(const char *path) {
  struct stat st;
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 || fstat(fd, &st)) return errno;
  if (S_ISDIR(st.st_mode)) return EISDIR;
  return copy(fd, 1);
}

static int write_file(const char *path, uint32_t mode) {
  int code = make_parents(path);
  if (code) return code;
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return errno;
  if (mode && fchmod(fd, mode)) return errno;
  code = copy(0, fd);
  return close(fd) && !code ? errno : code;
}

static int move(const char *from, const char *to) {
  int code = make_parents(to);
  return code ? code : rename(from, to) ? errno : 0;
}

/* ---- watching ---- */

enum { EVENTS = IN_CREATE | IN_MODIFY | IN_ATTRIB | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO };
static char *watched[65536];

static int watch_tree(int fd, const char *path, bool deep) {
  int id = inotify_add_watch(fd, path, EVENTS | IN_ONLYDIR);
  if (id < 0 || id >= 65536) return errno;
  watched[id] = strdup(path);
  DIR *dir = deep ? opendir(path) : 0;
  for (struct dirent *e; dir && (e = readdir(dir));) {
    char child[PATH_MAX];
    if (e->d_type != DT_DIR || !strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
    snprintf(child, sizeof child, "%s/%s", path, e->d_name);
    watch_tree(fd, child, true);
  }
  if (dir) closedir(dir);
  return 0;
}

/* {u32 inotify mask, u32 length} then the path relative to what is watched */
static int put_event(const char *root, const struct inotify_event *e) {
  char text[PATH_MAX + 8];
  const char *dir = watched[e->wd] + strlen(root);
  while (*dir == '/') dir++;
  uint32_t mask = e->mask, length = snprintf(text + 8, PATH_MAX, "%s%s%s", dir, *dir && e->len ? "/" : "", e->len ? e->name : "");
  memcpy(text, &mask, 4), memcpy(text + 4, &length, 4);
  return put_all(1, text, 8 + length);
}

static int watch(const char *root, bool deep) {
  static char data[64 << 10] __attribute__((aligned(8)));
  int fd = inotify_init1(IN_CLOEXEC), code = fd < 0 ? errno : watch_tree(fd, root, deep);
  if (code) return code;
  uint32_t ready[2] = {0, 0};
  put_all(1, ready, 8);
  for (ssize_t n; (n = read(fd, data, sizeof data)) > 0;)
    for (char *p = data; p < data + n; p += sizeof(struct inotify_event) + ((struct inotify_event *)p)->len) {
      struct inotify_event *e = (void *)p;
      if (e->wd < 0 || !watched[e->wd] || e->mask & IN_IGNORED) continue;
      if ((code = put_event(root, e))) return code;
      if (deep && e->mask & IN_ISDIR && e->mask & (IN_CREATE | IN_MOVED_TO)) {
        char child[PATH_MAX];
        snprintf(child, sizeof child, "%s/%s", watched[e->wd], e->name);
        watch_tree(fd, child, true);
      }
    }
  return errno;
}

/* ---- the whole machine ---- */

static int freeze(bool on) {
  int fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (on) sync();
  return fd < 0 || ioctl(fd, on ? FIFREEZE : FITHAW, 0) ? errno : 0;
}

static int stats(void) {
  struct statvfs disk;
  if (statvfs("/", &disk)) return errno;
  char text[128];
  int n = snprintf(text, sizeof text, "disk %llu %llu\n", (unsigned long long)disk.f_blocks * disk.f_frsize,
                   (unsigned long long)disk.f_bavail * disk.f_frsize);
  int code = put_all(1, text, n);
  const char *files[] = {"/proc/meminfo", "/proc/stat", "/proc/uptime", "/proc/loadavg"};
  for (int i = 0; i < 4 && !code; i++) code = read_file(files[i]);
  return code;
}

/* A relative path, and one that starts with ~, begins at the user's home. */
static const char *absolute(const struct user *user, const char *path, char *whole) {
  if (!*path || *path == '/') return path;
  if (*path == '~') path += 1 + (path[1] == '/');
  return snprintf(whole, PATH_MAX, "%s/%s", user->home, path) < PATH_MAX ? whole : 0;
}

int run_op(uint8_t op, const struct user *user, const char *first, const char *second, uint32_t number) {
  static char from[PATH_MAX], to[PATH_MAX];
  first = absolute(user, first, from), second = absolute(user, second, to);
  if (!first || !second) return ENAMETOOLONG;
  umask(022);
  switch (op) {
    case STAT: return put_entry(first);
    case LISTDIR: return list(first, number ? number : 1);
    case MAKEDIR: return make_dirs(first);
    case MOVE: return move(first, second);
    case REMOVE: return remove_at(AT_FDCWD, first);
    case READ: return read_file(first);
    case WRITE: return write_file(first, number);
    case WATCH: return watch(first, number);
    case FREEZE: return freeze(true);
    case THAW: return freeze(false);
    case STATS: return stats();
  }
  return ENOSYS;
}
