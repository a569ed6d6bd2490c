/* /etc/passwd and /etc/group, read here because a static program has no name service. */
#define _GNU_SOURCE
#include "agent.h"
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int split(char *line, char **field, int most) {
  int n = 0;
  line[strcspn(line, "\n")] = 0;
  for (char *part; n < most && (part = strsep(&line, ":"));) field[n++] = part;
  return n;
}

static void add_groups(struct user *u) {
  char line[4096], *f[4];
  FILE *file = fopen("/etc/group", "re");
  while (file && fgets(line, sizeof line, file) && u->group_count < 64) {
    if (split(line, f, 4) < 4) continue;
    for (char *rest = f[3], *member; (member = strsep(&rest, ","));)
      if (!strcmp(member, u->name)) { u->groups[u->group_count++] = strtoul(f[2], 0, 10); break; }
  }
  if (file) fclose(file);
}

/* `name` is a login name, a number, or NAME:GROUP / UID:GID as image configurations have it. */
bool find_user(const char *name, struct user *u) {
  char want[128], line[4096], *f[7], *end;
  snprintf(want, sizeof want, "%s", *name ? name : "root");
  char *group = strchr(want, ':');
  if (group) *group++ = 0;
  unsigned long number = strtoul(want, &end, 10);
  bool numeric = *want && !*end, known = false;
  *u = (struct user){.uid = number, .gid = numeric ? number : 0, .home = "/", .shell = "/bin/sh"};
  FILE *file = fopen("/etc/passwd", "re");
  while (file && !known && fgets(line, sizeof line, file)) {
    if (split(line, f, 7) < 7) continue;
    if (strcmp(f[0], want) && !(numeric && strtoul(f[2], 0, 10) == number)) continue;
    known = true;
    u->uid = strtoul(f[2], 0, 10), u->gid = strtoul(f[3], 0, 10);
    snprintf(u->name, sizeof u->name, "%s", f[0]);
    snprintf(u->home, sizeof u->home, "%s", f[5]);
    snprintf(u->shell, sizeof u->shell, "%s", *f[6] ? f[6] : "/bin/sh");
  }
  if (file) fclose(file);
  if (!known && !strcmp(want, "root")) {
    known = true, u->uid = u->gid = 0;
    strcpy(u->name, "root"), strcpy(u->home, "/root");
  }
  if (group && *group) u->gid = strtoul(group, 0, 10);
  u->groups[u->group_count++] = u->gid;
  add_groups(u);
  return known || numeric;
}

static void name_of(const char *path, unsigned id, char *name, size_t size) {
  char line[4096], *f[4];
  FILE *file = fopen(path, "re");
  snprintf(name, size, "%u", id);
  while (file && fgets(line, sizeof line, file))
    if (split(line, f, 4) >= 3 && strtoul(f[2], 0, 10) == id) { snprintf(name, size, "%s", f[0]); break; }
  if (file) fclose(file);
}
void user_name(uid_t uid, char *name, size_t size) { name_of("/etc/passwd", uid, name, size); }
void group_name(gid_t gid, char *name, size_t size) { name_of("/etc/group", gid, name, size); }

int become(const struct user *u) {
  if (setgroups(u->group_count, u->groups) || setresgid(u->gid, u->gid, u->gid)) return -1;
  return setresuid(u->uid, u->uid, u->uid);
}
