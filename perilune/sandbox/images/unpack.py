"""Tar archives from strangers into a directory: nothing may leave it, whatever names, links and whiteouts it holds.

A process of its own enters the directory by chroot before it reads the first name, so that the kernel, not our reading
of paths, keeps `//etc`, `..` and links inside. Checking names alone is not enough: pathlib keeps a leading `//` as a
root of its own, and joining it leaves the directory.
"""

import os
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

from perilune.sandbox.errors import InvalidRequest

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"


def inside(root: Path, name: str, depth: int = 0) -> Path:
    """Where `name` lies under `root`, with every link of its parents resolved as if `root` were /."""
    if depth > 40:
        raise InvalidRequest(f"{name!r} has too many symbolic links")
    at = root
    parts = [part for part in name.split("/") if part not in ("", ".")]
    for i, part in enumerate(parts):
        if part == "..":
            at = at.parent if at != root else root
            continue
        at = at / part
        if i < len(parts) - 1 and at.is_symlink():
            link = os.readlink(at)  # noqa: PTH115 - a text, not a path of this host
            before = "" if link.startswith("/") else str(at.parent.relative_to(root))
            at = inside(root, f"{before}/{link}/_", depth + 1).parent
    return at


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _whiteout(root: Path, path: Path) -> bool:
    """Apply a layer's deletion marks; True when `path` was one."""
    if path.name == _OPAQUE:
        for child in list(path.parent.iterdir()) if path.parent.is_dir() else []:
            _clear(child)
        return True
    if path.name.startswith(_WHITEOUT):
        victim = path.name.removeprefix(_WHITEOUT)
        if victim in ("", ".", "..") or path.parent == path:
            raise InvalidRequest(f"{path.name!r} is no valid whiteout")
        if (path.parent / victim) != root:
            _clear(path.parent / victim)
        return True
    return False


def _place(archive: tarfile.TarFile, member: tarfile.TarInfo, root: Path, path: Path) -> None:
    if member.isdir():
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            _clear(path)
        path.mkdir(exist_ok=True)
        return
    _clear(path)
    if member.issym():
        path.symlink_to(member.linkname)
    elif member.islnk():
        os.link(inside(root, member.linkname), path, follow_symlinks=False)
    elif member.isfile():
        source = archive.extractfile(member)
        assert source is not None
        with path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    elif member.isfifo():
        os.mkfifo(path)
    elif member.ischr() or member.isblk():
        kind = stat.S_IFCHR if member.ischr() else stat.S_IFBLK
        os.mknod(path, kind | 0o600, os.makedev(member.devmajor, member.devminor))


def _attributes(member: tarfile.TarInfo, path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, member.uid, member.gid, follow_symlinks=False)
    if not member.issym():
        path.chmod(member.mode & 0o7777)
    os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)


def unpack(archive: Path, root: Path, whiteouts: bool = False) -> None:
    """Extract a tar (plain, gzip, bzip2, xz or zstd) under `root`; with `whiteouts`, as an image layer. Needs root."""
    root.mkdir(parents=True, exist_ok=True)
    plain = _plain(archive)
    with plain.open("rb") as file:
        command = [sys.executable, "-m", __name__, str(root.absolute()), str(int(whiteouts))]
        done = subprocess.run(command, stdin=file, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it ended without a reason"])[-1]
        raise InvalidRequest(f"{archive.name} cannot be unpacked: {reason}")


def _confined(root: str, whiteouts: bool) -> None:
    """In the child: enter `root`, then extract what comes on standard input."""
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r:*") as tar:  # codecs are loaded before the rest is out of reach
        os.chroot(root)
        os.chdir("/")
        _extract(tar, Path("/"), whiteouts)


def _extract(tar: tarfile.TarFile, root: Path, whiteouts: bool) -> None:
    late: list[tuple[tarfile.TarInfo, Path]] = []  # directories get their times last
    for member in tar:
        path = inside(root, member.name)
        if path == root or (whiteouts and _whiteout(root, path)):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        _place(tar, member, root, path)
        if member.isdir():
            late.append((member, path))
        elif not member.islnk():
            _attributes(member, path)
    for member, path in reversed(late):
        if path.is_dir() and not path.is_symlink():
            _attributes(member, path)


def _plain(archive: Path) -> Path:
    """The archive itself, or beside it what zstd makes of it (tarfile reads the other compressions)."""
    with archive.open("rb") as file:
        if file.read(4) != b"\x28\xb5\x2f\xfd":
            return archive
    plain = archive.with_suffix(".plain.tar")
    done = subprocess.run(["zstd", "-q", "-d", "-f", str(archive), "-o", str(plain)], capture_output=True, text=True)
    if done.returncode:
        raise InvalidRequest(f"{archive.name} cannot be unpacked: {done.stderr.strip()}")
    return plain


if __name__ == "__main__":
    try:
        _confined(sys.argv[1], sys.argv[2] == "1")
    except (tarfile.TarError, EOFError, OSError, InvalidRequest) as error:
        sys.exit(str(error))
