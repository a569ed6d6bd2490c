/* From an empty initramfs to the image's root, and who this machine is (again after every resume and fork). */
#define _GNU_SOURCE
#include "agent.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <linux/sched.h>
#include <net/if.h>
#include <net/route.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>

static char **environment;

static void put(const char *path, const char *text) {
  int f = open(path, O_WRONLY | O_CLOEXEC | O_CREAT | O_TRUNC, 0644);
  if (f < 0) return;
  if (write(f, text, strlen(text)) < 0) { /* the kernel lacks it: the feature stays off */ }
  close(f);
}

static void mount_at(const char *type, const char *where, unsigned long flags, const char *options) {
  mkdir(where, 0755);
  mount(type, where, type, flags, options);
}

static void load_modules(void) {
  char line[256];
  FILE *list = fopen("/modules/order", "re");
  while (list && fgets(line, sizeof line, list)) {
    line[strcspn(line, "\n")] = 0;
    int f = open(line, O_RDONLY | O_CLOEXEC);
    if (f >= 0 && syscall(SYS_finit_module, f, "", 0) && errno != EEXIST) fprintf(stderr, "agent: %s: %s\n", line, strerror(errno));
    if (f >= 0) close(f), unlink(line);
  }
  if (list) fclose(list);
}

static void enter_root(void) {
  mkdir("/newroot", 0755);
  for (int attempt = 0; mount("/dev/vda", "/newroot", "ext4", MS_NOATIME, "") && attempt < 5000; attempt++) usleep(1000);
  if (access("/newroot/etc", F_OK)) fprintf(stderr, "agent: no root file system on /dev/vda\n"), exit(1);
  if (chdir("/newroot") || mount(".", "/", 0, MS_MOVE, 0) || chroot(".") || chdir("/")) exit(1);
}

static void mount_system(void) {
  mount_at("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "");
  mount_at("sysfs", "/sys", MS_NOSUID | MS_NODEV | MS_NOEXEC, "");
  mount_at("devtmpfs", "/dev", MS_NOSUID, "mode=755");
  mount_at("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "mode=620,gid=5,ptmxmode=666");
  mount_at("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, "mode=1777");
  mount_at("mqueue", "/dev/mqueue", MS_NOSUID | MS_NODEV, "");
  mount_at("tmpfs", "/run", MS_NOSUID | MS_NODEV, "mode=755");
  mount_at("cgroup2", "/sys/fs/cgroup", MS_NOSUID | MS_NODEV | MS_NOEXEC, "");
  if (symlink("/proc/self/fd", "/dev/fd") || symlink("/proc/self/fd/0", "/dev/stdin")) { /* already there */ }
  if (symlink("/proc/self/fd/1", "/dev/stdout") || symlink("/proc/self/fd/2", "/dev/stderr")) { /* already there */ }
  mkdir("/tmp", 01777), chmod("/tmp", 01777), chmod("/dev/ptmx", 0666);
  mkdir("/run/lock", 01777), mkdir("/run/perilune", 0755);
}

/* Room that a fork bomb or a memory bomb cannot take from the agent: 64 processes and 24 MiB. */
static void make_limits(void) {
  char text[64];
  struct sysinfo memory;
  sysinfo(&memory);
  mkdir("/sys/fs/cgroup/sandbox", 0755);
  put("/sys/fs/cgroup/cgroup.subtree_control", "+pids +memory +cpu");
  unsigned long long room = (unsigned long long)memory.totalram * memory.mem_unit;
  snprintf(text, sizeof text, "%llu", room > (48ull << 20) ? room - (24ull << 20) : room);
  put("/sys/fs/cgroup/sandbox/memory.max", text);
  put("/sys/fs/cgroup/sandbox/pids.max", "4096");
  put("/proc/sys/kernel/pid_max", "32768");
  put("/proc/self/oom_score_adj", "-1000");
}

/* Straight into the cgroup: moving a process there later would wait for every other CPU (tens of milliseconds). */
pid_t fork_limited(void) {
  static int group = -2;
  if (group == -2) group = open("/sys/fs/cgroup/sandbox", O_PATH | O_DIRECTORY | O_CLOEXEC);
  struct clone_args args = {.flags = group >= 0 ? CLONE_INTO_CGROUP : 0, .exit_signal = SIGCHLD, .cgroup = group >= 0 ? group : 0};
  pid_t pid = syscall(SYS_clone3, &args, sizeof args);
  if (!pid) put("/proc/self/oom_score_adj", "0");
  return pid;
}

static void interface_up(int s, const char *name, const char *address, int prefix) {
  struct ifreq r = {0};
  struct sockaddr_in *a = (void *)&r.ifr_addr;
  snprintf(r.ifr_name, sizeof r.ifr_name, "%s", name);
  a->sin_family = AF_INET;
  if (address) {
    inet_pton(AF_INET, address, &a->sin_addr), ioctl(s, SIOCSIFADDR, &r);
    a->sin_addr.s_addr = htonl(prefix ? ~0u << (32 - prefix) : 0), ioctl(s, SIOCSIFNETMASK, &r);
  }
  r.ifr_flags = IFF_UP | IFF_RUNNING;
  ioctl(s, SIOCSIFFLAGS, &r);
}

/* "ADDRESS/PREFIX GATEWAY NAMESERVER", or empty for no network. */
static void set_network(const char *plan) {
  char address[32], gateway[32], server[32];
  int prefix, s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  interface_up(s, "lo", 0, 0);
  if (sscanf(plan, "%31[^/]/%d %31s %31s", address, &prefix, gateway, server) == 4) {
    struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY};
    struct sockaddr_in *to = (void *)&route.rt_dst, *via = (void *)&route.rt_gateway, *mask = (void *)&route.rt_genmask;
    to->sin_family = via->sin_family = mask->sin_family = AF_INET;
    inet_pton(AF_INET, gateway, &via->sin_addr);
    interface_up(s, "eth0", address, prefix);
    ioctl(s, SIOCADDRT, &route);
    char text[64];
    snprintf(text, sizeof text, "nameserver %s\n", server);
    put("/run/perilune/resolv.conf", text);
  }
  close(s);
}

void boot(void) {
  mount_at("devtmpfs", "/dev", 0, "mode=755");
  mount_at("proc", "/proc", 0, "");
  mount_at("sysfs", "/sys", 0, "");
  load_modules();
  umount2("/sys", MNT_DETACH), umount2("/proc", MNT_DETACH);
  enter_root();
  mount_system();
  make_limits();
  set_network("");
}

static void add_entropy(const uint8_t *bytes) {
  struct { int bits, size; uint8_t bytes[64]; } pool = {512, 64, {0}};
  memcpy(pool.bytes, bytes, 64);
  int f = open("/dev/urandom", O_WRONLY | O_CLOEXEC);
  if (f < 0) return;
  ioctl(f, RNDADDENTROPY, &pool);
  ioctl(f, RNDRESEEDCRNG);
  close(f);
}

/* {i64 wall clock in ns, u8[64] entropy, u32 process limit} then strings: host name, network plan, KEY=VALUE... */
void set_identity(const uint8_t *payload, uint32_t length) {
  int64_t now;
  uint32_t most;
  static char *kept, name[65];
  static uint32_t processes;
  if (length < 8 + 64 + 4 + 2 || payload[length - 1]) return;
  memcpy(&now, payload, 8), memcpy(&most, payload + 72, 4);
  struct timespec t = {now / 1000000000, now % 1000000000};
  clock_settime(CLOCK_REALTIME, &t);
  add_entropy(payload + 8);
  free(kept), free(environment);
  uint32_t size = length - 76, count = 0;
  kept = malloc(size);
  memcpy(kept, payload + 76, size);
  char *text = kept, *end = kept + size, limit[16];
  if (*text && strcmp(text, name) && strlen(text) < sizeof name && !sethostname(text, strlen(text)))
    put("/run/perilune/hostname", strcpy(name, text)); /* only a fork has another: a resume is quicker without */
  text += strlen(text) + 1;
  if (text < end && *text) set_network(text);
  if (text < end) text += strlen(text) + 1;
  if (most && most != processes) {
    snprintf(limit, sizeof limit, "%u", most), put("/sys/fs/cgroup/sandbox/pids.max", limit);
    processes = most;
  }
  environment = calloc(size + 1, sizeof *environment);
  for (; text < end; text += strlen(text) + 1) environment[count++] = text;
}

char **guest_environment(void) {
  static char *none[1];
  return environment ? environment : none;
}
