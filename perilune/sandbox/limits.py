"""Limits that the host's kernel enforces on a VMM process: cgroup v2, or v1's separate hierarchies, or none."""

import contextlib
import functools
import threading
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
NAME = "perilune"
_PERIOD = 100_000


@functools.cache
def version() -> int:
    """2 (unified with memory and cpu), 1, or 0 when neither can be written."""
    try:
        if {"memory", "cpu"} <= set((ROOT / "cgroup.controllers").read_text().split()):
            (ROOT / NAME).mkdir(exist_ok=True)
            for folder in (ROOT, ROOT / NAME):
                (folder / "cgroup.subtree_control").write_text("+cpu +memory +pids")
            (ROOT / NAME / "cpu.weight").write_text("1600")  # all sandboxes together weigh as much as 16 processes
            return 2
    except OSError:
        pass
    try:
        for controller in ("memory", "cpu"):
            (ROOT / controller / NAME).mkdir(exist_ok=True)
        (ROOT / "cpu" / NAME / "cpu.shares").write_text(str(16 * 1024))
        return 1
    except OSError:
        return 0


class Group:
    """One sandbox's cgroup. Memory in MiB covers the guest's RAM and QEMU's own; a CPU share is a hard ceiling."""

    def __init__(self, name: str, vcpus: int = 0, memory_mb: int = 0) -> None:
        self._adding: threading.Thread | None = None
        if version() == 2:
            self.folders = dict.fromkeys(("memory", "cpu"), ROOT / NAME / name)
        elif version() == 1:
            self.folders = {
                key: ROOT / key / NAME / name for key in ("memory", "cpu", "freezer") if (ROOT / key).is_dir()
            }
        else:
            self.folders = {}
        for folder in set(self.folders.values()):
            folder.mkdir(parents=True, exist_ok=True)
        if memory_mb:
            self._put("memory", "memory.max" if version() == 2 else "memory.limit_in_bytes", str(memory_mb << 20))
        if vcpus:
            self._limit_cpu(vcpus)

    def _limit_cpu(self, vcpus: int) -> None:
        quota = vcpus * _PERIOD + _PERIOD // 4  # a quarter of a core for QEMU's own threads
        if version() == 2:
            self._put("cpu", "cpu.max", f"{quota} {_PERIOD}")
        else:
            self._put("cpu", "cpu.cfs_period_us", str(_PERIOD))
            self._put("cpu", "cpu.cfs_quota_us", str(quota))

    def _put(self, controller: str, file: str, value: str) -> None:
        if controller in self.folders:
            with contextlib.suppress(OSError):  # a controller without this file: QEMU's own limits remain
                (self.folders[controller] / file).write_text(value)

    def _get(self, controller: str, file: str) -> str:
        try:
            return (self.folders[controller] / file).read_text()
        except (OSError, KeyError):
            return ""

    def add(self, pid: int) -> None:
        """Put a process (and what it starts) under these limits."""
        for folder in set(self.folders.values()):
            with contextlib.suppress(OSError):
                (folder / "cgroup.procs").write_text(str(pid))

    def add_soon(self, pid: int) -> None:
        """The same beside other work: the kernel waits for a grace period (10 ms or more)."""
        self._adding = threading.Thread(target=self.add, args=(pid,), daemon=True)
        self._adding.start()

    def added(self) -> None:
        """Wait until the limits hold."""
        if self._adding:
            self._adding.join()
            self._adding = None

    def entrance(self) -> list[str]:
        """A command prefix that enters this group before it becomes what follows."""
        files = " ".join(str(folder / "cgroup.procs") for folder in set(self.folders.values()))
        return ["sh", "-c", f'for f in {files}; do echo $$ > "$f"; done; exec "$@"', "sh"] if files else []

    def freeze(self, on: bool) -> bool:
        """Stop or continue all of its processes; False where cgroups cannot."""
        if version() == 2:
            self._put("cpu", "cgroup.freeze", "1" if on else "0")
        elif "freezer" in self.folders:
            self._put("freezer", "freezer.state", "FROZEN" if on else "THAWED")
        return bool(self.folders)

    def pids(self) -> list[int]:
        """Its processes."""
        return [int(line) for line in self._get("memory", "cgroup.procs").split()]

    def remove(self) -> None:
        """Delete it; its processes must be gone (the kernel may need a moment)."""
        self.added()
        for folder in set(self.folders.values()):
            for _ in range(20):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.005)
