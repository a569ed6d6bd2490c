"""Guest memory: a base file mapped privately by all siblings, and the pages in which one guest differs from it.

A page of a private file mapping belongs to the guest alone once it is present and not the file's, or swapped out: the
kernel's pagemap tells both, with any accelerator and without dirty logging. Those pages are copied by
process_vm_readv into a diff (cumulative against the base) and put into a new process by process_vm_writev.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import queue
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perilune.sandbox.errors import SandboxError, SnapshotCorrupt, VmmDied
from perilune.sandbox.files import temporary

PAGE = 4096
_BATCH = 4 << 20  # bytes moved by one system call: fits the second-level cache better than more
_MOST_PIECES = 1024  # IOV_MAX
_MAGIC = b"PLMEMDIF"
_PIECE = np.dtype([("base", "<u8"), ("length", "<u8")])
_REGION = np.dtype([("start", "<u8"), ("end", "<u8"), ("categories", "<u8")])
_SCAN = 0xC0606610
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4
_spare_buffers: list[mmap.mmap] = []  # touched already; as many as checkpoints ran at once
_libc = ctypes.CDLL(None, use_errno=True)
_ARGUMENTS: list[Any] = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.argtypes, _call.restype = _ARGUMENTS, ctypes.c_ssize_t


@dataclass(frozen=True)
class Mapping:
    """Where guest RAM lies in the VMM process."""

    pid: int
    start: int
    size: int


def mapping(pid: int, base: Path) -> Mapping:
    """Find the mapping of `base`; VmmDied when the process is gone."""
    wanted, pieces = str(base), []
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if line.endswith(wanted):
                start, _, end = line.split()[0].partition("-")
                pieces.append((int(start, 16), int(end, 16)))
    except OSError:
        pieces = []
    if not pieces:
        raise VmmDied(f"process {pid} does not map {base.name}")
    return Mapping(pid, pieces[0][0], pieces[-1][1] - pieces[0][0])


def diverged(where: Mapping) -> np.ndarray:
    """Runs of pages that are the guest's own: int64 [N, 2] of (first page, pages)."""
    try:
        return _scan(where)
    except OSError:
        return _pagemap(where)


def _scan(where: Mapping) -> np.ndarray:
    """By the PAGEMAP_SCAN ioctl (Linux 6.7): not the file's, and present or swapped."""
    regions = np.zeros(1 << 15, _REGION)
    parts, at, end = [], where.start, where.start + where.size
    fd = os.open(f"/proc/{where.pid}/pagemap", os.O_RDONLY)
    try:
        while at < end:
            argument = bytearray(
                struct.pack("<QQQQQQQQQQQQ", 96, 0, at, end, 0, regions.ctypes.data, len(regions), 0,
                            _FILE, _FILE, _PRESENT | _SWAPPED, _FILE | _PRESENT | _SWAPPED)
            )  # fmt: skip
            count = fcntl.ioctl(fd, _SCAN, argument)
            (at,) = struct.unpack_from("<Q", argument, 32)  # walk_end
            parts.append(regions[:count].copy())
    finally:
        os.close(fd)
    found = np.concatenate(parts)
    starts, ends = found["start"].astype(np.int64), found["end"].astype(np.int64)
    return merged(np.stack([(starts - where.start) // PAGE, (ends - starts) // PAGE], 1))


def merged(runs: np.ndarray) -> np.ndarray:
    """Join runs that touch."""
    if not len(runs):
        return runs.reshape(0, 2)
    first = np.r_[True, runs[1:, 0] != runs[:-1, 0] + runs[:-1, 1]]
    at = np.flatnonzero(first)
    return np.stack([runs[at, 0], np.add.reduceat(runs[:, 1], at)], 1)


def _pagemap(where: Mapping) -> np.ndarray:
    """By reading the pagemap itself (older kernels): one u64 a page, bit 63 present, 62 swapped, 61 the file's."""
    with Path(f"/proc/{where.pid}/pagemap").open("rb") as file:
        file.seek(where.start // PAGE * 8)
        flags = np.frombuffer(file.read(where.size // PAGE * 8), "<u8")
    own = ((flags >> 62) & 1 == 1) | (((flags >> 63) & 1 == 1) & ((flags >> 61) & 1 == 0))
    edges = np.flatnonzero(np.diff(np.r_[False, own, False]))
    return np.stack([edges[::2], edges[1::2] - edges[::2]], 1).astype(np.int64)


def _batches(runs: np.ndarray) -> Iterator[np.ndarray]:
    """Split runs so that each batch fits one system call."""
    limit = _BATCH // PAGE
    pieces: list[tuple[int, int]] = []
    pages = 0
    for start, count in runs.tolist():
        while count:
            take = min(count, limit - pages)
            pieces.append((start, take))
            start, count, pages = start + take, count - take, pages + take
            if pages == limit or len(pieces) == _MOST_PIECES:
                yield np.array(pieces, np.int64)
                pieces, pages = [], 0
    if pieces:
        yield np.array(pieces, np.int64)


def _move(call: object, where: Mapping, batch: np.ndarray, local: int) -> int:
    remote = np.zeros(len(batch), _PIECE)
    remote["base"], remote["length"] = where.start + batch[:, 0] * PAGE, batch[:, 1] * PAGE
    size = int(batch[:, 1].sum()) * PAGE
    here = np.array([(local, size)], _PIECE)
    moved = call(where.pid, here.ctypes.data, 1, remote.ctypes.data, len(remote), 0)  # type: ignore[operator]
    if moved != size:
        number = ctypes.get_errno()
        raise VmmDied(f"guest memory of process {where.pid} cannot be reached: {os.strerror(number)}")
    return size


@dataclass(frozen=True)
class Diff:
    """A written diff: its length in bytes and the CRC-32 of all of it after the header."""

    size: int
    crc: int


def save(where: Mapping, runs: np.ndarray, path: Path) -> Diff:
    """Copy `runs` of a stopped guest to `path`: header, index, padding to a page, pages."""
    index = np.ascontiguousarray(runs, "<i8").tobytes()
    head = index + bytes(-(16 + len(index)) % PAGE)
    pages = int(runs[:, 1].sum()) if len(runs) else 0
    buffers = [_buffer() for _ in range(3)]
    sums = _Checksum(zlib.crc32(head), buffers)
    with path.open("wb", buffering=0) as file:
        file.write(_MAGIC + struct.pack("<Q", len(runs)) + head)
        try:
            for batch in _batches(runs):
                buffer = sums.free.get()
                size = _move(_libc.process_vm_readv, where, batch, _address(buffer))
                sums.full.put((buffer, size))
                view = memoryview(buffer)[:size]
                while view:
                    view = view[file.write(view) :]
        finally:
            crc = sums.close()
            _spare_buffers.extend(buffers)
    return Diff(16 + len(head) + pages * PAGE, crc)


def _buffer() -> mmap.mmap:
    with contextlib.suppress(IndexError):
        return _spare_buffers.pop()
    return mmap.mmap(-1, _BATCH)


class _Checksum:
    """CRC-32 of buffers on a thread of its own, beside the copying."""

    def __init__(self, crc: int, buffers: list[mmap.mmap]) -> None:
        self.free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self.full: queue.SimpleQueue[tuple[mmap.mmap, int] | None] = queue.SimpleQueue()
        for buffer in buffers:
            self.free.put(buffer)
        self._crc = crc
        self._thread = threading.Thread(target=self._sum, daemon=True)
        self._thread.start()

    def _sum(self) -> None:
        while item := self.full.get():
            buffer, size = item
            self._crc = zlib.crc32(memoryview(buffer)[:size], self._crc)
            self.free.put(buffer)

    def close(self) -> int:
        self.full.put(None)
        self._thread.join()
        return self._crc


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@dataclass(frozen=True)
class Stored:
    """A diff opened for reading: `data` starts at the first page of the first run."""

    runs: np.ndarray
    raw: np.ndarray
    offset: int


def read(path: Path, expected: Diff | None = None) -> Stored:
    """Open a diff; SnapshotCorrupt when its length or (with `expected`) its checksum is not what was written."""
    try:
        raw = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise SnapshotCorrupt(f"{path.name}: {error}") from None
    if expected and (len(raw) != expected.size or zlib.crc32(raw[16:].data) != expected.crc):
        raise SnapshotCorrupt(f"{path.parent.name}/{path.name} is not what was saved (length or checksum differs)")
    count = int.from_bytes(raw[8:16].tobytes(), "little")
    offset = 16 + count * 16 + -(16 + count * 16) % PAGE
    if raw[:8].tobytes() != _MAGIC or offset > len(raw):
        raise SnapshotCorrupt(f"{path.parent.name}/{path.name} is not a memory diff")
    runs = raw[16 : 16 + count * 16].view("<i8").reshape(-1, 2)
    if offset + int(runs[:, 1].sum()) * PAGE != len(raw):
        raise SnapshotCorrupt(f"{path.parent.name}/{path.name} is shorter or longer than its index says")
    return Stored(runs, raw, offset)


def restore(where: Mapping, diff: Stored) -> None:
    """Put a diff into a process that holds no guest yet."""
    if len(diff.runs) and int((diff.runs[:, 0] + diff.runs[:, 1]).max()) * PAGE > where.size:
        raise SnapshotCorrupt("the memory diff reaches beyond the guest's memory")
    at = diff.raw.ctypes.data + diff.offset
    for batch in _batches(diff.runs):
        at += _move(_libc.process_vm_writev, where, batch, at)


def empty(path: Path, size: int) -> None:
    """The base of a guest that boots: all holes."""
    if not path.exists():
        with temporary(path) as temp, temp.open("wb") as file:
            file.truncate(size)


def flatten(base: Path, diff: Stored, target: Path) -> None:
    """Write a new base that holds `base` with `diff` applied; holes stay holes, pages of zeros become holes."""
    with temporary(target) as temp, temp.open("wb", buffering=0) as new, base.open("rb") as old:
        size = base.stat().st_size
        new.truncate(size)
        _copy_data(old.fileno(), new.fileno(), size)
        pages = diff.raw[diff.offset :].reshape(-1, PAGE)
        at = 0
        for start, count in diff.runs.tolist():
            run = pages[at : at + count]
            _write_run(new.fileno(), start, run)
            at += count
        os.fsync(new.fileno())


def _write_run(fd: int, start: int, run: np.ndarray) -> None:
    if run.any():
        os.pwrite(fd, run.data, start * PAGE)
        return
    punched = _libc.fallocate(fd, 3, ctypes.c_long(start * PAGE), ctypes.c_long(len(run) * PAGE))
    if punched:  # a file system without holes
        os.pwrite(fd, run.data, start * PAGE)


def _copy_data(source: int, target: int, size: int) -> None:
    at = 0
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError:
            return  # no data beyond
        at = os.lseek(source, start, os.SEEK_HOLE)
        while start < at:
            moved = os.copy_file_range(source, target, min(at - start, 1 << 30), start, start)
            if not moved:
                raise SandboxError("the memory base ended while it was copied")
            start += moved
