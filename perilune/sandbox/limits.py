"""Limits that the host's kernel enforces on a VMM process: cgroup v2, or v1's separate hierarchies, or none.

Memory and CPU hold from the start; the disk's rates when a sandbox asks for some. Of these the kernel sees what leaves
the page cache (version 1: only reads and direct writes), QEMU what the guest asks for: where there are both, both hold.
"""

import contextlib
import functools
import os
import threading
import time
from pathlib import Path

from perilune.sandbox.files import remove

ROOT = Path("/sys/fs/cgroup")
NAME = "perilune"
_PERIOD = 100_000
_SOON_S = 0.05


@functools.cache
def version() -> int:
    """2 (unified with memory and cpu), 1, or 0 when neither can be written."""
    try:
        if {"memory", "cpu"} <= set((ROOT / "cgroup.controllers").read_text().split()):
            (ROOT / NAME).mkdir(exist_ok=True)
            for folder in (ROOT, ROOT / NAME):
                (folder / "cgroup.subtree_control").write_text("+cpu +memory +pids")
            (ROOT / NAME / "cpu.weight").write_text("1600")  # all sandboxes together weigh as much as 16 processes
            with contextlib.suppress(OSError):
                for folder in (ROOT, ROOT / NAME):
                    (folder / "cgroup.subtree_control").write_text("+io")
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


def device(path: Path) -> str:
    """ "major:minor" of the whole disk that holds `path`; empty when no block device does (overlay, tmpfs)."""
    number = path.stat().st_dev
    known = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if (known / "partition").exists():
        known = known.parent
    return (known / "dev").read_text().strip() if (known / "dev").exists() else ""


def io(home: Path) -> str:
    """How rates of the disk under `home` are limited: "io.max", "blkio.throttle", or empty where only QEMU can."""
    if not device(home):
        return ""
    if version() == 2:
        return "io.max" if "io" in (ROOT / NAME / "cgroup.subtree_control").read_text().split() else ""
    known = version() == 1 and (ROOT / "blkio" / "blkio.throttle.read_bps_device").exists()
    return "blkio.throttle" if known else ""


class Group:
    """One sandbox's cgroup. Memory in MiB covers the guest's RAM and QEMU's own; a CPU share is a hard ceiling."""

    def __init__(self, name: str, vcpus: int = 0, memory_mb: int = 0) -> None:
        self._adding: threading.Timer | None = None
        self._vcpus, self._memory_mb = vcpus, memory_mb
        if version() == 2:
            self.folders = dict.fromkeys(("memory", "cpu"), ROOT / NAME / name)
        elif version() == 1:
            self.folders = {
                key: ROOT / key / NAME / name for key in ("memory", "cpu", "freezer") if (ROOT / key).is_dir()
            }
            self._throttle = ROOT / "blkio" / NAME / name  # joined only by who has rates: each costs a grace period
            if self._throttle.is_dir():
                self.folders["blkio"] = self._throttle
        else:
            self.folders = {}

    def make(self) -> None:
        """Create it, with its limits."""
        for folder in set(self.folders.values()):
            folder.mkdir(parents=True, exist_ok=True)
        if self._memory_mb:
            most = "memory.max" if version() == 2 else "memory.limit_in_bytes"
            self._put("memory", most, str(self._memory_mb << 20))
        if self._vcpus:
            self._limit_cpu(self._vcpus)

    def share(self, children_mb: int) -> None:
        """What is forked from its processes starts here: until `unshare`, no limit of the CPU; for good, more memory,
        for a page stays with the group in which it was first touched."""
        self._memory_mb += children_mb if self._memory_mb else 0
        self.make()
        if self._vcpus:
            self._limit_cpu(0)

    def unshare(self) -> None:
        """The forks have groups of their own."""
        if self._vcpus:
            self._limit_cpu(self._vcpus)

    def _limit_cpu(self, vcpus: int) -> None:
        quota = vcpus * _PERIOD + _PERIOD // 4 if vcpus else -1  # a quarter of a core for QEMU's own threads
        if version() == 2:
            self._put("cpu", "cpu.max", f"{quota if vcpus else 'max'} {_PERIOD}")
        else:
            self._put("cpu", "cpu.cfs_period_us", str(_PERIOD))
            self._put("cpu", "cpu.cfs_quota_us", str(quota))

    def limit_io(self, where: Path, pid: int, bytes_per_second: int, operations_per_second: int) -> None:
        """Most that `pid` may read, and may write, on the disk that holds `where`; 0 means no limit."""
        disk = device(where)
        self.make()
        match io(where):
            case "io.max":
                rates = (("bps", bytes_per_second), ("iops", operations_per_second))
                limits = " ".join(f"{way}{unit}={most or 'max'}" for unit, most in rates for way in "rw")
                self._put("memory", "io.max", f"{disk} {limits}")
            case "blkio.throttle":
                self._throttle.mkdir(parents=True, exist_ok=True)
                self.folders["blkio"] = self._throttle
                for unit, most in (("bps", bytes_per_second), ("iops", operations_per_second)):
                    for way in ("read", "write"):
                        self._put("blkio", f"blkio.throttle.{way}_{unit}_device", f"{disk} {most}")
                with contextlib.suppress(OSError):
                    (self._throttle / "cgroup.procs").write_text(str(pid))

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
        self.make()
        for folder in set(self.folders.values()):
            with contextlib.suppress(OSError):
                (folder / "cgroup.procs").write_text(str(pid))

    def add_soon(self, pid: int) -> None:
        """The same, once, beside other work: the kernel waits for a grace period (10 ms or more), and lets no process
        of this host start a thread meanwhile."""
        if self._adding is None:
            self._adding = threading.Timer(_SOON_S, self.add, (pid,))
            self._adding.daemon = True
            self._adding.start()

    def added(self) -> None:
        """Wait until the limits hold."""
        if self._adding:
            self._adding.join()

    def entrance(self) -> list[str]:
        """A command prefix that enters this group before it becomes what follows."""
        self.make()
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

    def dissolve(self, machine: Path) -> None:
        """Delete it, and then the machine's folder that bears its name. Where the kernel is not done with its processes
        yet, the folder stays without an owner: `Upkeep.collect` tries again."""
        if self.remove():
            remove(machine)
        else:
            (machine / "owner").unlink(missing_ok=True)

    def remove(self) -> bool:
        """Delete it; its processes must be gone (the kernel may need a moment). False when it is still there."""
        if self._adding:
            self._adding.cancel()
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
        return not any(folder.exists() for folder in self.folders.values())
