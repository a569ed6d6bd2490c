"""Guest memory: a base file mapped privately by all siblings, and the pages in which one guest differs from it.

A page of a private file mapping belongs to the guest alone once it is present and not the file's, or swapped out: the
kernel's pagemap tells both, with any accelerator and without dirty logging. Those pages are copied by
process_vm_readv into a diff (diff.py) and put into another process by process_vm_writev.
"""

import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perilune.sandbox.errors import SnapshotCorrupt, VmmDied
from perilune.sandbox.files import temporary

PAGE = 4096
BATCH = 4 << 20  # bytes moved by one system call: fits the second-level cache better than more
_MOST_PIECES = 1024  # IOV_MAX
_PIECE = np.dtype([("base", "<u8"), ("length", "<u8")])
_REGION = np.dtype([("start", "<u8"), ("end", "<u8"), ("categories", "<u8")])
_SCAN = 0xC0606610
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4
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
    return _runs(np.flatnonzero(own))


def numbers(runs: np.ndarray) -> np.ndarray:
    """The pages in `runs`, one by one."""
    ends = np.cumsum(runs[:, 1])
    return np.arange(runs[:, 1].sum()) + np.repeat(runs[:, 0] - ends + runs[:, 1], runs[:, 1])


def _runs(pages: np.ndarray) -> np.ndarray:
    """The inverse, of ascending pages."""
    return merged(np.stack([pages, np.ones_like(pages)], 1))


def batches(runs: np.ndarray) -> Iterator[np.ndarray]:
    """Split runs so that each batch fits one system call."""
    limit = BATCH // PAGE
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


def _move(call: Any, where: Mapping, batch: np.ndarray, local: int) -> int:
    remote = np.zeros(len(batch), _PIECE)
    remote["base"], remote["length"] = where.start + batch[:, 0] * PAGE, batch[:, 1] * PAGE
    size = int(batch[:, 1].sum()) * PAGE
    here = np.array([(local, size)], _PIECE)
    moved = call(where.pid, here.ctypes.data, 1, remote.ctypes.data, len(remote), 0)
    if moved != size:
        number = ctypes.get_errno()
        raise VmmDied(f"guest memory of process {where.pid} cannot be reached: {os.strerror(number)}")
    return size


def fetch(where: Mapping, batch: np.ndarray, local: int) -> int:
    """Pages of a stopped guest to the address `local`; returns their bytes."""
    return _move(_libc.process_vm_readv, where, batch, local)


def fill(where: Mapping, runs: np.ndarray, pages: np.ndarray) -> None:
    """`pages` [N, PAGE], one after another, to the guest's `runs`; its machine must stand still."""
    if len(runs) and int((runs[:, 0] + runs[:, 1]).max()) * PAGE > where.size:
        raise SnapshotCorrupt("the memory diff reaches beyond the guest's memory")
    local = pages.ctypes.data
    for batch in batches(runs):
        local += _move(_libc.process_vm_writev, where, batch, local)


@dataclass(frozen=True)
class Own:
    """The pages in which a guest differs from its base: their numbers, ascending, and what they hold, [N, PAGE]."""

    numbers: np.ndarray
    pages: np.ndarray

    @classmethod
    def of(cls, where: Mapping) -> "Own":
        """Of a guest that stands still."""
        runs = diverged(where)
        pages = np.empty((int(runs[:, 1].sum()), PAGE), np.uint8)
        local = pages.ctypes.data
        for batch in batches(runs):
            local += fetch(where, batch, local)
        return cls(numbers(runs), pages)


def exchange(where: Mapping, base: Path, own: Own, runs: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Turn one guest on `base`, which differs from it by `own`, into another, which has `pages` [N, PAGE] in `runs`.
    Returns the runs that were written: a page that both have alike is not."""
    wanted = numbers(runs)
    _, mine, at = np.intersect1d(own.numbers, wanted, assume_unique=True, return_indices=True)
    differs = np.ones(len(wanted), bool)
    differs[at] = (own.pages[mine].view(np.uint64) != pages[at].view(np.uint64)).any(1)
    back = np.setdiff1d(own.numbers, wanted, assume_unique=True)
    fill(where, _runs(back), np.memmap(base, np.uint8, "r").reshape(-1, PAGE)[back])
    fill(where, _runs(wanted[differs]), pages if differs.all() else pages[differs])
    return _runs(np.union1d(back, wanted[differs]))


def empty(path: Path, size: int) -> None:
    """The base of a guest that boots: all holes."""
    if not path.exists():
        with temporary(path) as temp, temp.open("wb") as file:
            file.truncate(size)
