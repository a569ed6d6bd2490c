"""What this host has for sandboxes, what it lacks, and the command that fixes it."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from perilune.sandbox import guard, limits, setup
from perilune.sandbox.errors import SetupMissing
from perilune.sandbox.images import ext4
from perilune.sandbox.vmm import accel, qemu

_LOOPS = {True: "yes", False: "absent: images are packed from trees, in twice the time"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. `needed` ones must be good before a sandbox can start."""

    what: str
    good: bool
    detail: str
    fix: str = ""
    needed: bool = False


def _program(name: str, package: str, purpose: str, needed: bool = False) -> Finding:
    path = shutil.which(name) or shutil.which(name, path="/sbin:/usr/sbin")
    return Finding(
        name, bool(path), path or f"absent ({purpose})", "" if path else f"apt-get install {package}", needed
    )


def _qemu() -> Finding:
    try:
        return Finding("QEMU", True, qemu.version(), needed=True)
    except SetupMissing as error:
        return Finding("QEMU", False, "absent", str(error).split(": ", 1)[-1], needed=True)


def _accelerator() -> list[Finding]:
    found = accel.probe()
    chosen = accel.choose(found)
    detail = {
        "hardware": "hardware virtualisation",
        "emulated": "this KVM emulates guest kernels: slower than TCG unless the kernel is built for it (PVM)",
    }.get(found.kind, "no KVM")
    fix = "" if found.kind == "hardware" else "TCG works, 4 to 30 times slower inside; for speed use a host with KVM"
    return [
        Finding("KVM", found.kind == "hardware", f"{found.detail}; {detail}", fix),
        Finding("accelerator", True, chosen),
    ]


def _guest(home: Path) -> Finding:
    try:
        guest = setup.load(home)
    except SetupMissing as error:
        return Finding("guest", False, str(error), "perilune sandbox setup", needed=True)
    return Finding("guest", True, f"{guest.kernel} on {guest.machine}, {guest.accelerator}", needed=True)


def _privileges() -> Finding:
    root = os.geteuid() == 0
    return Finding("root", root, "yes" if root else "no", "" if root else "run as root, or give CAP_SYS_PTRACE", True)


def examine(home: Path) -> list[Finding]:
    """Everything, in the order in which to fix it."""
    version = limits.version()
    cgroups = {2: "version 2", 1: "version 1"}.get(version, "not writable: only QEMU's own limits hold")
    rates = limits.io(_existing(home))
    tap, free = Path("/dev/net/tun").exists(), guard.free_mb(_existing(home))
    return [
        _qemu(),
        _program("qemu-img", "qemu-utils", "flattens disk chains", needed=True),
        _program("mke2fs", "e2fsprogs", "makes disk images", needed=True),
        _program("cc", "gcc libc6-dev", "builds the guest's agent", needed=True),
        _privileges(),
        _guest(home),
        *_accelerator(),
        Finding("cgroups", version > 0, cgroups, "" if version else "mount -t cgroup2 none /sys/fs/cgroup"),
        Finding("disk rates", True, f"the kernel's {rates}, and QEMU's own" if rates else "QEMU's own"),
        Finding(
            "tap", tap, "/dev/net/tun" if tap else "absent: sandboxes have no network", "" if tap else "modprobe tun"
        ),
        _program("nft", "nftables", "network rules"),
        _program("ip", "iproute2", "network namespaces"),
        _program("skopeo", "skopeo", "fetches images from registries"),
        _program("debootstrap", "debootstrap", "makes the default template"),
        Finding(
            "loop devices", ext4.mountable(), _LOOPS[ext4.mountable()], "" if ext4.mountable() else "modprobe loop"
        ),
        _program("bwrap", "bubblewrap", "the process backend"),
        Finding("memory", guard.available_mb() > 512, f"{guard.available_mb()} MiB available"),
        Finding("disk", free > 2048, f"{free} MiB free under {home}"),
    ]


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
