"""Sharded safetensors: read tensor by tensor, written shard by shard, memory near one shard.

A checkpoint directory holds config.json, `model-00001-of-0000N.safetensors` and `model.safetensors.index.json`
(total_size, name -> shard); a small one may be a lone `model.safetensors`.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

WIDTHS = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
_OF_A_CHECKPOINT = (".safetensors", ".json", ".model")  # shards, index and config; the tokenizer beside them


class WeightsError(ValueError):
    """A checkpoint that cannot be read or does not fit; the message is one sentence naming file or tensor."""


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in a file, read on demand."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' own: BF16, F32, U8, ...
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.dtype]


def shard_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory, in order. Raises WeightsError if one is missing."""
    index = directory / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [directory / name for name in names]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index} is not a safetensors index: {error}.") from error
    elif (directory / "model.safetensors").is_file():
        files = [directory / "model.safetensors"]
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise WeightsError(f"{directory} lacks the shard {missing[0]} that its index names.")
    if not files:
        raise WeightsError(f"{directory} holds no *.safetensors file.")
    return files


def read_shards(directory: Path) -> Iterator[Stored]:
    """Every tensor of the directory in shard order: read them in that order and each file is opened once."""
    for path in shard_files(Path(directory)):
        file = _open(path)
        for name in file.keys():  # noqa: SIM118 - not a dict
            part = file.get_slice(name)
            yield Stored(name, tuple(part.get_shape()), part.get_dtype(), partial(_read, path, name))


def _read(path: Path, name: str) -> Tensor:
    return _open(path).get_tensor(name)


def _open(path: Path) -> Any:
    status = path.stat()
    return _opened(path, (status.st_ino, status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=1)
def _opened(path: Path, stamp: tuple[int, int, int]) -> Any:  # noqa: ARG001 - a file replaced under its name is another
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise WeightsError(f"{path} is not a readable safetensors file: {error}.") from error


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its size is known before it is made, so that shards are planned first."""

    name: str
    nbytes: int
    make: Callable[[], Tensor]


def write_shards(
    directory: Path, entries: Iterable[Entry], config: dict[str, Any], shard_bytes: int = SHARD_BYTES
) -> int:
    """Write a checkpoint directory; returns its total tensor bytes.

    Everything goes to `<directory>.partial` first, is synced, and takes its name in one rename, so that a crash or a
    full disk leaves either the old directory or none. An older checkpoint there is replaced; anything else is not:
    WeightsError.
    """
    directory = Path(directory)
    _check_target(directory)
    beside = directory.with_name(directory.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        total = _write_all(beside, list(entries), config, shard_bytes)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    replace_directory(beside, directory)
    return total


def _check_target(directory: Path) -> None:
    """Only a checkpoint may be replaced: a user's folder or file under that name must survive a typing error."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise WeightsError(f"{directory} is a file; name a directory to write to.")
    strange = [p.name for p in sorted(directory.iterdir()) if not (p.is_file() and p.name.endswith(_OF_A_CHECKPOINT))]
    if strange:
        raise WeightsError(f"{directory} holds {strange[0]}, which is no part of a checkpoint; name another directory.")


def _write_all(directory: Path, entries: list[Entry], config: dict[str, Any], shard_bytes: int) -> int:
    shards = _plan(entries, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save({e.name: e.make().contiguous() for e in shard}, directory / name)
        sync(directory / name)
        weight_map |= {e.name: name for e in shard}
    total = sum(e.nbytes for e in entries)
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    write_json(directory / "config.json", config)
    sync(directory)
    return total


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors writes for the owner alone
    except SafetensorError as error:  # carries the system's number in its text only
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _plan(entries: list[Entry], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    return shards


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    sync(path)


def sync(path: Path) -> None:
    """fsync a file or directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_directory(new: Path, target: Path) -> None:
    """`target` becomes `new`; the old one, if any, steps aside first and is removed last."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)
