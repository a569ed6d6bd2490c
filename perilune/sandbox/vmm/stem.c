/* A QEMU that has run a guest forks another one that goes on where it stands: loaded, and its code translated.
 *
 * fork() takes only the thread that calls it. Here every other thread is first sent a signal whose handler waits; what
 * the kernel pushed on its stack to return from that handler is all there is to a thread, besides its thread pointer.
 * In the child a new thread returns from the same handler. Whatever locks were held are held by the same owners.
 *
 * Memory is the child's own by copy on write. Of the descriptors, those that two processes must not share are made
 * again at the same number: event counters, files and listening sockets in the machine's folder; connections are ended. */
#define _GNU_SOURCE
#include "preload.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

enum { MOST_THREADS = 128, MOST_FDS = 1024, STOP = SIGFPE }; /* QEMU's threads block nearly every other signal */

static struct thread { pid_t number; void *frame; uintptr_t pointer; } threads[MOST_THREADS];
static uint32_t stopped, going;

/* QEMU keeps guest memory and translations from being forked. */
int madvise(void *start, size_t length, int advice) {
  return advice == MADV_DONTFORK ? 0 : syscall(SYS_madvise, start, length, advice);
}

static void stand_still(int signal, siginfo_t *info, void *frame) {
  uint32_t at = __atomic_fetch_add(&stopped, 1, __ATOMIC_SEQ_CST), round = __atomic_load_n(&going, __ATOMIC_SEQ_CST);
  int error = errno;
  if (info->si_code != SI_TKILL) { /* not ours: a fault of QEMU's own */
    sigaction(signal, &(struct sigaction){.sa_handler = SIG_DFL}, 0);
    return;
  }
  if (at < MOST_THREADS) {
    threads[at].frame = frame, threads[at].pointer = (uintptr_t)pthread_self();
    __atomic_store_n(&threads[at].number, syscall(SYS_gettid), __ATOMIC_SEQ_CST);
  }
  while (__atomic_load_n(&going, __ATOMIC_SEQ_CST) == round) syscall(SYS_futex, &going, FUTEX_WAIT_PRIVATE, round, 0, 0, 0);
  errno = error;
}

static bool stands(pid_t number) {
  for (uint32_t i = 0; i < stopped && i < MOST_THREADS; i++)
    if (__atomic_load_n(&threads[i].number, __ATOMIC_SEQ_CST) == number) return true;
  return false;
}

/* The numbers that name the entries of a folder of /proc; without malloc, whose lock somebody may hold. */
static int numbers(const char *folder, int *found, int most) {
  char entries[4096] __attribute__((aligned(8)));
  int fd = syscall(SYS_openat, AT_FDCWD, folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC), count = 0;
  for (long size, at; (size = syscall(SYS_getdents64, fd, entries, sizeof entries)) > 0;)
    for (at = 0; at < size; at += ((struct dirent64 *)(entries + at))->d_reclen) {
      int number = atoi(((struct dirent64 *)(entries + at))->d_name);
      if (((struct dirent64 *)(entries + at))->d_name[0] != '.' && number != fd && count < most) found[count++] = number;
    }
  syscall(SYS_close, fd);
  return count;
}

static void stop_all(void) {
  int all[MOST_THREADS], asked[MOST_THREADS], count, askings = 0, own = syscall(SYS_gettid);
  stopped = 0;
  memset(threads, 0, sizeof threads);
  for (bool done = false; !done;) {
    done = true;
    count = numbers("/proc/self/task", all, MOST_THREADS);
    for (int i = 0; i < count; i++) {
      bool known = false;
      if (all[i] == own || stands(all[i])) continue;
      done = false;
      for (int j = 0; j < askings; j++) known |= asked[j] == all[i];
      if (!known && askings < MOST_THREADS) asked[askings++] = all[i], syscall(SYS_tgkill, getpid(), all[i], STOP);
    }
    if (!done) sched_yield();
  }
}

static void go_on(void) {
  __atomic_add_fetch(&going, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &going, FUTEX_WAKE_PRIVATE, MOST_THREADS, 0, 0, 0);
}

static void revive(const struct thread *t) {
  long flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_SETTLS;
  long number = SYS_clone;
  int *id = (int *)(t->pointer + CACHED_TID); /* keeps the old number: recursive locks name their owner by it */
  register int *child_id __asm__("r10") = id;
  register uintptr_t pointer __asm__("r8") = t->pointer;
  __asm__ volatile(
      "syscall\n test %%rax, %%rax\n jnz 1f\n"
      "mov %[back], %%eax\n syscall\n" /* the new thread: its stack is the frame */
      "1:"
      : "+a"(number)
      : "D"(flags | CLONE_CHILD_CLEARTID), "S"(t->frame), "d"(id), "r"(child_id), "r"(pointer), [back] "i"(SYS_rt_sigreturn)
      : "rcx", "r11", "memory");
  if (number < 0) _exit(1);
}

/* ---- descriptors ---- */

static void replace(int fd, int made) {
  int flags = fcntl(fd, F_GETFL), closing = fcntl(fd, F_GETFD);
  if (made < 0 || dup3(made, fd, closing & FD_CLOEXEC ? O_CLOEXEC : 0) < 0) _exit(1);
  fcntl(fd, F_SETFL, flags & (O_NONBLOCK | O_APPEND));
  syscall(SYS_close, made);
}

static int counter(int fd) {
  char path[64], text[512] = "";
  snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
  int info = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
  if (read(info, text, sizeof text - 1) < 0) _exit(1);
  syscall(SYS_close, info);
  const char *count = strstr(text, "eventfd-count:");
  return eventfd(count ? strtoul(count + 14, 0, 16) : 0, EFD_CLOEXEC);
}

static bool moved(const char *path, const char *from, const char *to, char *where, size_t size) {
  size_t length = strlen(from);
  return !strncmp(path, from, length) && path[length] == '/' && snprintf(where, size, "%s%s", to, path + length) < (int)size;
}

static int socket_again(int fd, const char *from, const char *to) {
  struct sockaddr_un name = {.sun_family = AF_UNIX};
  char path[sizeof name.sun_path];
  socklen_t length = sizeof name;
  int listening = 0, pair[2], made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &(socklen_t){sizeof listening});
  getsockname(fd, (void *)&name, &length);
  if (listening && moved(name.sun_path, from, to, path, sizeof path)) {
    strcpy(name.sun_path, path);
    return bind(made, (void *)&name, sizeof name) || listen(made, 1) ? -1 : made;
  }
  syscall(SYS_close, made);
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) return -1;
  syscall(SYS_close, pair[1]); /* whoever reads it reads its end */
  return pair[0];
}

static int door;

static void own_descriptors(const char *from, const char *to) {
  int all[MOST_FDS], count = numbers("/proc/self/fd", all, MOST_FDS);
  for (int i = 0; i < count; i++) {
    char link[64], path[4096], where[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", all[i]);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0 || all[i] == door) continue;
    path[length] = 0;
    if (!strcmp(path, "anon_inode:[eventfd]")) replace(all[i], counter(all[i]));
    else if (!strncmp(path, "socket:", 7)) replace(all[i], socket_again(all[i], from, to));
    else if (moved(path, from, to, where, sizeof where))
      replace(all[i], syscall(SYS_openat, AT_FDCWD, where, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  }
}

/* ---- the door ---- */

static bool ends; /* with whoever may ask */

/* A message is the child's folder, with the child's own door; the answer its number. */
static void *serve(void *none) {
  static char from[4096], to[4096];
  for (int theirs[2];;) {
    ssize_t length = receive(door, to, sizeof to - 1, theirs), folder = readlink("/proc/self/fd/1", from, sizeof from - 1);
    if (length <= 0 && ends) _exit(0);
    while (length <= 0) pause(); /* a process lives as long as its first thread */
    to[length] = 0, from[folder] = 0, *strrchr(from, '/') = 0;
    stop_all();
    pid_t pid = sibling();
    if (pid) {
      go_on();
      syscall(SYS_close, theirs[0]);
      if (send(door, &pid, sizeof pid, MSG_NOSIGNAL) < 0 && ends) _exit(1);
      continue;
    }
    setsid();
    syscall(SYS_close, door);
    door = theirs[0], ends = false;
    own_descriptors(from, to);
    for (uint32_t i = 0; i < stopped && i < MOST_THREADS; i++) revive(threads + i);
  }
  return none;
}

void open_door(int number, bool end) {
  struct sigaction action = {.sa_sigaction = stand_still, .sa_flags = SA_SIGINFO | SA_RESTART};
  pthread_t thread;
  sigset_t all, before;
  door = number, ends = end;
  sigaction(STOP, &action, 0);
  sigfillset(&all), pthread_sigmask(SIG_SETMASK, &all, &before);
  if (pthread_create(&thread, 0, serve, 0)) _exit(1);
  pthread_sigmask(SIG_SETMASK, &before, 0);
}
