"""Tar archives from strangers into a directory: nothing may leave it, whatever names, links and whiteouts it holds.

Extraction happens in a process confined to the directory (confined.py). Device nodes are left out: a guest has a /dev
of its own, and on this host they would open its disks.
"""

import os
import queue
import shutil
import subprocess
import sys
import tarfile
import threading
import zlib
from pathlib import Path
from typing import IO, cast

from perilune.sandbox.errors import InvalidRequest
from perilune.sandbox.images import confined as cell
from perilune.sandbox.images import ext4

_MOST_BYTES, _MOST_MEMBERS = 32 << 30, 1_000_000  # of one archive
_MOST_PADDING = 64 << 20
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


def _attributes(member: tarfile.TarInfo, path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, member.uid, member.gid, follow_symlinks=False)
    if not member.issym():
        path.chmod(member.mode & 0o7777)
    os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)


def unpack(archive: Path, root: Path, whiteouts: bool = False, last: bool = False) -> None:
    """Extract a tar (plain, gzip, bzip2, xz or zstd) under `root`, a directory or an ext4 image; with `whiteouts`, as
    an image layer; after the `last` one the tree becomes a guest's root (ext4.prepare). Needs root."""
    if not root.is_file():
        root.mkdir(parents=True, exist_ok=True)
    option = f"{'whiteouts' if whiteouts else ''} {'last' if last else ''}"
    try:
        with archive.open("rb", buffering=0) as file:
            compressed = file.read(4) == b"\x28\xb5\x2f\xfd"
            file.seek(0)
            if compressed:
                _unpack_zstd(file, root, option)
            else:
                cell.run(root, "unpack", option, file)
    except (InvalidRequest, OSError) as error:
        raise InvalidRequest(f"{archive.name} cannot be unpacked: {error}") from None


def _unpack_zstd(file: IO[bytes], root: Path, option: str) -> None:
    """Through the zstd program: Python reads the other compressions itself."""
    with subprocess.Popen(["zstd", "-q", "-d", "-c"], stdin=file, stdout=subprocess.PIPE) as plain:
        assert plain.stdout is not None
        cell.run(root, "unpack", option, plain.stdout)
    if plain.returncode:
        raise InvalidRequest("zstd says that it is damaged")


class Ahead:
    """A gzip file, decompressed by a thread ahead of whoever reads it: zlib lets go of the interpreter meanwhile."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._pieces = file, queue.Queue[bytes | Exception](64)
        threading.Thread(target=self._inflate, daemon=True).start()

    def _inflate(self) -> None:
        member, begun = zlib.decompressobj(31), False
        try:
            while data := self._file.read(1 << 14):
                data = data if begun else data.lstrip(b"\0")  # padding
                while data:
                    begun = True
                    if piece := member.decompress(data):
                        self._pieces.put(piece)
                    data = b""
                    if member.eof:  # another one may follow
                        data, member, begun = member.unused_data.lstrip(b"\0"), zlib.decompressobj(31), False
            self._pieces.put(EOFError("it ends in the middle") if begun else b"")
        except Exception as error:
            self._pieces.put(error)

    def read(self, _size: int) -> bytes:
        """The next piece, of any size; empty at the end."""
        piece = self._pieces.get()
        if isinstance(piece, Exception):
            raise piece
        return piece


def begin(option: str) -> tuple[IO[bytes], str, str]:
    """The archive on standard input, how to read it, and what to do."""
    source = sys.stdin.buffer
    if not source.seekable():
        return source, "r|", option
    magic = os.pread(source.fileno(), 2, 0)
    return source, "gzip" if magic == b"\x1f\x8b" else "r:*", option


def confined(begun: tuple[IO[bytes], str, str]) -> None:
    """Extract into what is / by now."""
    source, mode, option = begun
    if mode == "gzip":  # its thread starts here, for it must not have more rights than we kept
        source, mode = cast("IO[bytes]", Ahead(source)), "r|"
    with tarfile.open(fileobj=source, mode=mode) as tar:  # type: ignore[call-overload]
        _extract(tar, Path("/"), "whiteouts" in option)
    rest = 0  # padding; what is cut short or damaged there says so, and no thread reads on when we end
    while mode == "r|" and (piece := source.read(1 << 16)):
        rest += len(piece)
        if rest > _MOST_PADDING:
            raise InvalidRequest(f"more than {_MOST_PADDING >> 20} MiB follow its end")
    if "last" in option:
        ext4.confined(Path("/"))


def _extract(tar: tarfile.TarFile, root: Path, whiteouts: bool) -> None:
    late: list[tuple[tarfile.TarInfo, Path]] = []  # directories get their times last
    size = 0
    for count, member in enumerate(tar):
        size += member.size
        if size > _MOST_BYTES or count > _MOST_MEMBERS:
            raise InvalidRequest(f"it holds more than {_MOST_BYTES >> 30} GiB or {_MOST_MEMBERS} files")
        path = inside(root, member.name)
        if path == root or (whiteouts and _whiteout(root, path)):
            continue
        if member.isdev() and not member.isfifo():
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
