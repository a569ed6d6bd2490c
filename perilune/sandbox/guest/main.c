/* The loop: the port, the children's exits and every stream's descriptors. */
#define _GNU_SOURCE
#include "agent.h"
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

enum { MOST_FDS = 4 * 4096 + 2 };
static struct pollfd fds[MOST_FDS];

static void handle(const struct frame *f, const uint8_t *payload) {
  switch (f->type) {
    case HELLO: send_frame(HELLO, VERSION, f->stream, payload, f->length); break;
    case IDENTITY:
      set_identity(payload, f->length);
      quiet = false;
      send_frame(IDENTITY, 0, f->stream, 0, 0);
      break;
    case QUIESCE:
      send_frame(QUIESCE, 0, f->stream, 0, 0);
      quiet = true;
      port_drain();
      break;
    case LIST: streams_list(f->stream); break;
    case EXEC: stream_exec(f->stream, payload, f->length); break;
    case OP: stream_op(f->stream, payload, f->length); break;
    case CONNECT: stream_connect(f->stream, payload, f->length); break;
    default: stream_frame(f, payload);
  }
}

static int exits(void) {
  sigset_t set;
  sigemptyset(&set), sigaddset(&set, SIGCHLD);
  sigprocmask(SIG_BLOCK, &set, 0);
  signal(SIGPIPE, SIG_IGN);
  return signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
}

/* With --fd=N: no machine, only namespaces around us (process.py). The kernel may give process 1 arguments of its own. */
int main(int argc, char **argv) {
  bool machine = argc != 2 || strncmp(argv[1], "--fd=", 5);
  if (machine) boot();
  int child = exits();
  if (machine) port_open();
  else port_use(atoi(argv[1] + 5));
  for (;;) {
    fds[0] = (struct pollfd){port_fd(), POLLIN | (port_wants_write() ? POLLOUT : 0), 0};
    fds[1] = (struct pollfd){child, POLLIN, 0};
    int count = 2 + streams_poll(fds + 2, MOST_FDS - 2);
    poll(fds, count, -1);
    if (fds[1].revents) {
      struct signalfd_siginfo info;
      while (read(child, &info, sizeof info) > 0) {}
      streams_reap();
    }
    if (fds[0].revents) port_read(handle);
    streams_serve(fds + 2, count - 2);
    port_write();
  }
}
