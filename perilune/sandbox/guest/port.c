/* Frames over the virtio-serial port named "agent". */
#define _GNU_SOURCE
#include "agent.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fd = -1;
static bool only_host; /* a socket: when its other end closes, nobody will come again */
static uint8_t *in, *out;
static size_t in_used, in_size, out_used, out_start, out_size;

static bool is_agent_port(const char *name) {
  char path[300], label[32] = "";
  snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", name);
  int f = open(path, O_RDONLY | O_CLOEXEC);
  if (f < 0) return false;
  ssize_t n = read(f, label, sizeof label - 1);
  close(f);
  return n >= 5 && !strncmp(label, "agent", 5);
}

void port_open(void) {
  for (int attempt = 0; fd < 0 && attempt < 5000; attempt++) {
    DIR *ports = opendir("/sys/class/virtio-ports");
    for (struct dirent *e; ports && (e = readdir(ports));) {
      char path[300];
      snprintf(path, sizeof path, "/dev/%s", e->d_name);
      if (e->d_name[0] != '.' && is_agent_port(e->d_name)) fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    }
    if (ports) closedir(ports);
    if (fd < 0) usleep(1000);
  }
  if (fd < 0) fprintf(stderr, "agent: no virtio port named agent\n"), exit(1);
}

void port_use(int descriptor) {
  fd = descriptor, only_host = true;
  fcntl(fd, F_SETFD, FD_CLOEXEC), fcntl(fd, F_SETFL, O_NONBLOCK);
}

int port_fd(void) { return fd; }
bool port_wants_write(void) { return out_used > out_start; }
size_t port_backlog(void) { return out_used - out_start; }

static void *grown(void *p, size_t *size, size_t need) {
  if (need <= *size) return p;
  *size = need + (64 << 10);
  p = realloc(p, *size);
  if (!p) abort();
  return p;
}

void send_frame(uint8_t type, uint8_t channel, uint32_t stream, const void *data, uint32_t length) {
  struct frame head = {type, channel, 0, stream, length};
  if (out_start == out_used) out_start = out_used = 0;
  out = grown(out, &out_size, out_used + sizeof head + length);
  memcpy(out + out_used, &head, sizeof head);
  if (length) memcpy(out + out_used + sizeof head, data, length);
  out_used += sizeof head + length;
}

void port_write(void) {
  while (out_used > out_start) {
    ssize_t n = write(fd, out + out_start, out_used - out_start);
    if (n <= 0) return; /* full, or nobody listens: poll says when to go on */
    out_start += n;
  }
}

void port_drain(void) {
  while (out_used > out_start) {
    struct pollfd p = {fd, POLLOUT, 0};
    poll(&p, 1, 100);
    if (p.revents & POLLHUP) return;
    port_write();
  }
}

/* The host went away, perhaps in the middle of a frame: both directions start afresh. */
static void forget(void) { in_used = out_used = out_start = 0; }

void port_read(void (*handle)(const struct frame *, const uint8_t *)) {
  for (;;) {
    in = grown(in, &in_size, in_used + CHUNK);
    ssize_t n = read(fd, in + in_used, in_size - in_used);
    if (n == 0 && only_host) exit(0);
    if (n == 0) { forget(); usleep(5000); return; }
    if (n < 0) return;
    in_used += n;
    size_t at = 0;
    while (in_used - at >= sizeof(struct frame)) {
      struct frame head;
      memcpy(&head, in + at, sizeof head);
      if (head.length > MAX_FRAME || head.zero) { forget(); return; }
      if (in_used - at < sizeof head + head.length) break;
      handle(&head, in + at + sizeof head);
      at += sizeof head + head.length;
    }
    memmove(in, in + at, in_used - at);
    in_used -= at;
  }
}
