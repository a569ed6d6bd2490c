"""Packed batches whose position is one integer.

An epoch lays the documents out in a seeded order as one stream; epochs follow each other without a gap. The stream is
cut into rows of `context` tokens, and the rows that begin in one epoch are dealt in a second seeded order, so that the
rows of a batch come from different documents. No token is padded, dropped or, within an epoch, repeated.

    position p = number of rows dealt so far;  epoch e = floor(p * context / tokens)
    row(p) = first + shuffle_e[p - first],     first = ceil(e * tokens / context)

A batch is computed from its position alone: nothing is replayed, and the batch size, the number of ranks or of
accumulation steps may change on the way. The orders sort a hash, so they are the same under any version of numpy.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from perilune.data.options import DataError
from perilune.data.shards import Shard

NO_TARGET = -100  # what torch's cross-entropy leaves out


@dataclass(frozen=True)
class Batch:
    """Rows one after the other: `tokens`, `targets` int64 `[T]`, T = rows * context.

    `targets[t]` is the token after t in the same document, -100 where there is none. `lengths` sums to T: the sequences
    that the model must keep apart. `n_bytes` is the text behind the targets (eos has none), so that
    nats / ln 2 / n_bytes is exact. `position` is that of the global batch, `next_position` that of the next.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    lengths: tuple[int, ...]
    n_bytes: int
    position: int
    next_position: int


class Batches:
    """The training order of a shard. `rows` is the global batch; rank r of `world` gets its r-th part."""

    def __init__(
        self,
        shard: Shard,
        context: int,
        rows: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        reset_at_documents: bool = True,
    ) -> None:
        if not shard.n_tokens:
            raise DataError("the training split has no tokens")
        if rows % world:
            raise DataError(f"a batch of {rows} rows does not divide among {world} ranks")
        self.shard, self.context, self.rows, self.seed = shard, context, rows, seed
        self.rank, self.world, self.reset_at_documents = rank, world, reset_at_documents
        self._epoch = lru_cache(maxsize=3)(self._lay_out)
        self._shuffle = lru_cache(maxsize=2)(self._deal)

    def at(self, position: int) -> Batch:
        """This rank's part of the batch that begins at `position`."""
        share = self.rows // self.world
        begin = position + self.rank * share
        rows = [self._row(self._row_at(p)) for p in range(begin, begin + share)]
        return _batch(rows, self.shard, position, position + self.rows)

    def iterate(self, position: int = 0) -> Iterator[Batch]:
        """Batches from `position` on, without end."""
        while True:
            batch = self.at(position)
            yield batch
            position = batch.next_position

    def epoch(self, position: int) -> float:
        """Passes over the training split made when `position` is reached."""
        return position * self.context / self.shard.n_tokens

    # ------------------------------------------------------------------ inside

    def _row_at(self, position: int) -> int:
        epoch = position * self.context // self.shard.n_tokens
        first, shuffle = self._shuffle(epoch)
        return first + int(shuffle[position - first])

    def _deal(self, epoch: int) -> tuple[int, np.ndarray]:
        first, end = (math.ceil(e * self.shard.n_tokens / self.context) for e in (epoch, epoch + 1))
        return first, permutation(end - first, self.seed, "rows", epoch)

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents in the order of an epoch, and where each ends in that epoch's stream."""
        order = permutation(self.shard.n_documents, self.seed, "documents", epoch)
        return order, np.cumsum(np.diff(self.shard.ends, prepend=0)[order])

    def _row(self, row: int) -> "Row":
        tokens, ends = self._read(row * self.context, self.context + 1)
        return make_row(tokens, ends, self.reset_at_documents)

    def _read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`count` tokens of the endless stream from `start`, and where in them documents end."""
        tokens, ends = [], []
        for begin in _pieces(start, count, self.shard.n_tokens):
            order, stops = self._epoch(begin // self.shard.n_tokens)
            offset = begin % self.shard.n_tokens
            take = min(start + count - begin, self.shard.n_tokens - offset)
            first, last = np.searchsorted(stops, [offset, offset + take - 1], side="right")
            for i in range(first, last + 1):
                document = self.shard.document(int(order[i]))
                origin = int(stops[i]) - len(document)
                tokens.append(document[max(offset - origin, 0) : offset + take - origin])
                ends.append(int(stops[i]) - offset + begin - start)
        return np.concatenate(tokens).astype(np.int64), np.array([end for end in ends if end <= count], np.int64)


Row = tuple[np.ndarray, np.ndarray, list[int]]


def make_row(tokens: np.ndarray, ends: np.ndarray, reset: bool) -> Row:
    """Inputs, targets and lengths of a row, from its tokens and the one after (if any) and the document ends."""
    size = max(len(tokens) - 1, 0)
    inputs, targets = tokens[:size], tokens[1:].copy()
    if not reset:
        return inputs, targets, [size]
    inside = ends[ends <= size]
    targets[inside - 1] = NO_TARGET
    borders = [0, *inside.tolist()] + ([size] if not len(inside) or inside[-1] < size else [])
    return inputs, targets, np.diff(borders).tolist()


def held_out_batches(shard: Shard, context: int, rows: int, reset_at_documents: bool = True) -> Iterator[Batch]:
    """Every held-out token once, in file order, in packed windows; only the last batch may be short."""
    total = shard.n_tokens
    for first in range(0, total, rows * context):
        made = []
        for start in range(first, min(first + rows * context, total), context):
            stop = min(start + context, total)
            # The last token of the shard is an eos, so the token that stands for its successor is never a target.
            tokens = np.append(shard.tokens[start:stop], shard.tokens[stop : stop + 1] if stop < total else 0)
            ends = shard.ends[np.searchsorted(shard.ends, start, side="right") :] - start
            row = make_row(
                tokens.astype(np.int64), ends[: np.searchsorted(ends, context, side="right")], reset_at_documents
            )
            if stop == total:
                row[1][-1] = NO_TARGET
            made.append(row)
        yield _batch(made, shard, first // context, first // context + rows)


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """From the summed negative log-likelihood of the targets and `Batch.n_bytes`, summed likewise."""
    return nats / math.log(2) / n_bytes


def permutation(n: int, *seed: int | str) -> np.ndarray:
    """A permutation of 0..n-1 that depends on `n` and `seed` only: the order of SplitMix64 hashes. int64 `[n]`."""
    start = int.from_bytes(hashlib.blake2b(repr(seed).encode(), digest_size=8).digest(), "little")
    x = (np.arange(n, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")


def _pieces(start: int, count: int, period: int) -> Iterator[int]:
    """Where the parts of [start, start + count) begin when it is cut at multiples of `period`."""
    yield start
    yield from range((start // period + 1) * period, start + count, period)


def _batch(rows: list[Row], shard: Shard, position: int, next_position: int) -> Batch:
    tokens, targets = (np.concatenate([row[i] for row in rows]) for i in (0, 1))
    n_bytes = int(shard.token_bytes[targets[targets != NO_TARGET]].sum(dtype=np.int64))
    lengths = tuple(length for row in rows for length in row[2])
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), lengths, n_bytes, position, next_position)
