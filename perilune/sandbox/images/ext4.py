"""Raw ext4 images, what sandboxes' disks stand on: an image grows by what is unpacked into it, or is made of a tree."""

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from perilune.sandbox.errors import InvalidRequest, SandboxError, SetupMissing
from perilune.sandbox.files import temporary
from perilune.sandbox.images import confined as cell


@functools.cache
def mountable() -> bool:
    """Whether this host has loop devices, so that an image can be written to as the file system that it is."""
    with tempfile.TemporaryDirectory(prefix="perilune-") as folder:
        probe = Path(folder) / "probe"
        try:
            make(probe, 1)
        except SetupMissing:
            return False
        mount = ["unshare", "-m", "mount", "-o", "loop,ro,noload", str(probe), folder]
        return shutil.which("unshare") is not None and not subprocess.run(mount, capture_output=True).returncode


def prepare(tree: Path) -> None:
    """What every guest needs in its root, whatever image it came from: mount points, host files, the user `user`.
    `tree` is a directory or an image."""
    try:
        cell.run(tree, "prepare")
    except InvalidRequest as error:
        raise InvalidRequest(f"the image is no root file system: {error}") from None


def begin(_option: str) -> Path:
    """Where a process confined to the tree finds it."""
    return Path("/")


def confined(tree: Path) -> None:
    """Links of the tree are followed within it: an image's /etc may well be one."""
    for name in ("dev", "proc", "sys", "run", "tmp", "root", "etc"):
        if not (tree / name).is_symlink():
            (tree / name).mkdir(exist_ok=True)
    (tree / "tmp").chmod(0o1777)
    for name, text in (("passwd", "root:x:0:0:root:/root:/bin/sh\n"), ("group", "root:x:0:\ntty:x:5:\n")):
        if not (tree / "etc" / name).exists():
            (tree / "etc" / name).write_text(text)
    for name in ("hostname", "resolv.conf"):  # the host says what they are after every resume
        (tree / "etc" / name).unlink(missing_ok=True)
        (tree / "etc" / name).symlink_to(f"/run/perilune/{name}")
    hosts = tree / "etc" / "hosts"
    if not hosts.exists() or not hosts.stat().st_size:
        hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
    _add_user(tree)


def _add_user(tree: Path) -> None:
    passwd, group = tree / "etc" / "passwd", tree / "etc" / "group"
    lines = [line.split(":") for line in passwd.read_text().splitlines() if line.count(":") >= 6]
    if any(line[0] == "user" for line in lines):
        return
    number = max([1000, *(int(line[2]) + 1 for line in lines if line[2].isdigit() and 1000 <= int(line[2]) < 60000)])
    shell = "/bin/bash" if (tree / "bin" / "bash").exists() or (tree / "usr" / "bin" / "bash").exists() else "/bin/sh"
    _append(passwd, f"user:x:{number}:{number}::/home/user:{shell}\n")
    _append(group, f"user:x:{number}:\n")
    home = tree / "home" / "user"
    home.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        os.chown(home, number, number)
    sudoers = tree / "etc" / "sudoers.d"
    if sudoers.is_dir():
        (sudoers / "user").write_text("user ALL=(ALL) NOPASSWD: ALL\n")
        (sudoers / "user").chmod(0o440)


def _append(file: Path, line: str) -> None:
    text = file.read_text()
    file.write_text(text + ("" if not text or text.endswith("\n") else "\n") + line)


def make(image: Path, disk_mb: int, tree: Path | None = None) -> None:
    """A sparse file system of `disk_mb` MiB, empty or with what `tree` holds; InvalidRequest when it does not fit."""
    tool = shutil.which("mke2fs") or shutil.which("mke2fs", path="/sbin:/usr/sbin")
    if not tool:
        raise SetupMissing("mke2fs is not installed: apt-get install e2fsprogs")
    with image.open("wb") as file:
        file.truncate(disk_mb << 20)
    journal = ["-J", "size=8"] if disk_mb > 32 else ["-O", "^has_journal"]
    content = ["-d", str(tree)] if tree else []
    command = [tool, "-q", "-F", "-t", "ext4", *journal, "-m", "1", "-E", "root_owner=0:0", *content, str(image)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip()[-300:]
        if "no space" in reason.lower() or "Could not allocate block" in reason:
            raise InvalidRequest(f"the image does not fit on a disk of {disk_mb} MiB")
        raise SandboxError(f"mke2fs failed: {reason}")


def pack(tree: Path, target: Path, disk_mb: int) -> None:
    """`tree` as the image `target`, which is there whole or not at all."""
    with temporary(target) as temp:
        make(temp, disk_mb, tree)
