"""Files that are there whole or not at all."""

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from perilune.sandbox.errors import DiskFull, SandboxError


@contextlib.contextmanager
def on_host(doing: str) -> Iterator[None]:
    """An OSError of this host's files as DiskFull or SandboxError."""
    try:
        yield
    except OSError as error:
        kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else SandboxError
        raise kind(f"{doing} failed on this host: {error.strerror}") from error


@contextlib.contextmanager
def temporary(target: Path) -> Iterator[Path]:
    """A name beside `target` to write to; renamed to `target` on success, removed on failure."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temp = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp{target.suffix}")
    try:
        yield temp
        os.rename(temp, target)  # noqa: PTH104 - the one that replaces an empty directory too
    except BaseException:
        if temp.is_dir():
            shutil.rmtree(temp, ignore_errors=True)
        temp.unlink(missing_ok=True)
        raise


def write_atomically(target: Path, data: bytes) -> None:
    """The whole of `data`, on the device before it gets its name."""
    with temporary(target) as temp, temp.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """A file's data, or a directory's names, to the device."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """A file or a tree; no error when it is gone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
