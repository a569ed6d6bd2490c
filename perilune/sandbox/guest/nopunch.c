/* Preloaded into QEMU. When a guest reports free pages, QEMU punches a hole into the file behind its memory and then
 * drops the pages. That file is the base which every sibling maps privately: the hole would corrupt them all.
 * Here the punch succeeds without touching the file; the pages that this guest made its own are dropped all the same. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/falloc.h>

static int pass(const char *name, int fd, int mode, off_t offset, off_t length) {
  if (mode & FALLOC_FL_PUNCH_HOLE) return 0;
  int (*real)(int, int, off_t, off_t) = dlsym(RTLD_NEXT, name);
  return real(fd, mode, offset, length);
}
int fallocate(int fd, int mode, off_t offset, off_t length) { return pass("fallocate", fd, mode, offset, length); }
int fallocate64(int fd, int mode, off_t offset, off_t length) { return pass("fallocate64", fd, mode, offset, length); }
