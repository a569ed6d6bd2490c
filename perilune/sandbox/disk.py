"""Disks: a raw base and a chain of qcow2 overlays on it.

A sandbox writes to the overlay on top. Sealing makes that one immutable and stacks an empty one: constant time,
whatever was written. Files name the layer below by a relative path, so a store may move as a whole.
"""

import os
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from perilune.sandbox.errors import SandboxError, SnapshotCorrupt
from perilune.sandbox.files import temporary

_CLUSTER_BITS, _CLUSTER = 16, 1 << 16
_MAGIC, _FORMAT_EXTENSION = 0x514649FB, 0xE2792ACA
_SECTOR = 512
_HEADER = struct.Struct(">IIQIIQIIQQIIQQQQII")


def overlay(path: Path, below: Path, size: int) -> None:
    """Write an empty qcow2 of `size` bytes that stands on `below` (.raw or .qcow2), named relative to `path`."""
    name = os.path.relpath(below, path.parent).encode()
    form = b"raw" if below.suffix == ".raw" else b"qcow2"
    entries = -(-size // (_CLUSTER * (_CLUSTER // 8)))  # one L1 entry for each L2 table
    l1_clusters = -(-entries * 8 // _CLUSTER)
    extension = struct.pack(">II", _FORMAT_EXTENSION, len(form)) + form.ljust(-(-len(form) // 8) * 8, b"\0") + bytes(8)
    offset = _HEADER.size + len(extension)
    header = _HEADER.pack(
        _MAGIC, 3, offset, len(name), _CLUSTER_BITS, size, 0, entries, 3 * _CLUSTER, _CLUSTER, 1, 0, 0, 0, 0, 0, 4, 104
    )  # fmt: skip
    used = 3 + l1_clusters  # header, refcount table, refcount block, L1
    with path.open("wb") as file:
        file.write(header + extension + name)
        file.seek(_CLUSTER)
        file.write(struct.pack(">Q", 2 * _CLUSTER))
        file.seek(2 * _CLUSTER)
        file.write(struct.pack(">H", 1) * used)
        file.truncate(used * _CLUSTER)


@dataclass(frozen=True)
class Header:
    """What a qcow2 file says about itself: bytes it shows, and the file below."""

    size: int
    below: Path | None


def header(path: Path) -> Header:
    """Read a qcow2 header; SnapshotCorrupt when it is none."""
    try:
        with path.open("rb") as file:
            raw = file.read(_CLUSTER)
    except OSError as error:
        raise SnapshotCorrupt(f"disk layer {path.name}: {error.strerror}") from None
    if len(raw) < _HEADER.size:
        raise SnapshotCorrupt(f"disk layer {path.name} is shorter than a header")
    magic, _, offset, length, _, size, *_ = _HEADER.unpack_from(raw)
    if magic != _MAGIC:
        raise SnapshotCorrupt(f"disk layer {path.name} is not a qcow2 image")
    below = (path.parent / os.fsdecode(raw[offset : offset + length])) if length else None
    return Header(size, Path(os.path.normpath(below)) if below else None)


def chain(top: Path) -> list[Path]:
    """The files from `top` down to the raw base."""
    files = [top]
    while files[-1].suffix != ".raw":
        below = header(files[-1]).below
        if below is None:
            break
        files.append(below)
    return files


def size_of(top: Path) -> int:
    """The disk's size in bytes."""
    return top.stat().st_size if top.suffix == ".raw" else header(top).size


def rebase(layer: Path, below: Path) -> None:
    """Let a layer stand on `below`, which shows what it stood on so far. Who has it open notices nothing."""
    name = os.path.relpath(below, layer.parent).encode()
    with layer.open("r+b") as file:
        head = bytearray(os.pread(file.fileno(), _SECTOR, 0))
        (offset,) = struct.unpack_from(">Q", head, 8)
        if offset + len(name) > _SECTOR:
            raise SandboxError(f"disk layer {layer.name} has no room for the name {name.decode()}")
        struct.pack_into(">I", head, 16, len(name))
        head[offset : offset + len(name)] = name
        os.pwrite(file.fileno(), head, 0)  # one sector: there as a whole or not at all


def flatten(top: Path, target: Path) -> None:
    """Write to `target` one qcow2 on the raw base that shows what the sealed chain at `top` shows."""
    base = chain(top)[-1]
    with temporary(target) as temp:
        _image_tool("cp", "--sparse=always", "--reflink=auto", str(top), str(temp))
        relative = os.path.relpath(base, temp.parent)
        _image_tool("qemu-img", "rebase", "-f", "qcow2", "-F", "raw", "-b", relative, "-t", "writeback", str(temp))


def _image_tool(*command: str) -> None:
    cwd = Path(command[-1]).parent  # qemu-img reads a relative backing name from the image's folder, cp does not care
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        raise SandboxError(f"{command[0]} failed on {Path(command[-1]).name}: {done.stderr.strip()}")
