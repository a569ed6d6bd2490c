/* Streams: a command, a file operation or a TCP connection, relayed with credits so that no slow reader blocks another. */
#define _GNU_SOURCE
#include "agent.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_STREAMS = 4096, BACKLOG = 512 << 10 };
static struct stream *streams;
static int stream_count;
bool quiet;

static struct stream *find(uint32_t id) {
  struct stream *s = streams;
  while (s && s->id != id) s = s->next;
  return s;
}

void stream_failed(uint32_t id, int code, const char *message) {
  char text[260];
  int32_t number = code;
  memcpy(text, &number, 4);
  int n = snprintf(text + 4, sizeof text - 4, "%s", message);
  send_frame(FAILED, 0, id, text, 4 + (n < 255 ? n : 255));
}

static struct stream *open_stream(uint32_t id) {
  struct stream *s = stream_count < MOST_STREAMS && !find(id) ? calloc(1, sizeof *s) : 0;
  if (!s) return stream_failed(id, EAGAIN, "too many streams"), NULL;
  s->id = id, s->in = s->out = s->err = s->status_fd = -1, s->credit = WINDOW;
  s->next = streams, streams = s, stream_count++;
  return s;
}

static void close_fd(int *fd) {
  if (*fd >= 0) close(*fd);
  *fd = -1;
}

static void drop(struct stream *s) {
  struct stream **p = &streams;
  while (*p != s) p = &(*p)->next;
  *p = s->next, stream_count--;
  close_fd(&s->in), close_fd(&s->out), close_fd(&s->err), close_fd(&s->status_fd);
  free(s->request), free(s);
}

/* ---- starting ---- */

struct plan { uint32_t flags; uint16_t cols, rows, argc, envc; char *user, *cwd, *tag, **argv, **envp; };

static bool parse_plan(const uint8_t *payload, uint32_t length, struct plan *p) {
  if (length < 13 || payload[length - 1]) return false;
  memcpy(&p->flags, payload, 4), memcpy(&p->cols, payload + 4, 2), memcpy(&p->rows, payload + 6, 2);
  memcpy(&p->argc, payload + 8, 2), memcpy(&p->envc, payload + 10, 2);
  char *text = (char *)payload + 12, *end = (char *)payload + length;
  char **all = calloc(3 + p->argc + 1 + p->envc + 1, sizeof *all);
  int want = 3 + p->argc + p->envc, at = 0;
  for (int i = 0; i < want; i++, text += strlen(text) + 1) {
    if (text >= end) return free(all), false;
    if (i == 3 + p->argc) at++; /* the NULL that ends argv */
    all[at++] = text;
  }
  p->user = all[0], p->cwd = all[1], p->tag = all[2], p->argv = all + 3, p->envp = all + 3 + p->argc + 1;
  return p->argc > 0;
}

static void set_defaults(const struct user *u, bool pty) {
  clearenv();
  setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 1);
  setenv("HOME", u->home, 1), setenv("USER", u->name, 1), setenv("LOGNAME", u->name, 1), setenv("SHELL", u->shell, 1);
  if (pty) setenv("TERM", "xterm-256color", 1);
  for (char **e = guest_environment(); *e; e++) putenv(*e);
}

static void default_signals(void) {
  sigset_t none;
  sigemptyset(&none), sigprocmask(SIG_SETMASK, &none, 0);
  signal(SIGPIPE, SIG_DFL);
}

struct pipes { int in[2], out[2], err[2], status[2]; };

static int make_pipes(struct pipes *p, bool pty) {
  *p = (struct pipes){{-1, -1}, {-1, -1}, {-1, -1}, {-1, -1}};
  if (pipe2(p->status, O_CLOEXEC)) return errno;
  if (pty) {
    p->in[1] = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    char name[64];
    if (p->in[1] < 0 || grantpt(p->in[1]) || unlockpt(p->in[1]) || ptsname_r(p->in[1], name, sizeof name)) return errno;
    p->out[0] = fcntl(p->in[1], F_DUPFD_CLOEXEC, 0);
    p->in[0] = p->out[1] = p->err[1] = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
    return p->in[0] < 0 ? errno : 0;
  }
  return pipe2(p->in, O_CLOEXEC) || pipe2(p->out, O_CLOEXEC) || pipe2(p->err, O_CLOEXEC) ? errno : 0;
}

static void close_child_ends(struct pipes *p) {
  if (p->out[1] == p->in[0]) p->out[1] = p->err[1] = -1;
  close_fd(&p->in[0]), close_fd(&p->out[1]), close_fd(&p->err[1]), close_fd(&p->status[1]);
}

static void start(struct stream *s, struct pipes *p) {
  close_child_ends(p);
  s->in = p->in[1], s->out = p->out[0], s->err = p->err[0], s->status_fd = p->status[0];
  int all[] = {s->in, s->out, s->err, s->status_fd};
  for (int i = 0; i < 4; i++)
    if (all[i] >= 0) fcntl(all[i], F_SETFL, O_NONBLOCK);
}

static void child_stdio(struct pipes *p, bool pty) {
  setsid();
  if (pty) ioctl(p->in[0], TIOCSCTTY, 0);
  dup2(p->in[0], 0), dup2(p->out[1], 1), dup2(p->err[1], 2);
}

static void fail(int status_fd, int code) {
  if (write(status_fd, &code, sizeof code) < 0) { /* the agent sees the exit instead */ }
  _exit(127);
}

static void exec_child(const struct plan *plan, struct pipes *p, const struct user *u) {
  bool pty = plan->flags & WITH_PTY;
  child_stdio(p, pty);
  if (pty && fchown(0, u->uid, 5)) { /* the image has no group 5: the owner suffices */ }
  default_signals();
  set_defaults(u, pty);
  for (char **e = plan->envp; *e; e++) putenv(*e);
  if (become(u)) fail(p->status[1], errno);
  const char *cwd = *plan->cwd ? plan->cwd : u->home;
  if (chdir(cwd) && (*plan->cwd || chdir("/"))) fail(p->status[1], errno | 1 << 16);
  execvp(plan->argv[0], plan->argv);
  fail(p->status[1], errno);
}

void stream_exec(uint32_t id, const uint8_t *payload, uint32_t length) {
  struct plan plan;
  struct user user;
  struct pipes pipes;
  if (!parse_plan(payload, length, &plan)) return stream_failed(id, EINVAL, "malformed request");
  struct stream *s = 0;
  bool pty = plan.flags & WITH_PTY;
  int code;
  if (!find_user(plan.user, &user)) stream_failed(id, ENOENT, "user not found");
  else if ((s = open_stream(id))) {
    s->pty = pty, s->request = malloc(length), s->request_length = length;
    memcpy(s->request, payload, length);
    if ((code = make_pipes(&pipes, pty)) || (s->pid = fork_limited()) < 0) {
      stream_failed(id, code ? code : errno, "cannot start a process");
      drop(s);
    } else if (!s->pid) {
      exec_child(&plan, &pipes, &user);
    } else {
      struct winsize size = {plan.rows, plan.cols, 0, 0};
      start(s, &pipes);
      if (pty && plan.cols) ioctl(s->in, TIOCSWINSZ, &size);
      if (!pty && !(plan.flags & WITH_STDIN)) close_fd(&s->in);
    }
  }
  free(plan.argv - 3);
}

/* {u8 op, u32 number} then strings: user, first path, second path */
void stream_op(uint32_t id, const uint8_t *payload, uint32_t length) {
  struct user user;
  struct pipes pipes;
  uint32_t number;
  if (length < 8 || payload[length - 1]) return stream_failed(id, EINVAL, "malformed request");
  memcpy(&number, payload + 1, 4);
  const char *name = (char *)payload + 5, *end = (char *)payload + length;
  const char *first = name + strlen(name) + 1, *second = first < end ? first + strlen(first) + 1 : end;
  if (second >= end) return stream_failed(id, EINVAL, "malformed request");
  if (!find_user(name, &user)) return stream_failed(id, ENOENT, "user not found");
  struct stream *s = open_stream(id);
  if (!s) return;
  int code = make_pipes(&pipes, false);
  s->is_op = true;
  if (code || (s->pid = fork()) < 0) {
    stream_failed(id, code ? code : errno, "cannot start a process");
    return drop(s);
  }
  if (!s->pid) {
    child_stdio(&pipes, false);
    close_range(3, ~0u, 0); /* no exec follows that would: the pipe's other end must not stay open here */
    default_signals();
    if (payload[0] != FREEZE && payload[0] != THAW && become(&user)) _exit(EPERM);
    _exit(run_op(payload[0], &user, first, second, number));
  }
  start(s, &pipes);
}

void stream_connect(uint32_t id, const uint8_t *payload, uint32_t length) {
  if (length != 2) return stream_failed(id, EINVAL, "malformed request");
  uint16_t port;
  memcpy(&port, payload, 2);
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || connect(fd, (void *)&to, sizeof to)) {
    stream_failed(id, errno, strerror(errno));
    if (fd >= 0) close(fd);
    return;
  }
  struct stream *s = open_stream(id);
  if (!s) { close(fd); return; }
  fcntl(fd, F_SETFL, O_NONBLOCK);
  s->in = fd, s->out = fcntl(fd, F_DUPFD_CLOEXEC, 0), s->socket = s->started = true;
  send_frame(STARTED, 0, id, "\0\0\0\0", 4);
}

/* ---- from the host ---- */

static void take_input(struct stream *s, const uint8_t *data, uint32_t length) {
  if (s->in < 0 || length > INBOX - s->inbox_used) { /* gone, or beyond its credit: dropped, and the credit returned */
    send_frame(CREDIT, 0, s->id, &length, 4);
    return;
  }
  for (uint32_t i = 0; i < length; i++) s->inbox[(s->inbox_start + s->inbox_used + i) % INBOX] = data[i];
  s->inbox_used += length;
}

static void end_input(struct stream *s) {
  if (s->in < 0 || s->inbox_used) return;
  if (s->pty) {
    s->input_ended = write(s->in, "\4", 1) < 0;
    return;
  }
  if (s->socket) shutdown(s->in, SHUT_WR);
  close_fd(&s->in);
}

static void feed(struct stream *s) {
  uint32_t written = 0;
  while (s->in >= 0 && s->inbox_used) {
    uint32_t run = INBOX - s->inbox_start < s->inbox_used ? INBOX - s->inbox_start : s->inbox_used;
    ssize_t n = write(s->in, s->inbox + s->inbox_start, run);
    if (n < 0 && errno == EAGAIN) break;
    if (n < 0) { /* nobody reads it any more */
      written += s->inbox_used, s->inbox_used = 0;
      if (!s->pty) close_fd(&s->in);
      break;
    }
    s->inbox_start = (s->inbox_start + n) % INBOX, s->inbox_used -= n, written += n;
  }
  if (written) send_frame(CREDIT, 0, s->id, &written, 4);
  if (s->input_ended) end_input(s);
}

static void resize(struct stream *s, const uint8_t *payload, uint32_t length) {
  struct winsize size = {0};
  if (!s->pty || length != 4) return;
  memcpy(&size.ws_col, payload, 2), memcpy(&size.ws_row, payload + 2, 2);
  ioctl(s->in, TIOCSWINSZ, &size);
}

void stream_frame(const struct frame *f, const uint8_t *payload) {
  struct stream *s = find(f->stream);
  int32_t number = 0;
  if (!s) return;
  if (f->length >= 4) memcpy(&number, payload, 4);
  switch (f->type) {
    case DATA: take_input(s, payload, f->length); feed(s); break;
    case END: s->input_ended = true; end_input(s); break;
    case CREDIT: s->credit += number; break;
    case SIGNAL: if (s->pid > 0 && !s->exited && number > 0 && number < NSIG) kill(-s->pid, number); break;
    case RESIZE: resize(s, payload, f->length); break;
    case CLOSE:
      if (s->pid > 0 && !s->exited) kill(-s->pid, SIGKILL);
      drop(s);
      break;
  }
}

/* ---- from the guest ---- */

static bool relay(struct stream *s, int *fd, uint8_t channel) {
  uint8_t data[CHUNK];
  size_t most = s->credit < CHUNK ? s->credit : CHUNK;
  if (*fd < 0 || !most) return false;
  ssize_t n = read(*fd, data, most);
  if (n > 0) {
    send_frame(DATA, channel, s->id, data, n), s->credit -= n;
    return true;
  }
  if (n < 0 && errno == EAGAIN) return false;
  close_fd(fd);
  if (s->socket) send_frame(END, channel, s->id, 0, 0);
  return false;
}

static void report_exit(struct stream *s) {
  int32_t result[2] = {WIFEXITED(s->status) ? WEXITSTATUS(s->status) : -1, WIFSIGNALED(s->status) ? WTERMSIG(s->status) : 0};
  send_frame(EXITED, 0, s->id, result, sizeof result);
  drop(s);
}

/* A command is over when its own process is: what it left running in the background may hold the pipes open for ever. */
static bool finish(struct stream *s) {
  if (!s->exited || s->status_fd >= 0) return false;
  while (s->credit > 0 && (relay(s, &s->out, OUTPUT) || relay(s, &s->err, ERRORS))) {}
  if (s->credit <= 0) return false;
  report_exit(s);
  return true;
}

static void read_status(struct stream *s) {
  int code = 0;
  ssize_t n = read(s->status_fd, &code, sizeof code);
  if (n < 0 && errno == EAGAIN) return;
  close_fd(&s->status_fd);
  if (n == sizeof code) {
    stream_failed(s->id, code & 0xffff, code >> 16 ? "cannot enter the working directory" : strerror(code & 0xffff));
    s->id = 0, s->credit = 0; /* the child is reaped later; nothing more is said about it */
    return;
  }
  int32_t pid = s->pid;
  s->started = true;
  send_frame(STARTED, 0, s->id, &pid, 4);
}

int streams_poll(struct pollfd *fds, int capacity) {
  int n = 0;
  bool room = !quiet && port_backlog() < BACKLOG;
  for (struct stream *s = streams; s && n + 4 <= capacity; s = s->next) {
    bool output = room && s->credit > 0;
    if (s->status_fd >= 0 && !quiet) fds[n++] = (struct pollfd){s->status_fd, POLLIN, 0};
    if (s->out >= 0 && output) fds[n++] = (struct pollfd){s->out, POLLIN, 0};
    if (s->err >= 0 && output) fds[n++] = (struct pollfd){s->err, POLLIN, 0};
    if (s->in >= 0 && s->inbox_used && !quiet) fds[n++] = (struct pollfd){s->in, POLLOUT, 0};
  }
  return n;
}

static short ready(const struct pollfd *fds, int count, int fd, short events) {
  for (int i = 0; fd >= 0 && i < count; i++)
    if (fds[i].fd == fd && fds[i].events == events) return fds[i].revents;
  return 0;
}

void streams_serve(const struct pollfd *fds, int count) {
  if (quiet) return;
  for (struct stream *s = streams, *next; s; s = next) {
    next = s->next;
    if (ready(fds, count, s->in, POLLOUT)) feed(s);
    if (s->status_fd >= 0) read_status(s);
    if (!s->id) { if (s->exited) drop(s); continue; }
    if (s->status_fd >= 0) continue;
    if (port_backlog() < BACKLOG) {
      if (ready(fds, count, s->out, POLLIN)) relay(s, &s->out, OUTPUT);
      if (ready(fds, count, s->err, POLLIN)) relay(s, &s->err, ERRORS);
      if (finish(s)) continue;
    }
    if (s->socket && s->in < 0 && s->out < 0) drop(s);
  }
}

void streams_reap(void) {
  int status;
  for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
    for (struct stream *s = streams; s; s = s->next)
      if (s->pid == pid && !s->exited) s->exited = true, s->status = status;
}

/* For a host that knows nothing of what runs here: {u32 id, u32 pid, u32 room, u32 length, EXEC payload}..., and the
 * credits start again. File operations and connections of the host before it are ended. */
void streams_list(uint32_t reply_to) {
  for (struct stream *s = streams, *next; s; s = next) {
    next = s->next;
    if (!s->request || !s->started) {
      if (s->pid > 0 && !s->exited && !s->request) kill(-s->pid, SIGKILL);
      if (!s->request) drop(s);
      continue;
    }
    uint8_t *entry = malloc(16 + s->request_length);
    uint32_t head[4] = {s->id, s->pid, s->in >= 0 ? INBOX - s->inbox_used : 0, s->request_length};
    memcpy(entry, head, 16), memcpy(entry + 16, s->request, s->request_length);
    send_frame(DATA, OUTPUT, reply_to, entry, 16 + s->request_length);
    free(entry);
    s->credit = WINDOW;
  }
  int32_t zero[2] = {0};
  send_frame(EXITED, 0, reply_to, zero, sizeof zero);
}
