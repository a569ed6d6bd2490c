/* The agent: PID 1 of every sandbox. One event loop relays many streams over one virtio-serial port.
 *
 * A frame is {u8 type, u8 channel, u16 zero, u32 stream, u32 length} little-endian, then `length` bytes.
 * Streams are opened and numbered by the host. Whatever may block (a path on a hung mount, a slow disk) runs in a
 * child of its own, so that nothing a guest does to its file systems can stop the agent: a file operation is a
 * command whose standard output carries records and whose exit code is an errno. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
  VERSION = 1,
  MAX_FRAME = 1 << 20,
  WINDOW = 256 << 10, /* bytes in flight per stream towards the host */
  INBOX = 64 << 10,   /* bytes in flight per stream towards the guest */
  CHUNK = 32 << 10,
};

enum type {
  HELLO = 1, IDENTITY, QUIESCE, LIST,
  EXEC = 10, OP, CONNECT,
  DATA = 20, END, CREDIT, SIGNAL, RESIZE, CLOSE,
  STARTED = 30, FAILED, EXITED,
};
enum channel { INPUT = 0, OUTPUT = 1, ERRORS = 2 };
enum exec_flag { WITH_PTY = 1, WITH_STDIN = 2 };
enum op { STAT = 1, LISTDIR, MAKEDIR, MOVE, REMOVE, READ, WRITE, WATCH, FREEZE, THAW, STATS };

struct frame { uint8_t type, channel; uint16_t zero; uint32_t stream, length; };

struct user { uid_t uid; gid_t gid, groups[64]; int group_count; char name[64], home[256], shell[256]; };

struct stream {
  struct stream *next;
  uint32_t id, request_length;
  uint8_t *request; /* the EXEC payload, so that a host that comes later can list what runs */
  pid_t pid;
  int in, out, err, status_fd; /* -1 when closed; a pty and a socket use one descriptor for both ways */
  bool pty, socket, input_ended, exited, started, is_op;
  int status;
  int64_t credit;
  uint8_t inbox[INBOX];
  uint32_t inbox_start, inbox_used;
};

/* port.c */
void port_open(void);
void port_use(int descriptor);
int port_fd(void);
bool port_wants_write(void);
size_t port_backlog(void);
void port_write(void);
void port_drain(void);
void port_read(void (*handle)(const struct frame *, const uint8_t *));
void send_frame(uint8_t type, uint8_t channel, uint32_t stream, const void *data, uint32_t length);

/* stream.c */
struct pollfd;
extern bool quiet; /* between QUIESCE and IDENTITY nothing is sent */
void stream_exec(uint32_t id, const uint8_t *payload, uint32_t length);
void stream_op(uint32_t id, const uint8_t *payload, uint32_t length);
void stream_connect(uint32_t id, const uint8_t *payload, uint32_t length);
void stream_frame(const struct frame *frame, const uint8_t *payload);
int streams_poll(struct pollfd *fds, int capacity);
void streams_serve(const struct pollfd *fds, int count);
void streams_reap(void);
void streams_list(uint32_t reply_to);
void stream_failed(uint32_t id, int code, const char *message);

/* boot.c */
void boot(void);
void set_identity(const uint8_t *payload, uint32_t length);
char **guest_environment(void); /* NULL-terminated KEY=VALUE set by the host */
pid_t fork_limited(void);

/* user.c */
bool find_user(const char *name, struct user *found);
void user_name(uid_t uid, char *name, size_t size);
void group_name(gid_t gid, char *name, size_t size);
int become(const struct user *user);

/* ops.c: runs in a child, writes records to descriptor 1, returns an errno */
int run_op(uint8_t op, const struct user *user, const char *first, const char *second, uint32_t number);
