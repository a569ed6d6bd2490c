"""Refuse new work before the host dies of it."""

import os
from dataclasses import dataclass
from pathlib import Path

from perilune.sandbox.errors import DiskFull, OutOfCapacity


@dataclass(frozen=True)
class Guard:
    """How far this host may be filled. Memory and disk in MiB."""

    most_sandboxes: int = 1000
    memory_floor_mb: int = 256  # must stay available after the new one
    expected_mb: int = 64  # what one more usually takes; siblings share the rest
    disk_floor_mb: int = 1024

    def admit(self, home: Path, running: int, count: int = 1) -> None:
        """OutOfCapacity or DiskFull when `count` more would not fit."""
        if running + count > self.most_sandboxes:
            raise OutOfCapacity(f"this host runs {running} sandboxes; its limit is {self.most_sandboxes}")
        need = self.memory_floor_mb + count * self.expected_mb
        available = available_mb()
        if available < need:
            raise OutOfCapacity(
                f"{available} MiB of memory are available on this host; {count} more sandboxes need {need}"
            )
        self.room(home)

    def room(self, home: Path) -> None:
        """DiskFull when the home's file system is nearly full."""
        free = free_mb(home)
        if free < self.disk_floor_mb:
            raise DiskFull(f"{free} MiB are free under {home}; sandboxes need {self.disk_floor_mb}")


def available_mb() -> int:
    """MemAvailable."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) >> 10
    return 0


def free_mb(path: Path) -> int:
    """Free space of the file system that holds `path`."""
    stat = os.statvfs(path)
    return (stat.f_bavail * stat.f_frsize) >> 20
