"""From sources to shards in one call: read, clean, split, train the tokenizer, tokenise.

The cleaned text is spooled to one temporary file, because the split and the tokenizer need all of it before the first
document can be tokenised; memory holds names, hashes and a batch of text.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from perilune.data.clean import Removals, clean
from perilune.data.options import DataConfig, DataError
from perilune.data.shards import (
    Prepared,
    Workspace,
    dtype_for,
    held_out_indices,
    open_shards,
    read_index,
    write_index,
    write_split,
)
from perilune.data.sources import LICENCES, Document, Skips, documents, files
from perilune.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def prepare(config: DataConfig, tokenizer: Tokenizer | None, path: Path) -> Prepared:
    """The shards of `config` at `path`: opened where they are up to date, else made (killed and run again is fine).

    Without a tokenizer, one of `config.vocab_size` is trained on the training split.
    Errors: `DataError` for a missing source, an empty corpus, a split that leaves nothing; `TokenizerError`.
    """
    key = _key(config, tokenizer)
    index = read_index(path)
    if index is None or index["key"] != key:
        with Workspace(path) as workspace:
            _build(config, tokenizer, workspace.folder, key)
            workspace.commit()
    return open_shards(path)


def _key(config: DataConfig, tokenizer: Tokenizer | None) -> str:
    """A hash of all that the shards are made from; source files count by name, size and time of change."""
    settings = asdict(config)
    named = files([*config.sources, *config.quality_good, *config.quality_bad])
    stamps = [(file.name, file.size, file.changed_ns) for file in named]
    content = json.dumps([settings, stamps, tokenizer.fingerprint if tokenizer else None])
    return hashlib.sha256(content.encode()).hexdigest()


def _build(config: DataConfig, tokenizer: Tokenizer | None, folder: Path, key: str) -> None:
    clock = Clock()
    skips, removals = Skips(), Removals()
    with Spool(folder / "spool") as spool:
        spool.fill(clean(documents(config.sources, skips), config, removals))
        clock.lap("clean")
        if not spool.names:
            raise DataError(f"no document is left of {', '.join(config.sources)}: {_reasons(skips, removals)}")
        held_out = held_out_indices(spool.names, config.held_out, config.seed)
        chosen = set(held_out)
        train = [i for i in range(len(spool.names)) if i not in chosen]
        if tokenizer is None:
            tokenizer = Tokenizer.train(spool.texts(train), config.vocab_size, config.tokenizer_bytes)
        tokenizer.save(folder / "tokenizer")
        clock.lap("tokenizer")
        splits = {
            name: write_split(folder, name, spool.documents(chosen_indices), tokenizer)
            for name, chosen_indices in (("train", train), ("held_out", held_out))
        }
        clock.lap("tokenise")
    np.save(folder / "token_bytes.npy", tokenizer.token_bytes)
    report = _report(config, skips, removals, clock)
    write_index(folder, {"key": key, **_described(tokenizer, splits), "splits": splits, "report": report})
    log.info("%s", summary(splits, report))


def _described(tokenizer: Tokenizer, splits: dict[str, dict[str, Any]]) -> dict[str, Any]:
    content = json.dumps([tokenizer.fingerprint, [split["sha256"] for split in splits.values()]])
    return {
        "fingerprint": hashlib.sha256(content.encode()).hexdigest()[:16],
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eos": tokenizer.eos,
        "dtype": dtype_for(tokenizer.vocab_size).str,
    }


def _report(config: DataConfig, skips: Skips, removals: Removals, clock: "Clock") -> dict[str, Any]:
    return {
        "sources": list(config.sources),
        "licences": {source: LICENCES[source] for source in config.sources if source in LICENCES},
        "seen": {"documents": removals.seen, "bytes": removals.seen_bytes},
        "kept": {"documents": removals.kept, "bytes": removals.kept_bytes},
        "removed": dict(removals.reasons),
        "skipped": {"counts": dict(skips.counts), "first": skips.names},
        "seconds": clock.laps,
    }


def summary(splits: dict[str, dict[str, Any]], report: dict[str, Any]) -> str:
    """A few lines for the terminal."""
    lines = [
        f"{name}: {split['documents']} documents, {split['bytes'] / 1e6:.2f} MB, {split['tokens']} tokens"
        for name, split in splits.items()
    ]
    lines += [f"removed {count}: {reason}" for reason, count in report["removed"].items()]
    lines += [f"skipped {count}: {reason}" for reason, count in report["skipped"]["counts"].items()]
    lines += [f"licence of {source}: {licence}" for source, licence in report["licences"].items()]
    return "\n".join([*lines, ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report["seconds"].items())])


def _reasons(skips: Skips, removals: Removals) -> str:
    removed = [f"{count} removed ({reason})" for reason, count in removals.reasons.items()]
    skipped = [f"{count} skipped ({reason})" for reason, count in skips.counts.items()]
    return ", ".join(removed + skipped) or "the files are empty"


class Clock:
    """Seconds of each phase."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._start = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self._start, 2)
        self._start = now


class Spool:
    """Texts in one temporary file, read back by number."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.names: list[str] = []
        self._ends: list[int] = [0]

    def __enter__(self) -> "Spool":
        self._handle = self._file.open("w+b")
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.close()
        self._file.unlink()

    def fill(self, documents: Iterable[Document]) -> None:
        for document in documents:
            self.names.append(document.name)
            self._ends.append(self._ends[-1] + self._handle.write(document.text.encode()))

    def documents(self, indices: Sequence[int]) -> Iterator[tuple[str, str]]:
        for i in indices:
            self._handle.seek(self._ends[i])
            yield self.names[i], self._handle.read(self._ends[i + 1] - self._ends[i]).decode()

    def texts(self, indices: Sequence[int]) -> Iterator[str]:
        return (text for _, text in self.documents(indices))
