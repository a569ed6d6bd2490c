"""What Perilune asks of a virtual machine monitor. QEMU is one driver; another implements the same nine methods."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class State(StrEnum):
    """Of one VMM process."""

    WAITING = "waiting"  # spawned, holds no guest yet
    STOPPED = "stopped"  # holds a guest whose virtual CPUs do not run
    RUNNING = "running"
    GONE = "gone"


@dataclass(frozen=True)
class Shape:
    """What the guest's hardware looks like. Memory in MiB, disk in MiB, rates per second (0: unlimited)."""

    vcpus: int = 1
    memory_mb: int = 512
    disk_mb: int = 2048


@dataclass(frozen=True)
class Platform:
    """What a saved machine state depends on, besides the shape; recorded in every snapshot."""

    vmm: str
    machine: str
    cpu: str
    accelerator: str
    kernel: str  # sha256 of the kernel image

    def difference(self, other: "Platform") -> str | None:
        """The first field in which two platforms differ, as a sentence part, or None."""
        for key, value in asdict(self).items():
            if value != asdict(other)[key]:
                return f"{key} {value!r} (this host has {asdict(other)[key]!r})"
        return None


@dataclass(frozen=True)
class Rates:
    """Disk I/O limits that the VMM enforces; 0 means none."""

    bytes_per_second: int = 0
    operations_per_second: int = 0


@dataclass(frozen=True)
class Plan:
    """One VMM process to start. `memory` is the file behind guest RAM, mapped privately: siblings share its pages."""

    shape: Shape
    memory: Path
    folder: Path  # sockets and the serial log go here
    kernel: Path | None = None  # given: boot; None: wait for a state
    initrd: Path | None = None
    append: str = ""
    rates: Rates = field(default_factory=Rates)


class Machine(Protocol):
    """A VMM process and the guest it holds."""

    pid: int
    agent_socket: Path

    def attach_disk(self, path: Path) -> None:
        """Put a qcow2 image behind the guest's disk (before load or boot)."""

    def attach_network(self, tap: int) -> None:
        """Plug the descriptor of a tap device into the guest's network card."""

    def load(self, state: Path, changed: bytes | None = None) -> None:
        """Take a device state; guest memory must already hold what it had when the state was saved. A machine that
        held another guest before is told which pages are not what they were: runs of {u64 first, u64 count}."""

    def save(self, state: Path) -> None:
        """Write the device state (not the memory) of a stopped guest."""

    def run(self) -> None:
        """Let the virtual CPUs run."""

    def stop(self) -> None:
        """Stop the virtual CPUs and write every disk cache to the image file."""

    def seal_disk(self, overlay: Path) -> None:
        """Freeze the disk's image as it is and continue on `overlay`; constant time."""

    def kill(self) -> None:
        """End the process, whatever it is doing, and reap it."""

    def verdict(self) -> Exception | None:
        """Why the machine is gone, as a typed error; None while the process lives."""
