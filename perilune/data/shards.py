"""Shards: each split tokenised once into one flat file of ids that is memory-mapped ever after.

    index.json            what was made from what: key, fingerprint, counts, dtype, report
    tokenizer/            the tokenizer whose ids these are
    token_bytes.npy       int32 [vocab]: bytes of text each id stands for
    train.bin             uint16 or uint32 [tokens]: the documents one after the other, each ended by eos
    train.npy             int64 [documents, 2]: tokens (eos included) and bytes (eos has none) of each document
    train.names           name of each document, a JSON string a line
    held_out.bin, .npy, .names

The directory is written under a temporary name, synced and renamed, so it is whole or absent. It is made again when
its key, a hash of configuration, source files and tokenizer, no longer fits.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perilune.data.options import DataError
from perilune.model.shards import sync
from perilune.tokenizer import Tokenizer

INDEX, FORMAT = "index.json", 1
SPLITS = ("train", "held_out")
_BATCH_CHARS = 4_000_000  # text encoded at once


@dataclass(frozen=True)
class Shard:
    """One split: `tokens` `[n_tokens]` memory-mapped; `ends` and `sizes` int64 `[n_documents]`.

    `ends[i]` is where document i ends in `tokens`; `sizes[i]` its bytes of UTF-8. `token_bytes` int32 `[vocab]`.
    """

    tokens: np.ndarray
    ends: np.ndarray
    sizes: np.ndarray
    token_bytes: np.ndarray
    names: tuple[str, ...] = field(default=(), repr=False)

    @property
    def n_documents(self) -> int:
        return len(self.ends)

    @property
    def n_tokens(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def n_bytes(self) -> int:
        return int(self.sizes.sum())

    def document(self, i: int) -> np.ndarray:
        """Ids of document i, eos included."""
        return self.tokens[self.ends[i - 1] if i else 0 : self.ends[i]]


@dataclass(frozen=True)
class Prepared:
    """A finished data directory. `fingerprint` is a hash of its content, `index` what index.json holds."""

    path: Path
    train: Shard
    held_out: Shard
    index: dict[str, Any] = field(repr=False)

    @property
    def fingerprint(self) -> str:
        return str(self.index["fingerprint"])

    @property
    def vocab_size(self) -> int:
        return int(self.index["vocab_size"])

    @property
    def eos(self) -> int:
        return int(self.index["eos"])

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.path)


def open_shards(path: Path) -> Prepared:
    """Maps a finished data directory; sizes are checked against the index."""
    index = read_index(path)
    if index is None:
        raise DataError(f"{path} holds no finished shards")
    token_bytes = np.load(path / "token_bytes.npy")
    train, held_out = (_open_split(path, split, index, token_bytes) for split in SPLITS)
    return Prepared(path, train, held_out, index)


def read_index(path: Path) -> dict[str, Any] | None:
    """The index of a finished directory in this format, else None."""
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return index if isinstance(index, dict) and index.get("format") == FORMAT else None


def _open_split(path: Path, split: str, index: dict[str, Any], token_bytes: np.ndarray) -> Shard:
    table = np.load(path / f"{split}.npy")
    names = tuple(json.loads(line) for line in (path / f"{split}.names").read_text(encoding="utf-8").splitlines())
    file, dtype = path / f"{split}.bin", np.dtype(index["dtype"])
    expected = int(table[:, 0].sum()) * dtype.itemsize
    if file.stat().st_size != expected:
        raise DataError(f"{file} has {file.stat().st_size} bytes where the index says {expected}; remove {path}")
    # numpy cannot map an empty file
    tokens = np.memmap(file, dtype, "r") if expected else np.zeros(0, dtype)
    return Shard(tokens, np.cumsum(table[:, 0]), table[:, 1], token_bytes, names)


# ---------------------------------------------------------------------- writing


class Workspace:
    """The directory under its temporary name: `with Workspace(path) as folder: ... ; commit()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path.with_name(path.name + ".tmp")
        self._old = path.with_name(path.name + ".old")

    def __enter__(self) -> "Workspace":
        if self.path.exists() and not (self.path / INDEX).is_file() and any(self.path.iterdir()):
            raise DataError(f"{self.path} holds other files; shards need a directory of their own")
        for left_over in (self.folder, self._old):
            shutil.rmtree(left_over, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def commit(self) -> None:
        """Syncs every file, then moves the directory into place."""
        for file in sorted(self.folder.rglob("*")):
            sync(file)
        sync(self.folder)
        if self.path.exists():
            self.path.rename(self._old)
        self.folder.rename(self.path)
        sync(self.path.parent)
        shutil.rmtree(self._old, ignore_errors=True)


def write_split(folder: Path, split: str, documents: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokenises (name, text) pairs into the three files of a split; returns counts and a hash of the content."""
    rows: list[tuple[int, int]] = []
    digest, dtype = hashlib.sha256(), dtype_for(tokenizer.vocab_size)
    threads = os.cpu_count() or 1
    with (folder / f"{split}.bin").open("wb") as out, (folder / f"{split}.names").open("w", encoding="utf-8") as names:
        for batch in _batches(documents):
            texts = [text for _, text in batch]
            for (name, text), ids in zip(batch, tokenizer.encode_batch(texts, threads)):
                content = np.array([*ids, tokenizer.eos], dtype).tobytes()
                out.write(content)
                digest.update(content)
                names.write(json.dumps(name) + "\n")
                rows.append((len(ids) + 1, len(text.encode())))
    table = np.array(rows, np.int64).reshape(-1, 2)
    np.save(folder / f"{split}.npy", table)
    digest.update(table.tobytes())
    tokens, size = (int(total) for total in table.sum(axis=0))
    return {"documents": len(table), "tokens": tokens, "bytes": size, "sha256": digest.hexdigest()}


def write_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"format": FORMAT, **index}, indent=1) + "\n", encoding="utf-8")


def dtype_for(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# ---------------------------------------------------------------------- split


def held_out_indices(names: Sequence[str], held_out: float, seed: int) -> list[int]:
    """Which documents are held out, ascending: those with the smallest hash of seed and name, a share or a count."""
    if not held_out:
        return []
    count = round(held_out * len(names)) if held_out < 1 else int(held_out)
    count = max(count, 1)
    if count >= len(names):
        raise DataError(
            f"data.held_out = {held_out:g} holds out {count} of {len(names)} whole documents, none is left "
            "to train on; give more documents, or 0 to hold out none"
        )
    keys = [hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest() for name in names]
    return sorted(sorted(range(len(names)), key=lambda i: (keys[i], i))[:count])
