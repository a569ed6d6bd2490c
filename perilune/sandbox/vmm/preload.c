/* Preloaded into QEMU: what we change in it without building our own.
 *
 * Holes. When a guest reports free pages, QEMU punches a hole into the file behind its memory and then drops the pages.
 * That file is the base which every sibling maps privately: the hole would corrupt them all. Here the punch succeeds
 * without touching the file; the pages that this guest made its own are dropped all the same.
 *
 * A second guest. Whenever QEMU loads a state it discards the translations of the code that ran before (TCG), although
 * the code is mostly the same: siblings run the same kernel. A state that is read from a file named `again` discards
 * only what was translated from pages that changed: those of the list `changed` beside it. The machine stands still
 * meanwhile.
 *
 * Control. QEMU reads its control socket byte by byte, 7 us each: a command of 300 bytes costs 2 ms. Here it reads 4 KiB.
 *
 * Fork server. Half of a QEMU's start is the dynamic linker (240 thousand relocations, 4 MB of pages made private). One
 * process does that once, stops before QEMU's first instruction, and forks a QEMU for every command line it is sent:
 * faster, and siblings share those pages. They share the layout of QEMU's own address space as well. */
#define _GNU_SOURCE
#include "preload.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static int pass(const char *name, int fd, int mode, off_t offset, off_t length) {
  if (mode & FALLOC_FL_PUNCH_HOLE) return 0;
  int (*real)(int, int, off_t, off_t) = dlsym(RTLD_NEXT, name);
  return real(fd, mode, offset, length);
}
int fallocate(int fd, int mode, off_t offset, off_t length) { return pass("fallocate", fd, mode, offset, length); }
int fallocate64(int fd, int mode, off_t offset, off_t length) { return pass("fallocate64", fd, mode, offset, length); }

static int loading = -1;
static uint8_t *flush, entry;

static void write_code(uint8_t *at, const void *code, size_t size) {
  uint8_t *page = (uint8_t *)((uintptr_t)at & -4096ul);
  if (mprotect(page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC)) abort();
  memcpy(at, code, size);
  mprotect(page, 8192, PROT_READ | PROT_EXEC);
}

/* It returns !suspended. Now it returns that << 12. */
static void read_more(void) {
  static const uint8_t code[] = {0x8b, 0x47, 0x3c, 0x85, 0xc0, 0x0f, 0x94, 0xc0, 0x0f, 0xb6, 0xc0, 0xc3};
  uint8_t *found = dlsym(RTLD_DEFAULT, "monitor_can_read");
  if (found && !memcmp(found, code, sizeof code)) write_code(found + 8, "\xc1\xe0\x0c", 3);
}

/* `changed` holds runs of pages, {u64 first, u64 count}. */
static bool keep_translations(const char *changed) {
  void (*invalidate)(uint64_t, uint64_t) = dlsym(RTLD_DEFAULT, "tb_invalidate_phys_range");
  bool (*expect)(const void *, void *) = dlsym(RTLD_DEFAULT, "yank_register_instance");
  FILE *runs = fopen(changed, "re");
  flush = dlsym(RTLD_DEFAULT, "tb_flush");
  if (!runs || !invalidate || !expect || !flush) return false;
  for (uint64_t run[2]; fread(run, sizeof run, 1, runs);) invalidate(run[0] << 12, (run[0] + run[1]) << 12);
  fclose(runs);
  struct { int kind; void *none; } migration = {2, 0};
  expect(&migration, 0); /* the load ends by unregistering what it never registered */
  entry = *flush, write_code(flush, "\xc3", 1); /* ret */
  return true;
}

int open64(const char *path, int flags, ...) {
  char changed[4096];
  size_t length = strlen(path);
  va_list more;
  va_start(more, flags);
  int fd = syscall(SYS_openat, AT_FDCWD, path, flags | O_LARGEFILE, va_arg(more, int));
  va_end(more);
  if (fd < 0 || length < 6 || length > 4000 || strcmp(path + length - 6, "/again")) return fd;
  snprintf(changed, sizeof changed, "%.*s/changed", (int)length - 6, path);
  if (keep_translations(changed)) return loading = fd;
  close(fd), errno = ENOSYS;
  return -1;
}

int close(int fd) {
  if (fd >= 0 && fd == loading) loading = -1, write_code(flush, &entry, 1);
  return syscall(SYS_close, fd);
}

enum { MOST_WORDS = 512 };
typedef int program(int, char **, char **);
static char text[64 << 10];

/* A message and up to two descriptors (-1: none). */
ssize_t receive(int door, char *text, size_t size, int fds[2]) {
  union { char bytes[CMSG_SPACE(2 * sizeof(int))]; struct cmsghdr align; } rights;
  struct iovec piece = {text, size};
  struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &rights, .msg_controllen = sizeof rights};
  ssize_t length = recvmsg(door, &message, MSG_CMSG_CLOEXEC);
  struct cmsghdr *head = length > 0 ? CMSG_FIRSTHDR(&message) : 0;
  fds[0] = fds[1] = -1;
  if (head) memcpy(fds, CMSG_DATA(head), head->cmsg_len - CMSG_LEN(0));
  return length;
}

/* A child of our parent, which is who waits for it. The C library keeps the thread's number beside its stack; it must
 * be the child's own. */
pid_t sibling(void) {
  pid_t *cached = (pid_t *)((char *)pthread_self() + CACHED_TID);
  if (*cached != syscall(SYS_gettid)) cached = 0;
  long flags = CLONE_PARENT | (cached ? CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID : 0) | SIGCHLD;
  return syscall(SYS_clone, flags, 0, 0, cached, 0);
}

/* A message is 'i' (in namespaces of its own), 's' (ends when nobody is at its door any more) or '-', then NUL-terminated
 * words, and the descriptors of a log and of the new machine's door (stem.c). The answer is its number. Returns in
 * children only. */
static int serve(int door, char **words) {
  for (;;) {
    int fds[2], count = 0;
    ssize_t length = receive(door, text, sizeof text - 1, fds);
    if (length <= 1) _exit(0);
    pid_t pid = sibling();
    if (pid) {
      close(fds[0]);
      if (fds[1] >= 0) close(fds[1]);
      if (send(door, &pid, sizeof pid, 0) < 0) _exit(1);
      continue;
    }
    setsid();
    dup2(fds[0], 1), dup2(fds[0], 2);
    close(door), close(fds[0]);
    if (fds[1] >= 0) open_door(fds[1], text[0] == 's');
    if (text[0] == 'i' && unshare(CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)) _exit(1);
    for (char *word = text + 1; word < text + length && count < MOST_WORDS; word += strlen(word) + 1) words[count++] = word;
    return count;
  }
}

/* Before QEMU's own constructors: one of them starts a thread, which no fork would take along. */
int __libc_start_main(program *main, int argc, char **argv, void (*a)(void), void (*b)(void), void (*c)(void), void *end) {
  static char *words[MOST_WORDS + 1];
  int (*real)(program *, int, char **, void (*)(void), void (*)(void), void (*)(void), void *);
  real = dlsym(RTLD_NEXT, "__libc_start_main");
  const char *door = getenv("PERILUNE_DOOR");
  if (door) {
    int number = atoi(door);
    unsetenv("PERILUNE_DOOR"), read_more();
    argc = serve(number, argv = words);
  }
  return real(main, argc, argv, a, b, c, end);
}
