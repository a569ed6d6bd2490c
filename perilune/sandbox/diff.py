"""A guest's own pages as a file, cumulative against a memory base: header, index of runs, padding, the pages."""

import contextlib
import ctypes
import mmap
import os
import queue
import struct
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perilune.sandbox.errors import SandboxError, SnapshotCorrupt
from perilune.sandbox.files import temporary
from perilune.sandbox.memory import BATCH, PAGE, Mapping, batches, fetch

_MAGIC = b"PLMEMDIF"
_spare_buffers: list[mmap.mmap] = []  # touched already; as many as checkpoints ran at once
_libc = ctypes.CDLL(None, use_errno=True)


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
            for batch in batches(runs):
                buffer = sums.free.get()
                size = fetch(where, batch, _address(buffer))
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
    return mmap.mmap(-1, BATCH)


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

    @property
    def pages(self) -> np.ndarray:
        """Of all runs, one after another: [N, PAGE]."""
        return self.raw[self.offset :].reshape(-1, PAGE)


NOTHING = Stored(np.zeros((0, 2), np.int64), np.zeros(0, np.uint8), 0)


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


def flatten(base: Path, diff: Stored, target: Path) -> None:
    """Write a new base that holds `base` with `diff` applied; holes stay holes, pages of zeros become holes."""
    with temporary(target) as temp, temp.open("wb", buffering=0) as new, base.open("rb") as old:
        size = base.stat().st_size
        new.truncate(size)
        _copy_data(old.fileno(), new.fileno(), size)
        pages = diff.pages
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
